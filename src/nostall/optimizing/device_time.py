"""Times of the device in the traced steps of a program: what each kind of change must leave."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nostall.core.errors import BadTrace

# Only a trace needs the readers of traces, which take time to load.
if TYPE_CHECKING:
    from nostall.workload.timeline.analysis import Timeline
    from nostall.workload.traces.recording import Activities, Recording

OPTIMIZER = "Optimizer.step#"
"""Beginning of the annotation that PyTorch sets around the step of an optimiser."""
BACKWARD = "autograd::engine::evaluate_function"
"""Beginning of the name of each operator of a backward pass."""
UNFUSED_ATTENTION = {"aten::_softmax", "aten::bmm"}
"""Operators of attention that ``torch.compile`` can replace by one kernel."""
MOVABLE = {
    "convolutions": {
        "aten::convolution", "aten::_convolution", "aten::cudnn_convolution",
        "aten::convolution_backward",
    },
    "attention of single operators": {
        *UNFUSED_ATTENTION, "aten::baddbmm", "aten::_softmax_backward_data",
    },
    "recurrent layers": {
        "aten::_cudnn_rnn", "aten::lstm", "aten::gru", "aten::_cudnn_rnn_backward",
    },
}  # fmt: skip
"""Operators that may run by another algorithm or in another memory format."""
PADDED = "products that a compiler pads or fuses"
VECTORS = {"aten::mv", "aten::addmv", "aten::addmv_", "aten::dot", "aten::vdot"}
"""Products with vectors, which Inductor computes with pointwise work around them."""
RECOMPUTED = ("CheckpointFunction", "CheckpointFunctionBackward")
"""Of ``torch.utils.checkpoint`` with ``use_reentrant=True``, which repeats a whole forward pass."""


@dataclass(frozen=True)
class DeviceTime:
    """Seconds of a step in which the device works; times of streams that overlap count once."""

    steps: int
    """Traced steps."""
    step: float
    """Seconds of a traced step; the profiler slows the host."""
    busy: float
    """Any work."""
    pointwise: float
    """Pointwise operators, reductions, copies on the device: what a compiler fuses."""
    optimizer: float
    """Work that optimisers launch in their steps."""
    without_compile: float
    """What remains if pointwise work and :attr:`movable` outside of optimisers took no time."""
    without_optimizer: float
    """What remains if the optimisers took no time."""
    without_both: float
    """What remains of both: products, attention, communication and copies from the host."""
    movable: Mapping[str, float]
    """Seconds of products and the like that may get faster in other ways, by their kind."""
    obstacle: str = ""
    """Why other work may get faster, too, so that there is no bound; empty: it keeps its time."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_device_time(path: Path, padded: Sequence[int] = ()) -> DeviceTime:
    """The times of the busiest GPU of a trace of ``torch.profiler``.

    ``padded``: ids of the products that a compiler pads or fuses.  Raises :class:`BadTrace` for a
    trace without GPU work.
    """
    from nostall.workload.timeline.analysis import build_timelines
    from nostall.workload.traces.kineto.reader import read_kineto

    timeline = max(build_timelines(read_kineto(path)), key=lambda t: t.span - t.idle)
    return device_time(timeline, padded)


