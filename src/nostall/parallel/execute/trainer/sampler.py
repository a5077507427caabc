"""Sampler that gives a rank its own samples of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from nostall.parallel.errors import BadPlan


class OwnSampler(Sampler[list[int]]):  # type: ignore[misc]
    """Lists of the samples of a data set that this rank reads, one list for each batch.

    Give it to a ``DataLoader`` as ``batch_sampler``.  All ranks shuffle alike: the order depends on
    the seed and the epoch.  A rank that reads no sample gets the first of each batch, so that its
    loader has something to return.

    An iteration begins where training stopped; after the last batch of an epoch it begins the next
    epoch.  ``state_dict`` counts the batches that were trained on, not those that a loader has read
    ahead, and fits any plan.
    """

    def __init__(
        self,
        size: int,
        batch: int,
        own: Callable[[int], Sequence[int]],
        passes: Callable[[], int],
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        """``size`` is that of the data set, ``batch`` the samples of a whole batch.

        ``own`` gives the places in a whole batch of a number of samples that the rank reads, and
        ``passes`` the number of batches that were trained on so far.
        """
        if size < (batch if drop_last else 1):
            raise BadPlan(
                f"the data set has {size} samples and a batch of the plan {batch}; give more "
                "samples, drop_last=False, or plan with a smaller --global-batch"
            )
        self.size, self.batch, self.shuffle, self.seed = size, batch, shuffle, seed
        self.drop_last = drop_last
        self._own, self._passes = own, passes
        self._start, self._passes_at_start = 0, passes()
        self._epoch = 0
        self._loaded: int | None = None
        """Samples of the epoch in a state that was loaded, until an iteration begins."""

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next batch."""
        return self._epoch + self._is_over(self._consumed())

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        self._move(self._consumed())
        self._loaded = None
        order = self._order()
        for first in range(self._start, self._end, self.batch):
            chosen = order[first : min(first + self.batch, self._end)]
            places = self._own(len(chosen)) or [0]
            yield [chosen[place] for place in places]

    def samples(self, number: int) -> int:
        """Samples of the whole batch with a number in the present iteration: the last may be short.

        Give it to ``forward_backward`` if ``drop_last`` is False.
        """
        return min(self.batch, self._end - (self._start + number * self.batch))

    def state_dict(self) -> dict[str, int]:
        """Epoch, samples of it that were trained on, and seed."""
        consumed = self._consumed()
        return {"epoch": self._epoch, "consumed": consumed, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, also one of another plan."""
        self._epoch, self.seed = int(state["epoch"]), int(state["seed"])
        self._loaded = int(state["consumed"])

    @property
    def _end(self) -> int:
        """The end of the samples that the present iteration gives."""
        short = (self.size - self._start) % self.batch if self.drop_last else 0
        return self.size - short

    def _consumed(self) -> int:
        """Samples of the epoch that were trained on."""
        if self._loaded is not None:  # the trainer's number of passes may be loaded later
            return self._loaded
        trained = (self._passes() - self._passes_at_start) * self.batch
        return min(self._end, self._start + trained)

    def _is_over(self, consumed: int) -> bool:
        """Whether an epoch has no further batch after some of its samples."""
        return self.size - consumed < (self.batch if self.drop_last else 1)

    def _move(self, consumed: int) -> None:
        """Begin at a sample of the epoch, or the next epoch if none is left for a batch."""
        if self._is_over(consumed):
            self._epoch, consumed = self._epoch + 1, 0
        self._start, self._passes_at_start = consumed, self._passes()

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self._epoch)
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order
