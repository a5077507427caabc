"""Where the time of one GPU went, measured: work of each kind, and why it idled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nostall.core.errors import BadTrace
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.traces.kinds import Kind, kinds
from nostall.workload.traces.recording import Activities, Recording

PARTS = (
    "compute",
    "memory",
    "weights",
    "data",
    "copies",
    "idle_input",
    "idle_sync",
    "idle_launch",
    "idle_other",
)
"""Where time can go; the parts of a timeline sum to its span."""

_SHOWN = (Kind.COMPUTE, Kind.MEMORY, Kind.COMMUNICATION, Kind.INPUT, Kind.COPY)


@dataclass(frozen=True)
class Timeline:
    """One GPU of one trace, measured; times in seconds.

    ``parts`` splits ``span`` (from the first to the last activity, or the recorded steps): where
    several kinds of work run at a time, the first of compute, memory, weights, data, copies gets
    it, so ``weights`` is the *exposed* communication.  ``idle_input``: the host waited for its data
    loader; ``idle_sync``: it waited for the GPU and only then launched on; ``idle_launch``: it was
    late without waiting; ``idle_other``: work was launched in time, or its launch is not recorded.
    """

    recording: Recording
    device: int
    begin: float
    span: float
    steps: int
    parts: Mapping[str, float]
    communication: float
    hidden: float
    kernels: int
    backlog_gap: float
    """Median idle time between kernels that were launched in time: what launching cannot beat."""
    late_gaps: int
    chains: float
    """Seconds that runs of neighbouring memory-bound kernels would save if each ran as one kernel
    that takes as long as its longest: a bound for fusion."""

    @property
    def idle(self) -> float:
        return sum(v for k, v in self.parts.items() if k.startswith("idle"))

    @property
    def overlap(self) -> float:
        """Share of communication that computation hides; 1 when there is none."""
        return self.hidden / self.communication if self.communication else 1.0


def analyse(recording: Recording) -> list[Timeline]:
    """One timeline for each GPU of a trace, those of lower number first.

    Raises :class:`~nostall.core.errors.BadTrace` where no activity takes any time.
    """
    found = []
    for device in sorted(set(recording.activities.device.tolist())):
        rows = recording.activities.device == device
        own = recording.activities.select(rows)
        if (own.end > own.start).any():
            found.append(_timeline(recording, own, device))
    if not found:
        raise BadTrace(
            f"{recording.path}: all {len(recording.activities)} GPU activities have duration 0; "
            "record anew"
        )
    return found


def _timeline(recording: Recording, own: Activities, device: int) -> Timeline:
    begin, end, steps = _window(recording, own)
    inside = (own.start < end) & (own.end > begin)
    own = own.select(inside)
    kind = kinds(own, recording.names)
    parts, covered = _attributed(own, kind, begin, end)
    moved = Intervals.union(*_of(own, kind == Kind.COMMUNICATION)).clip(begin, end)
    computing = Intervals.union(*_of(own, kind <= Kind.MEMORY)).clip(begin, end)
    gaps = covered.gaps(begin, end)
    why, late, backlog = _idle(recording, own, gaps)
    return Timeline(
        recording=recording,
        device=device,
        begin=begin,
        span=end - begin,
        steps=steps,
        parts={**parts, **why},
        communication=moved.length,
        hidden=moved.overlap(computing),
        kernels=int((own.kind == 0).sum()),
        backlog_gap=backlog,
        late_gaps=late,
        chains=_chains(own, kind),
    )


def _of(own: Activities, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return own.start[rows], own.end[rows]


def _window(recording: Recording, own: Activities) -> tuple[float, float, int]:
    """The recorded steps where they hold GPU work, else everything."""
    first, last = float(own.start.min()), float(own.end.max())
    steps = recording.steps
    if len(steps):
        begin, end = max(first, float(steps[0, 0])), last
        if end > begin:
            return begin, end, len(steps)
    return first, last, 0


def _attributed(
    own: Activities, kind: np.ndarray, begin: float, end: float
) -> tuple[dict[str, float], Intervals]:
    """Seconds of each kind of work, each moment counted once, and all of it together."""
    names = ("compute", "memory", "weights", "data", "copies")
    covered = Intervals(np.empty(0), np.empty(0))
    parts = {}
    for one, name in zip(_SHOWN, names, strict=True):
        grown = covered | Intervals.union(*_of(own, kind == one)).clip(begin, end)
        parts[name] = grown.length - covered.length
        covered = grown
    return parts, covered


def _idle(
    recording: Recording, own: Activities, gaps: Intervals
) -> tuple[dict[str, float], int, float]:
    """(seconds idle by cause, gaps in which the host was late, median gap in which it was not)."""
    length = gaps.end - gaps.start
    launched = _launch_of_next(recording, own, gaps)
    known = np.isfinite(launched)
    late = known & (launched > gaps.start)
    loading = Intervals.union(recording.loading[:, 0], recording.loading[:, 1])
    input_bound = late & _touches(gaps, loading)
    calls = recording.calls
    waiting = Intervals.union(calls.start[calls.waits], calls.end[calls.waits])
    synced = late & ~input_bound & _touches(gaps, waiting)
    plain = late & ~input_bound & ~synced
    in_time = length[known & ~late]
    seconds = {
        "idle_input": float(length[input_bound].sum()),
        "idle_sync": float(length[synced].sum()),
        "idle_launch": float(length[plain].sum()),
        "idle_other": float(length[~late].sum()),
    }
    return seconds, int(plain.sum()), float(np.median(in_time)) if len(in_time) else 0.0


def _launch_of_next(recording: Recording, own: Activities, gaps: Intervals) -> np.ndarray:
    """When the call that launched the activity behind each gap began; NaN: not recorded."""
    calls = recording.calls
    found = np.full(len(gaps.start), np.nan)
    if not len(calls.start):
        return found
    order = np.argsort(calls.correlation, kind="stable")
    known = calls.correlation[order]
    behind = np.searchsorted(own.start, gaps.end - 1e-12)
    for row in np.flatnonzero(behind < len(own)):
        wanted = own.correlation[behind[row]]
        at = np.searchsorted(known, wanted)
        if wanted >= 0 and at < len(known) and known[at] == wanted:
            found[row] = calls.start[order[at]]
    return found


def _touches(gaps: Intervals, other: Intervals) -> np.ndarray:
    """Which gaps share time with any interval of ``other``."""
    if not len(other.start):
        return np.zeros(len(gaps.start), dtype=bool)
    after = np.searchsorted(other.end, gaps.start, side="right")
    begins = np.append(other.start, np.inf)
    return np.asarray(begins[after] < gaps.end)


def _chains(own: Activities, kind: np.ndarray) -> float:
    """What perfect fusion of neighbouring memory-bound kernels of a stream would save."""
    kernels = own.kind == 0
    saved = 0.0
    for stream in set(own.stream[kernels].tolist()):
        rows = kernels & (own.stream == stream)
        length = (own.end - own.start)[rows]
        memory = kind[rows] == Kind.MEMORY
        edges = np.flatnonzero(np.diff(memory.astype(np.int8))) + 1
        bounds = np.concatenate(([0], edges, [len(length)]))
        for low, high in pairwise(bounds.tolist()):
            if high - low > 1 and memory[low]:
                run = length[low:high]
                saved += float(run.sum() - run.max())
    return saved
