"""Bottlenecks of a timeline: lost time, an upper bound of the speed-up, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.workload.timeline.analysis import Timeline
from nostall.workload.timeline.kernels import KernelTime
from nostall.workload.traces.work_kinds import WorkKind

MIN_SHARE = 0.005
"""Bottlenecks with a smaller recoverable share of the span are not reported."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One cause of lost time."""

    problem: str
    seconds: float
    """Measured seconds of the parts of the timeline that show the problem."""
    recoverable_seconds: float
    """Modelled upper bound of the seconds that a remedy saves."""
    max_speedup: float
    """Modelled speed-up of the span if all recoverable seconds were saved."""
    remedy: str
    """The part of nostall that works on the problem, or what else to do."""
    method: str
    """Derivation of ``recoverable_seconds`` from the trace."""


def find_bottlenecks(timeline: Timeline, kernels: Sequence[KernelTime] = ()) -> list[Bottleneck]:
    """All bottlenecks above :data:`MIN_SHARE`, the largest recoverable time first.

    ``kernels`` are the kernel times of the timeline with their roofline positions.
    """
    candidates = [
        _exposed_communication(timeline),
        _late_launches(timeline),
        _input(timeline),
        _synchronisation(timeline),
        _unfused_kernels(timeline),
        _slow_products(timeline, kernels),
    ]
    notable = [b for b in candidates if b.recoverable_seconds > MIN_SHARE * timeline.span]
    return sorted(notable, key=lambda b: -b.recoverable_seconds)


def _bottleneck(
    timeline: Timeline, problem: str, seconds: float, recoverable: float, remedy: str, method: str
) -> Bottleneck:
    recoverable = min(max(recoverable, 0.0), 0.999 * timeline.span)
    max_speedup = timeline.span / (timeline.span - recoverable)
    return Bottleneck(problem, seconds, recoverable, max_speedup, remedy, method)


def _exposed_communication(timeline: Timeline) -> Bottleneck:
    exposed = timeline.parts["weights"]
    computation = timeline.parts["compute"] + timeline.parts["memory"]
    return _bottleneck(
        timeline,
        "communication that no computation hides",
        exposed,
        min(exposed, computation - timeline.hidden_communication),
        "nostall.parallel: another plan or order",
        "the exposed communication, at most the computation that hides no communication yet",
    )


def _late_launches(timeline: Timeline) -> Bottleneck:
    """A launch in time still leaves a gap: the median of such gaps in this trace."""
    idle = timeline.parts["idle_launch"]
    return _bottleneck(
        timeline,
        "the GPU waits for launches",
        idle,
        idle - timeline.num_late_gaps * timeline.on_time_gap,
        "nostall.fusion: fewer kernels; or CUDA graphs",
        "gaps before late launches, minus the median gap before launches in time",
    )


def _input(timeline: Timeline) -> Bottleneck:
    lost = timeline.parts["idle_input"] + timeline.parts["data"]
    return _bottleneck(
        timeline,
        "the GPU waits for input",
        lost,
        lost,
        "outside nostall: more loader workers, pinned memory, prefetching",
        "idle time during the data loader, plus copies to the GPU that nothing hides",
    )


def _synchronisation(timeline: Timeline) -> Bottleneck:
    lost = timeline.parts["idle_sync"]
    return _bottleneck(
        timeline,
        "the host waits for the GPU before the next launch",
        lost,
        lost,
        "outside nostall: remove .item(), .cpu() and synchronize() from the step",
        "gaps during a synchronising call",
    )


def _unfused_kernels(timeline: Timeline) -> Bottleneck:
    return _bottleneck(
        timeline,
        "chains of memory-bound kernels",
        timeline.parts["memory"],
        min(timeline.fusion_saving, timeline.parts["memory"]),
        "nostall.fusion: stitch them",
        "each chain as one kernel that takes as long as its longest kernel",
    )


def _slow_products(timeline: Timeline, kernels: Sequence[KernelTime]) -> Bottleneck:
    """Only kernels with a roofline position below the roof count."""
    products = [
        (kernel, kernel.roofline)
        for kernel in kernels
        if kernel.kind is WorkKind.COMPUTE
        and kernel.roofline is not None
        and kernel.roofline.attained_share <= 1
    ]
    recoverable = sum(k.roofline_seconds - roofline.roof_seconds for k, roofline in products)
    return _bottleneck(
        timeline,
        "matrix products below their roof",
        sum(kernel.roofline_seconds for kernel, _ in products),
        min(recoverable, timeline.parts["compute"]),
        "nostall.sass: tune the kernels",
        "each product with recorded shapes at the peak of its roofline",
    )