def device_time(timeline: Timeline, padded: Sequence[int] = ()) -> DeviceTime:
    """The times of a step of one GPU.  Raises :class:`BadTrace` for a trace without steps."""
    from nostall.workload.timeline.intervals import Intervals
    from nostall.workload.traces.work_kinds import WorkKind, work_kinds

    recording = timeline.recording
    if not timeline.steps:
        raise BadTrace(f"{recording.path}: no step is recorded, so there is no time of a step")
    end = timeline.begin + timeline.span
    activities = recording.activities
    activities = activities.select(
        (activities.device == timeline.device)
        & (activities.start < end)
        & (activities.end > timeline.begin)
    )
    kinds = work_kinds(activities, recording.names)
    launches = _Launches(recording, activities)
    in_optimizer = launches.within(
        {n for n in recording.host_names if n.startswith(OPTIMIZER)},
        after={n for n in recording.host_names if n.startswith(BACKWARD)},
    )
    rows = {kind: launches.within(names) for kind, names in _present(recording).items()}
    if padded or not VECTORS.isdisjoint(recording.host_names):
        rows[PADDED] = np.isin(activities.operator, padded) | launches.within(VECTORS)
    fusible = np.isin(kinds, (WorkKind.MEMORY, WorkKind.COPY))
    touched = np.logical_or.reduce([fusible, *rows.values()])

    def seconds(rows: np.ndarray) -> float:
        work = Intervals.union(activities.start[rows], activities.end[rows])
        return work.clip(timeline.begin, end).length / timeline.steps

    return DeviceTime(
        steps=timeline.steps,
        step=timeline.span / timeline.steps,
        busy=seconds(np.ones(len(activities), dtype=bool)),
        pointwise=seconds(fusible & ~in_optimizer),
        optimizer=seconds(in_optimizer),
        without_compile=seconds(~touched | in_optimizer),
        without_optimizer=seconds(~in_optimizer),
        without_both=seconds(~touched & ~in_optimizer),
        movable={kind: seconds(found & ~in_optimizer) for kind, found in rows.items()},
        obstacle=_obstacle(recording, rows),
    )


class _Launches:
    """Where on the host the activities of a GPU were launched."""

    def __init__(self, recording: Recording, activities: Activities) -> None:
        from nostall.workload.timeline.steps import launch_rows, launch_times

        rows = launch_rows(recording, activities)
        self.recording = recording
        self.called, _ = launch_times(recording, rows)
        self.threads = np.append(recording.calls.thread, -1)[rows]

    def within(self, names: Collection[str], after: Collection[str] = ()) -> np.ndarray:
        """Which activities were launched in calls of these names, by the same thread.

        ``after``: the part of a call until the last call of these names that begins in it, by any
        thread, does not count.
        """
        from nostall.workload.timeline.intervals import Intervals

        host = self.recording.host
        rows, inner = self._rows(names), self._rows(after)
        begin, end = host.start[rows], host.end[rows]
        order = inner[np.argsort(host.start[inner])]
        starts, ends = host.start[order], np.maximum.accumulate(host.end[order])
        last = np.searchsorted(starts, end) - 1
        has_inner = (last >= 0) & (np.append(starts, np.inf)[last] >= begin)
        begin = np.where(has_inner, np.append(ends, 0.0)[last], begin)
        found = np.zeros(len(self.called), dtype=bool)
        for thread in np.unique(host.thread[rows]):
            own = host.thread[rows] == thread
            calls = Intervals.union(begin[own], end[own])
            found |= (self.threads == thread) & calls.contains(self.called)
        return found

    def _rows(self, names: Collection[str]) -> np.ndarray:
        """Rows of the host's calls of these names."""
        wanted = np.array([name in names for name in self.recording.host_names], dtype=bool)
        return np.flatnonzero(wanted[self.recording.host.name])


def _present(recording: Recording) -> dict[str, set[str]]:
    """The kinds of :data:`MOVABLE` that a trace has; attention needs both of its operators."""
    here = set(recording.host_names)
    return {
        kind: names for kind, names in MOVABLE.items()
        if (here >= UNFUSED_ATTENTION if names & UNFUSED_ATTENTION else names & here)
    }  # fmt: skip


def _obstacle(recording: Recording, movable: Mapping[str, np.ndarray]) -> str:
    if not set(recording.host_names).isdisjoint(RECOMPUTED):
        return "a compiler leaves products of recomputed activations out"
    lost = [kind for kind, found in movable.items() if not found.any()]
    return f"the trace does not show which kernels are {lost[0]}" if lost else ""


def traced(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the trace of a watched program shows, or ``{"obstacle": why there is none}``."""
    if raw["trace_file"] is None:
        return {"obstacle": raw["trace_obstacle"]}
    try:
        return read_device_time(Path(raw["trace_file"]), raw["padded"]).as_json()
    except BadTrace as error:
        return {"obstacle": f"the trace of the watched steps cannot be used: {error}"}
