"""Interface of plan executors: one rank's part of a run, one iteration at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from nostall.parallel.errors import BadModel
from nostall.parallel.execute.communication.gradient_reducer import GradientReducer
from nostall.parallel.execute.run_config import Engine
from nostall.parallel.slices import OwnSamples


class Executor(Protocol):
    """One rank of a run of a plan; rank r is GPU r of the plan's cluster.

    All ranks of the run create their executors at the same time, because that creates process
    groups.
    """

    engine: ClassVar[Engine]
    """Name of the engine that the executor implements."""
    gradients: GradientReducer
    own: OwnSamples
    """The samples that the rank reads."""

    def step(
        self, inputs: Any, targets: Any, *, scale: float = 1.0, reduce: bool = True
    ) -> torch.Tensor:
        """Run the forward and backward passes of one iteration on the rank's own samples.

        Returns this rank's part of the loss, a scalar.  Adds ``scale`` times the gradients to the
        parameters' ``.grad``, and with ``reduce`` sums these over the ranks that hold the
        parameter; the caller clears them before the next iteration.
        """
        ...

    def compile(self, note: Callable[[str], None]) -> None:
        """Compile the stages from the next step on; ``note`` is told why one is not compiled."""
        ...


def check_same_model(description: str) -> None:
    """Raise :class:`BadModel` unless all ranks have this description; a collective call."""
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, description)
    if different := [rank for rank, text in enumerate(all_ranks) if text != all_ranks[0]]:
        raise BadModel(
            f"ranks 0 and {different[0]} built different models; build the same model in every "
            "process"
        )
