"""What to fix first: where a timeline loses time, what that could bring, and who can fix it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.workload.timeline.analysis import Timeline
from nostall.workload.timeline.kernels import KernelTime
from nostall.workload.traces.kinds import Kind

NOTABLE = 0.005
"""Shares of the span below this are not worth a line."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to fix.

    ``recoverable``: seconds of the span, *modelled* from the measured parts as ``how`` says;
    ``gain``: the speed-up if all of it were recovered, never more; ``level``: the part of nostall
    that works on it, or what to do where none does.
    """

    problem: str
    seconds: float
    recoverable: float
    gain: float
    level: str
    how: str


def advise(timeline: Timeline, kernels: Sequence[KernelTime] = ()) -> list[Advice]:
    """Everything notable, the largest gain first; ``kernels`` as placed under a roofline."""
    found = [
        _communication(timeline),
        _launches(timeline),
        _input(timeline),
        _synchronisation(timeline),
        _fusion(timeline),
        _products(timeline, kernels),
    ]
    notable = [a for a in found if a.recoverable > NOTABLE * timeline.span]
    return sorted(notable, key=lambda a: -a.recoverable)


def _advice(
    timeline: Timeline, problem: str, seconds: float, recoverable: float, level: str, how: str
) -> Advice:
    recoverable = min(max(recoverable, 0.0), 0.999 * timeline.span)
    gain = timeline.span / (timeline.span - recoverable)
    return Advice(problem, seconds, recoverable, gain, level, how)


def _communication(timeline: Timeline) -> Advice:
    """Communication can hide behind computation that does not hide any yet."""
    exposed = timeline.parts["weights"]
    room = timeline.parts["compute"] + timeline.parts["memory"] - timeline.hidden
    return _advice(
        timeline,
        "communication that no computation hides",
        exposed,
        min(exposed, room),
        "nostall.parallel: another plan or order",
        "as much as the computation that hides none yet could hide",
    )


def _launches(timeline: Timeline) -> Advice:
    """Launching in time still leaves the gap that launches in time leave in this very trace."""
    idle = timeline.parts["idle_launch"]
    return _advice(
        timeline,
        "the GPU waits for launches",
        idle,
        idle - timeline.late_gaps * timeline.backlog_gap,
        "nostall.fusion: fewer kernels; or CUDA graphs",
        "gaps in front of late launches, less the median gap in front of launches in time",
    )


def _input(timeline: Timeline) -> Advice:
    lost = timeline.parts["idle_input"] + timeline.parts["data"]
    return _advice(
        timeline,
        "the GPU waits for input",
        lost,
        lost,
        "outside nostall: more loader workers, pinned memory, prefetching",
        "idle time under the data loader, and copies to the GPU that nothing hides",
    )


def _synchronisation(timeline: Timeline) -> Advice:
    lost = timeline.parts["idle_sync"]
    return _advice(
        timeline,
        "the host waits for the GPU before it launches on",
        lost,
        lost,
        "outside nostall: remove .item(), .cpu() and synchronize() from the step",
        "gaps during which a synchronising call ran",
    )


def _fusion(timeline: Timeline) -> Advice:
    return _advice(
        timeline,
        "chains of memory-bound kernels",
        timeline.parts["memory"],
        min(timeline.chains, timeline.parts["memory"]),
        "nostall.fusion: stitch them",
        "each chain as one kernel as long as its longest",
    )


def _products(timeline: Timeline, kernels: Sequence[KernelTime]) -> Advice:
    """Only products whose shapes are recorded have a roof; the others promise nothing."""
    placed = [
        k
        for k in kernels
        if k.kind is Kind.COMPUTE and k.placement is not None and k.placement.reached <= 1
    ]
    below = sum(k.placed - k.placement.roof_seconds for k in placed if k.placement)
    return _advice(
        timeline,
        "matrix products below their roof",
        sum(k.placed for k in placed),
        min(below, timeline.parts["compute"]),
        "nostall.sass: tune the kernels",
        "every product with recorded shapes at the peak of its roofline",
    )
