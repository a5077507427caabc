"""What is asked of a device, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nostall.core.launch import LaunchSpec

Fate = Literal["timed", "wrong", "rejected", "fault", "hang"]
"""What became of a candidate: timed; another result than the original; not loadable; it broke the
CUDA context or the process; it did not end within its deadline."""


@dataclass(frozen=True)
class Kernel:
    """The original that every candidate is checked and timed against."""

    cubin: bytes
    name: str
    launch: LaunchSpec


@dataclass(frozen=True)
class Plan:
    """How candidates are checked and timed.

    ``batch_us``: microseconds of work in one timed CUDA graph; ``rounds``: pairs (original,
    candidate) per candidate, interleaved; ``inputs``: different random inputs; ``cold``: the L2
    cache is overwritten before each launch, which is then timed alone; ``deadline``: seconds that a
    candidate may take.
    """

    batch_us: float = 150.0
    rounds: int = 5
    inputs: int = 3
    cold: bool = False
    deadline: float = 10.0
    seed: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds per launch; ``original[i]``, ``candidate[i]`` and ``null[i]`` (the original once
    more) ran next to each other.  ``null`` is empty where none was asked for."""

    original: tuple[float, ...]
    candidate: tuple[float, ...]
    null: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The answer for one candidate.  ``spent``: seconds by part (load, check, time)."""

    fate: Fate
    timing: Timing | None = None
    detail: str = ""
    spent: Mapping[str, float] = field(default_factory=dict[str, float])


class Device(Protocol):
    """Times candidates of one kernel.  A candidate that fails is an :class:`Outcome`, no raise."""

    def evaluate(self, cubin: bytes) -> Outcome:
        """Check one candidate on every input, then time it in pairs with the original."""
        ...

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        """In a fresh process: ``checks`` fresh random inputs, then ``rounds`` interleaved triples
        original, candidate, original again."""
        ...

    @property
    def about(self) -> Mapping[str, str]:
        """GPU, driver, clocks, temperature and power as found."""
        ...
