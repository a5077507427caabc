"""Times of the device in the traced steps of a program: what each kind of change must leave."""

from __future__ import annotations

from collections.abc import Mapping
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
UNFUSED_ATTENTION = {"aten::_softmax", "aten::bmm"}
"""Operators of attention that ``torch.compile`` can replace by one kernel."""
CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::cudnn_convolution")
RECOMPUTED = ("CheckpointFunction", "CheckpointFunctionBackward")
"""Of ``torch.utils.checkpoint`` with ``use_reentrant=True``, which repeats a whole forward pass."""
RECURRENT = ("aten::_cudnn_rnn", "aten::lstm", "aten::gru")


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
    """What remains if the pointwise work outside of optimisers took no time."""
    without_optimizer: float
    """What remains if the optimisers took no time."""
    without_both: float
    """What remains of both: products, attention, communication and copies from the host."""
    obstacle: str = ""
    """Why products may get faster, so that there is no bound; empty: they keep their time."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_device_time(path: Path, unaligned: str = "") -> DeviceTime:
    """The times of the busiest GPU of a trace of ``torch.profiler``.

    ``unaligned`` names a product whose shape a compiler would pad.  Raises :class:`BadTrace` for a
    trace without GPU work.
    """
    from nostall.workload.timeline.analysis import build_timelines
    from nostall.workload.traces.kineto.reader import read_kineto

    timeline = max(build_timelines(read_kineto(path)), key=lambda t: t.span - t.idle)
    return device_time(timeline, unaligned)


def device_time(timeline: Timeline, unaligned: str = "") -> DeviceTime:
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
    in_optimizer = _in_optimizers(recording, activities)
    fusible = np.isin(kinds, (WorkKind.MEMORY, WorkKind.COPY))

    def seconds(rows: np.ndarray) -> float:
        work = Intervals.union(activities.start[rows], activities.end[rows])
        return work.clip(timeline.begin, end).length / timeline.steps

    return DeviceTime(
        steps=timeline.steps,
        step=timeline.span / timeline.steps,
        busy=seconds(np.ones(len(activities), dtype=bool)),
        pointwise=seconds(fusible & ~in_optimizer),
        optimizer=seconds(in_optimizer),
        without_compile=seconds(~fusible | in_optimizer),
        without_optimizer=seconds(~in_optimizer),
        without_both=seconds(~fusible & ~in_optimizer),
        obstacle=_obstacle(set(recording.host_names), unaligned),
    )


def _in_optimizers(recording: Recording, activities: Activities) -> np.ndarray:
    """Which activities were launched in the step of an optimiser, by the same thread."""
    from nostall.workload.timeline.steps import launch_rows, launch_times

    launches = launch_rows(recording, activities)
    called, _ = launch_times(recording, launches)
    threads = np.append(recording.calls.thread, -1)[launches]
    names = np.array([name.startswith(OPTIMIZER) for name in recording.host_names], dtype=bool)
    host = recording.host
    found = np.zeros(len(activities), dtype=bool)
    for row in np.flatnonzero(names[host.name] & ~host.is_operator):
        inside = (called >= host.start[row]) & (called < host.end[row])
        found |= inside & (threads == host.thread[row])
    return found


def _obstacle(operators: set[str], unaligned: str) -> str:
    if not operators.isdisjoint(CONVOLUTIONS):
        return "convolutions can run faster in another memory format"
    if operators >= UNFUSED_ATTENTION:
        return "attention of single operators can become one kernel"
    if not operators.isdisjoint(RECURRENT):
        return "recurrent layers can run by another algorithm"
    if not operators.isdisjoint(RECOMPUTED):
        return "a compiler leaves products of recomputed activations out"
    return f"a compiler pads or fuses the product {unaligned}" if unaligned else ""


def traced(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the trace of a watched program shows, or ``{"obstacle": why there is none}``."""
    if raw["trace_file"] is None:
        return {"obstacle": raw["trace_obstacle"]}
    try:
        return read_device_time(Path(raw["trace_file"]), raw["unaligned"]).as_json()
    except BadTrace as error:
        return {"obstacle": f"the trace of the watched steps cannot be used: {error}"}
