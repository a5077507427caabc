"""What is asked of a device, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from nostall.core.launch import LaunchSpec
from nostall.core.tolerance import Tolerance

Fate = Literal["timed", "agrees", "wrong", "rejected", "fault", "hang"]
"""What became of a candidate: timed; checked only, and no difference found; another result than the
original; not loadable; it broke the CUDA context or the process; it did not end within its
deadline."""

Clock = Literal["graph", "events", "cupti"]
"""How launches are timed: many in one CUDA graph, between two events; one after the other as the
host sends them, between two events; each alone, by CUPTI's time stamps of the kernel."""

CLOCKS: tuple[Clock, ...] = ("graph", "events", "cupti")


@dataclass(frozen=True)
class Kernel:
    """The original that every candidate is checked and timed against."""

    cubin: bytes
    name: str
    launch: LaunchSpec


@dataclass(frozen=True)
class Plan:
    """How candidates are checked and timed.

    ``batch_us``: microseconds of work in one timed sample; ``rounds``: pairs (original, candidate)
    per candidate, interleaved; ``inputs``: different random inputs; ``cold``: the L2 cache is
    overwritten before each launch, which is then timed alone; ``deadline``: seconds that a
    candidate may take; ``tolerance``: how far floating-point outputs may be from the original's
    (None: not a bit); ``loads``: how often original, candidate and null are loaded anew for a
    comparison, because where a module happens to lie changes its time a little; ``ahead``: modules
    that may come next are loaded while the GPU works (for the clock ``graph``).
    """

    batch_us: float = 150.0
    rounds: int = 5
    inputs: int = 3
    cold: bool = False
    deadline: float = 10.0
    seed: int = 0
    clock: Clock = "graph"
    tolerance: Tolerance | None = None
    loads: int = 8
    ahead: bool = True


@dataclass(frozen=True)
class Timing:
    """Seconds per launch; ``original[i]``, ``candidate[i]`` and ``null[i]`` (the original once
    more) ran next to each other.  ``null`` is empty where none was asked for.  The samples come
    from ``loads`` loads of all three, in equal shares and in this order (as ``numpy.array_split``
    divides them)."""

    original: tuple[float, ...]
    candidate: tuple[float, ...]
    null: tuple[float, ...] = ()
    loads: int = 1


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


def _ignored(cubin: bytes) -> None: ...


@dataclass(frozen=True)
class Pending:
    """An answer that is awaited.  ``ready`` says whether it is there, ``wait`` gives it; it has to
    be taken before anything else is asked of the device.  ``foresee`` tells of a candidate that may
    come next, which is loaded meanwhile where the device can do that."""

    ready: Callable[[], bool]
    wait: Callable[[], Outcome]
    foresee: Callable[[bytes], None] = _ignored


@runtime_checkable
class Overlapping(Protocol):
    """A device that works while its user does something else."""

    def start(self, cubin: bytes) -> Pending:
        """Begin what ``evaluate`` does."""
        ...
