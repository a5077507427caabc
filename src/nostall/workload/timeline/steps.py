"""The span of a timeline: from the first recorded step to the end of the last one's GPU work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nostall.core.text.plurals import pluralize
from nostall.workload.traces.event_columns import launching_calls
from nostall.workload.traces.recording import Activities, Recording

STEPS = "from the start of the first recorded step to the end of the last one or of its GPU work"
NO_STEPS = (
    "no step is recorded, so the span is from the first to the last GPU event; time of the host "
    "before and after them is not in it (profiler.step() marks steps)"
)
NOT_IN_STEPS = (
    "no GPU event is in the recorded steps, so the span is from the first to the last GPU event"
)


@dataclass(frozen=True)
class AnalysedSpan:
    """Time that a timeline divides into parts."""

    begin: float
    """Seconds."""
    end: float
    """Seconds."""
    step_starts: np.ndarray
    """Start of each recorded step, shape [steps]; empty: the span has none."""
    edges: str
    """How the edges were chosen."""
    remarks: tuple[str, ...] = ()
    """GPU events of work that is not of the steps, a sentence each."""


def launch_rows(recording: Recording, activities: Activities) -> np.ndarray:
    """Row of ``recording.calls`` that launched each activity; -1: it is not recorded.

    Activities without a correlation id, as in some traces of ROCm, have the call with their
    external id.
    """
    calls = recording.calls
    rows = launching_calls(activities.start, activities.correlation, calls.start, calls.correlation)
    missing, free = np.flatnonzero(rows < 0), np.flatnonzero(calls.correlation < 0)
    if len(missing) and len(free):
        found = launching_calls(
            activities.start[missing],
            activities.operator[missing],
            calls.start[free],
            calls.external[free],
        )
        rows[missing[found >= 0]] = free[found[found >= 0]]
    return rows


def launch_times(recording: Recording, launches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of the calls in the rows ``launches``; NaN for -1.  Shape [launches]."""
    start, end = np.full(len(launches), np.nan), np.full(len(launches), np.nan)
    known = launches >= 0
    start[known] = recording.calls.start[launches[known]]
    end[known] = recording.calls.end[launches[known]]
    return start, end


def analysed_span(
    recording: Recording, activities: Activities, launches: np.ndarray
) -> AnalysedSpan:
    """The span of one GPU; ``launches`` are the rows of :func:`launch_rows` of its activities.

    It begins with the first recorded step.  The host runs ahead of the GPU, so it ends with the
    last step or with the last activity that was launched before the end of that step, whichever is
    later.  A trace without steps has the span from its first to its last activity.
    """
    works = activities.end > activities.start
    first, last = float(activities.start[works].min()), float(activities.end[works].max())
    steps = recording.steps
    if len(steps):
        steps = steps[_steps_of_device(recording, launches)]
    else:
        return AnalysedSpan(first, last, np.empty(0), NO_STEPS)
    begin, stop = float(steps[:, 0].min()), float(steps[:, 1].max())
    launched, _ = launch_times(recording, launches)
    later = activities.start[works & (launched >= stop)]
    limit = float(later.min()) if len(later) else np.inf
    in_steps = np.where(np.isnan(launched), activities.start < limit, launched < stop)
    in_steps &= works & (activities.end > begin)
    if not in_steps.any():
        return AnalysedSpan(first, last, np.empty(0), NOT_IN_STEPS)
    end = max(stop, float(activities.end[in_steps].max()))
    length = np.minimum(activities.end, end) - np.maximum(activities.start, begin)
    outside = works & (length <= 0)
    early = works & (length > 0) & ((launched < begin) | (activities.start < begin))
    remarks = []
    if outside.any():
        seconds = float((activities.end - activities.start)[outside].sum())
        remarks.append(f"{_events(outside, seconds)} outside the recorded steps and not counted")
    if early.any():
        remarks.append(
            f"{_events(early, float(length[early].sum()))} of work that was launched before the "
            "first recorded step; the part in the span is counted"
        )
    return AnalysedSpan(begin, end, np.sort(steps[:, 0]), STEPS, tuple(remarks))


def _events(rows: np.ndarray, seconds: float) -> str:
    count = int(rows.sum())
    return (
        f"{pluralize(count, 'GPU event')} ({seconds * 1e3:.3f} ms) {'is' if count == 1 else 'are'}"
    )


def _steps_of_device(recording: Recording, launches: np.ndarray) -> np.ndarray:
    """Which steps are of the processes that launch the work; all steps if that is not known."""
    process = recording.thread_process
    threads = recording.calls.thread[np.unique(launches[launches >= 0])]
    own = np.isin(process[recording.step_thread], process[threads])
    return own if own.any() else np.ones(len(recording.steps), dtype=bool)
