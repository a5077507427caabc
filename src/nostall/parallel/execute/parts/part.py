"""Interface of one rank's part of a plan, and what the parts of all kinds of plans share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from nostall.parallel.execute.run_config import Engine
from nostall.parallel.sharding.placements import Placements
from nostall.parallel.slices import OwnSamples


@dataclass(frozen=True)
class PartOptions:
    """How a rank runs its part."""

    device: torch.device
    """Device of this rank."""
    engine: Engine = "auto"
    deadline: float | None = None
    """Longest wait for another rank within an iteration, in seconds; None for torch's default
    timeout of new process groups."""


@dataclass(frozen=True)
class RankMesh:
    """A mesh of consecutive ranks."""

    first_rank: int
    shape: tuple[int, ...]

    @property
    def ranks(self) -> torch.Tensor:
        """The ranks in row order, in the shape of the mesh."""
        count = int(torch.tensor(self.shape).prod())
        return torch.arange(self.first_rank, self.first_rank + count).reshape(self.shape)


class Part(ABC):
    """One rank's part of a plan.  All ranks create theirs at the same time."""

    engine: str
    """Name of the engine in results."""
    samples: int
    """Samples of a whole batch."""
    loss_dtype: torch.dtype
    """Element type of the module's loss."""
    random_operators: tuple[str, ...]
    """Names of the operators of a pass that draw random numbers."""
    parameters: Mapping[str, torch.nn.Parameter]
    """What the rank holds of the parameters that the step reads, by their (first) names."""
    trained: frozenset[str]
    """Those of ``parameters`` that have gradients."""
    counted: frozenset[str]
    """The parameters that this rank counts in sums over all parameters: of the ranks that hold the
    same values, one does."""
    placements: Mapping[str, Placements]
    """Placements of the sharded ones of ``parameters`` on the rank's mesh."""
    meshes: tuple[RankMesh, ...] = ()
    """The meshes of all ranks' sharded parameters, the same on all ranks."""
    mesh: int = 0
    """Number of the rank's mesh."""
    collectives: Mapping[str, int]
    """Collectives of the last step by kind, if the engine counts them."""
    no_graph: str = ""
    """Why the steps cannot be CUDA graphs; empty if they may be."""
    overwrites_gradients: bool = False
    """Whether a step with ``reduce`` overwrites the memory of gradients of earlier steps."""
    is_lost_by_failed_capture: bool = False
    """Whether no step can run after a capture that failed."""
    is_traced: bool = True
    """Whether a step has the shapes and the values in Python of the job's example batch."""
    loss_samples: int = 0
    """Samples whose loss a step takes as one; 0 where the parts of a loss are not compared."""
    computation_dtype: torch.dtype
    """The type with the coarsest numbers that a step computes with."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """What is not compiled or not captured, with the reason."""
        self.placements, self.collectives = {}, {}

    def note(self, text: str) -> None:
        """Add to the notes, once."""
        if text not in self.notes:
            self.notes.append(text)

    def prepare_capture(self, stream: Any) -> None:  # noqa: B027
        """Get ready for a capture on a CUDA stream, which most parts are; a collective call."""

    def drop_capture(self) -> None:  # noqa: B027
        """Drop what a capture that failed left behind; most parts keep nothing of a step."""

    def changed_buffers(self) -> Sequence[torch.Tensor]:
        """Buffers that a step may change, such as running means; traced steps change none."""
        return ()

    @abstractmethod
    def compile(self) -> None:
        """Compile by Inductor what a rank computes between its collectives, from the next step."""

    @abstractmethod
    def own(self, samples: int) -> OwnSamples:
        """The samples that the rank reads of a whole batch of ``samples``; none if it reads none.

        Raises :class:`BadPlan` if the plan cannot run so many samples.
        """

    @abstractmethod
    def step(
        self, inputs: Any, targets: Any, samples: int, *, scale: float = 1.0, reduce: bool = True
    ) -> torch.Tensor:
        """Forward and backward pass on the rank's own samples of a whole batch of ``samples``.

        Returns this rank's part of the loss, a sum over ranks.  ``scale`` times the gradients are
        in the parameters' ``.grad``, which were None before.  Without ``reduce`` they are not: the
        part keeps them, and the next step with ``reduce`` adds them before its reduction over
        ranks.
        """

    @abstractmethod
    def drop_kept(self) -> None:
        """Drop the gradients that steps without ``reduce`` kept."""

    @abstractmethod
    def evaluate(
        self, inputs: Any, targets: Any, samples: int, *, is_training: bool
    ) -> torch.Tensor:
        """This rank's part of the loss, without gradients, in the given mode of the module."""

    @abstractmethod
    def whole_gradients(self) -> Mapping[str, torch.Tensor | None]:
        """Unsharded gradients of the parameters that this rank holds, by name; None where there is
        none."""

    @abstractmethod
    def close(self) -> None:
        """Destroy the process groups of the part; no rank may have messages under way."""


LOSS = "the loss"
"""Name of the loss beside those of gradients."""
_LEAST = 0.05
"""Share of the largest norm below which differences are not relative: a gradient that is 0 but for
rounding, such as that of the bias of keys, has any other value."""


def first_difference(
    found: Mapping[str, float], expected: Mapping[str, float], tolerance: float
) -> str:
    """The first name whose number is not the expected one; empty if there is none.

    The numbers are the loss (:data:`LOSS`) and norms of gradients; a missing one counts as 0.
    ``tolerance`` is relative.  Numbers that are not finite have to be of the same kind.
    """
    norms = [abs(v) for name, v in expected.items() if name != LOSS and isfinite(v)]
    least = _LEAST * max(norms, default=0.0)
    for name, value in expected.items():
        own = found.get(name, 0.0)
        is_close = abs(own - value) <= tolerance * max(abs(value), least)
        if not (is_close if isfinite(own) and isfinite(value) else str(own) == str(value)):
            return name
    return ""


class KeptGradients:
    """Gradients of a rank's own samples, which passes without a reduction leave in ``.grad``."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def restore(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Put the kept gradients into ``.grad``, so that the next pass adds to them."""
        for name, gradient in self._kept.items():
            parameters[name].grad = gradient
        self._kept.clear()

    def keep(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Take the gradients out of ``.grad``."""
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self._kept[name], parameter.grad = parameter.grad, None

    def drop(self) -> None:
        """Forget the kept gradients."""
        self._kept.clear()


class TrainingModes:
    """The modes in which the submodules were when they were traced: BatchNorm may be in eval."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self._modes = [(part, part.training) for module in modules for part in module.modules()]

    @contextmanager
    def set(self, *, is_training: bool) -> Iterator[None]:
        """Put all submodules into the traced modes, or into eval mode, and back afterwards."""
        before = [(part, part.training) for part, _ in self._modes]
        try:
            for part, mode in self._modes:
                part.training = mode and is_training
            yield
        finally:
            for part, mode in before:
                part.training = mode
