"""Interface of measuring devices: what a candidate is checked and timed with, and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from nostall.core.errors import BadLaunch
from nostall.core.launch import LaunchSpec, Opaque
from nostall.core.tolerance import Tolerance

Status = Literal["timed", "agrees", "wrong", "rejected", "fault", "hang"]
"""Outcome of a candidate:

- ``timed``: its outputs agree with the original's, and it was timed
- ``agrees``: its outputs agree with the original's; it was only checked
- ``wrong``: its outputs differ from the original's
- ``rejected``: the driver does not load it
- ``fault``: it broke the CUDA context or ended the worker process
- ``hang``: it did not end within its deadline
"""

TimingMethod = Literal["graph", "events", "cupti"]
"""Method by which launches are timed:

- ``graph``: many launches in one CUDA graph, between two events
- ``events``: launches sent one by one by the host, between two events
- ``cupti``: each launch alone, by the GPU's time stamps of the kernel
"""

TIMING_METHODS: tuple[TimingMethod, ...] = ("graph", "events", "cupti")


@dataclass(frozen=True)
class Kernel:
    """The original kernel, against which candidates are checked and timed."""

    cubin: bytes
    name: str
    launch: LaunchSpec

    def __post_init__(self) -> None:
        for argument in self.launch.args:
            if isinstance(argument, Opaque):
                raise BadLaunch(
                    f"argument {argument.name!r} of kernel {self.name!r} is {argument.bytes} bytes "
                    "of unknown content, so the kernel cannot be launched; `--objective model` "
                    "needs no content"
                )


@dataclass(frozen=True)
class MeasurementPlan:
    """Settings of the checks and the timing of candidates."""

    batch_us: float = 150.0
    """Microseconds of GPU work in one timed sample."""
    rounds: int = 5
    """Interleaved pairs (original, candidate) that are timed for each candidate."""
    inputs: int = 3
    """Sets of random inputs on which each candidate is checked."""
    cold: bool = False
    """Overwrite the L2 cache before each launch, and time each launch alone."""
    deadline: float = 10.0
    """Seconds after which a candidate counts as hung."""
    seed: int = 0
    """Seed of the random inputs."""
    clock: TimingMethod = "graph"
    tolerance: Tolerance | None = None
    """Allowed difference of floating-point outputs; None compares bit by bit."""
    loads: int = 8
    """Times that original, candidate and null are loaded for a comparison.  The address at which
    a module is loaded changes its time a little."""
    dependent_launch: bool = False
    """Launch candidates one after another as dependent launches (timing method ``graph`` only), and
    the original as it is.  Each candidate must wait itself for the kernels before it; that is
    checked with a kernel before it which writes the inputs late."""
    prefetch: bool = True
    """Load modules that may come next while the GPU works (timing method ``graph`` only)."""


@dataclass(frozen=True)
class Timing:
    """Interleaved samples of original and candidate, in seconds per launch.

    ``original[i]``, ``candidate[i]`` and ``null[i]`` ran next to each other.
    """

    original: tuple[float, ...]
    candidate: tuple[float, ...]
    null: tuple[float, ...] = ()
    """The original, timed a second time; empty if that was not requested."""
    loads: int = 1
    """Times the modules were loaded.  Samples are in order of the loads, in equal shares (as
    ``numpy.array_split`` divides them)."""


@dataclass(frozen=True)
class Outcome:
    """Result of checking and timing one candidate."""

    status: Status
    timing: Timing | None = None
    """Samples if ``status`` is ``timed``."""
    detail: str = ""
    """Why the candidate was not timed."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds spent in each phase: ``load``, ``check``, ``time``."""


class Device(Protocol):
    """Checks and times candidates of one kernel.

    A candidate that fails yields an :class:`Outcome` with its status, not an exception.
    """

    def evaluate(self, cubin: bytes) -> Outcome:
        """Check one candidate on all input sets, then time it in pairs with the original."""
        ...

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        """Check and time one candidate in a new process, more thoroughly than :meth:`evaluate`.

        Checks it on ``checks`` new random inputs, then times ``rounds`` interleaved triples
        (original, candidate, original).
        """
        ...

    @property
    def info(self) -> Mapping[str, str]:
        """GPU, driver, clocks, temperature and power, as read when the device was opened."""
        ...


def _ignore(cubin: bytes) -> None: ...


@dataclass(frozen=True)
class PendingOutcome:
    """An outcome that is still being computed.

    The caller must call ``wait`` before it uses the device for anything else.
    """

    ready: Callable[[], bool]
    """Whether ``wait`` would return at once."""
    wait: Callable[[], Outcome]
    """Block until the outcome is there, and return it."""
    prefetch: Callable[[bytes], None] = _ignore
    """Announce a candidate that may come next.  The device loads it meanwhile, if it can."""


@runtime_checkable
class AsyncDevice(Protocol):
    """A device that can work on a candidate while its caller does something else."""

    def start(self, cubin: bytes) -> PendingOutcome:
        """Begin to evaluate a candidate (as :meth:`Device.evaluate`) and return at once."""
        ...
