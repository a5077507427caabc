"""Time of the parts of a step on the host: forward, backward, optimiser and loader.

They bound what a change of one part can gain.  Their cost is a few clock reads a step; they are
removed once enough steps were seen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

PARTS = ("forward", "backward", "optimizer", "loader")
BATCHES = 4
"""First batches that tell whether two starts read the same data."""


class Segments:
    """Seconds of each part since the last :meth:`take`."""

    def __init__(
        self,
        now: Callable[[], float],
        look_at: Callable[[Any], tuple[float, bool]] = lambda _: (0.0, False),
    ) -> None:
        """``look_at``: a number that tells batches apart, and whether a batch is on a GPU."""
        self.now, self._look_at = now, look_at
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.loaders: dict[str, Any] = {}
        """Workers, pinned memory and kind of the loader that was read last."""
        self.batches: list[float] = []
        """Sums over the tensors of the first batches."""
        self.loads_on_gpu = False
        """Whether a loader gives tensors on a GPU, for which it may wait."""
        self.kept_graph = ""
        """The argument with which a backward pass kept its graph; empty if none did."""
        self._optimizer_begin: float | None = None
        self._optimized = 0.0
        """Seconds of all optimiser steps so far."""
        self._removals: list[Callable[[], None]] = []
        self._depth, self._watches_backward = 0, False

    @property
    def is_inside(self) -> bool:
        """Whether a part is running."""
        return bool(self._depth)

    def take(self) -> dict[str, float]:
        """The seconds of each part; counting begins anew."""
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its time added to ``part``; calls inside another part are not."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            # An optimiser that steps in a hook of the backward pass is no part of it.
            begin, self._depth = self.now() - self._optimized, 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth = 0
                self.seconds[part] += self.now() - self._optimized - begin

        return call

    def optimizer_begins(self) -> None:
        """Hook before an optimiser's step."""
        self._optimizer_begin = self.now() - sum(self.seconds.values())

    def optimizer_ends(self) -> None:
        """To be called after an optimiser's step."""
        if self._optimizer_begin is not None:
            # A closure's forward and backward passes (LBFGS) are counted as such.
            inside = sum(self.seconds.values())
            seconds = self.now() - inside - self._optimizer_begin
            self.seconds["optimizer"] += seconds
            self._optimized += seconds
            self._optimizer_begin = None

    def watch_backward(self) -> None:
        """Time ``torch.autograd.backward``, which ``loss.backward()`` calls; once.

        Of each backward pass, those of ``torch.autograd.grad`` too, note whether its graph is kept.
        """
        if self._watches_backward:
            return
        self._watches_backward = True
        owner = sys.modules["torch"].autograd
        original = owner.backward
        owner.backward = timed = self.timed("backward", original)

        def remove() -> None:
            if owner.backward is timed:  # else the program has put something there
                owner.backward = original

        self._removals.append(remove)
        run = getattr(owner, "_engine_run_backward", None)
        if run is None:
            return

        @functools.wraps(run)
        def noted(
            outputs: Any, gradients: Any, keeps: Any, creates: Any, *more: Any, **named: Any
        ) -> Any:
            if keeps or creates:
                self.kept_graph = "create_graph=True" if creates else "retain_graph=True"
            return run(outputs, gradients, keeps, creates, *more, **named)

        owner._engine_run_backward = noted
        self._removals.append(lambda: setattr(owner, "_engine_run_backward", run))

    def watch_loader(self, module: Any) -> None:
        """Time ``next`` of the iterators of ``torch.utils.data.DataLoader``."""
        iterator = module._BaseDataLoaderIter
        following = iterator.__next__
        timed = self.timed("loader", following)

        @functools.wraps(following)
        def noted(loader: Any) -> Any:
            self.loaders = {
                "workers": loader._num_workers, "pinned": bool(loader._pin_memory),
                "iterable": isinstance(loader._dataset, module.IterableDataset),
            }  # fmt: skip
            batch = timed(loader)
            if len(self.batches) < BATCHES:
                number, is_on_gpu = self._look_at(batch)
                self.batches.append(number)
                self.loads_on_gpu |= is_on_gpu
            return batch

        iterator.__next__ = noted
        self._removals.append(lambda: setattr(iterator, "__next__", following))

    def remove(self) -> None:
        """Take the clock reads out of the program."""
        for removal in self._removals:
            removal()
        self._removals.clear()
