"""What the time of a timeline goes to: each part, an upper bound of the speed-up, the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.core.text.labels import shorten_all
from nostall.workload.timeline.analysis import OtherIdle, Timeline
from nostall.workload.timeline.kernels import KernelTime
from nostall.workload.traces.work_kinds import WorkKind

FUSE = 'torch.compile(model, backend="nostall")'
"""Remedy for many or memory-bound kernels."""
TUNE = "nostall tune FILE.py:KERNEL --objective gpu"
"""Remedy for slow kernels that are one's own."""
MIN_SHARE = 0.005
"""Rows with a smaller share of the span are not reported."""
MAX_CALL_LENGTH = 40
"""Characters of the name of a host call in a row."""
MAX_SINGLE_GAPS = 3
"""Gaps that occur once and that a row names; the JSON output has all."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """One row of the ranking: a part of the span, and what would make it shorter.

    The parts of all rows of a timeline sum to its span, but for rows below :data:`MIN_SHARE`.
    """

    problem: str
    seconds: float
    """Measured seconds of the parts of the timeline that show the problem."""
    recoverable_seconds: float | None
    """Modelled upper bound of the seconds that a remedy saves; None: the trace shows no bound."""
    max_speedup: float | None
    """Modelled speed-up of the span if all recoverable seconds were saved; None: no bound."""
    remedy: str
    """The part of nostall that works on the problem, or what else to do."""
    method: str
    """Derivation of ``recoverable_seconds`` from the trace, or why there is none."""
    lost_seconds: float
    """Rank of the row: the bound, or without one the seconds in which the GPU does nothing."""


def find_bottlenecks(timeline: Timeline, kernels: Sequence[KernelTime] = ()) -> list[Bottleneck]:
    """All parts of the span, the one with the most time to save first.

    ``kernels`` are the kernel times of the timeline with their roofline positions.
    """
    rows = [
        _exposed_communication(timeline),
        _launches(timeline),
        *_host_waits(timeline),
        _memory_kernels(timeline),
        _products(timeline, kernels),
        _copies(timeline),
        _single_gaps(timeline),
        *_other_idle(timeline),
    ]
    notable = [row for row in rows if row.seconds > MIN_SHARE * timeline.span]
    return sorted(notable, key=lambda row: (-row.lost_seconds, -row.seconds))


def _bounded(
    timeline: Timeline, problem: str, seconds: float, recoverable: float, remedy: str, method: str
) -> Bottleneck:
    recoverable = min(max(recoverable, 0.0), 0.999 * timeline.span)
    if recoverable <= MIN_SHARE * timeline.span:
        method = f"less than {MIN_SHARE:.1%} of the span: {method}"
        return _unbounded(problem, seconds, remedy, method, is_idle=False)
    max_speedup = timeline.span / (timeline.span - recoverable)
    return Bottleneck(problem, seconds, recoverable, max_speedup, remedy, method, recoverable)


def _unbounded(
    problem: str, seconds: float, remedy: str, method: str, *, is_idle: bool = True
) -> Bottleneck:
    """A row without a bound; idle time ranks by its seconds."""
    return Bottleneck(problem, seconds, None, None, remedy, method, seconds if is_idle else 0.0)


def _exposed_communication(timeline: Timeline) -> Bottleneck:
    exposed = timeline.parts["weights"]
    computation = timeline.parts["compute"] + timeline.parts["memory"]
    return _bounded(
        timeline,
        "communication that no computation hides",
        exposed,
        min(exposed, computation - timeline.hidden_communication),
        "nostall plan, or nostall simulate with another order",
        "the exposed communication, at most the computation that hides no communication yet",
    )


def _launches(timeline: Timeline) -> Bottleneck:
    """A launch in time still leaves a gap: the median of such gaps in this trace."""
    idle, silent = timeline.parts["idle_launch"], timeline.silent_seconds
    cause, remedy = _longest(timeline, "idle_launch"), f"{FUSE}; or CUDA graphs"
    if silent > idle / 2:
        cause = f" (cause uncertain: the trace has no host call in {silent * 1e3:.3f} ms of it)"
        remedy = f"record with with_stack=True to see what the host does; then {remedy}"
    return _bounded(
        timeline,
        f"the GPU waits for launches{cause}",
        idle,
        idle - timeline.num_late_gaps * timeline.on_time_gap,
        remedy,
        "time before late launches without waits and long host calls, and without gaps that occur "
        "once; minus the median gap before launches in time",
    )


def _host_waits(timeline: Timeline) -> list[Bottleneck]:
    """Rows of time that a remedy can save as a whole."""
    parts = timeline.parts
    lost_input = parts["idle_input"] + parts["data"]
    rows = (
        (
            "the GPU waits for input",
            lost_input,
            "outside nostall: more loader workers, pinned memory, prefetching",
            "idle time while the host waits for the loader, plus copies to the GPU that nothing "
            "hides",
        ),
        (
            "the host waits for the GPU before the next launch",
            parts["idle_sync"],
            "outside nostall: remove .item(), .cpu() and synchronize() from the step",
            "idle time in which a synchronising call runs",
        ),
        (
            f"the GPU waits for other work of the host{_longest(timeline, 'idle_host')}",
            parts["idle_host"],
            "outside nostall: move the call out of the step, or into another thread",
            "idle time of host calls without a launch that fill most of a gap",
        ),
    )
    return [
        _bounded(timeline, problem, lost, lost, remedy, how) for problem, lost, remedy, how in rows
    ]


def _longest(timeline: Timeline, part: str) -> str:
    """The host call that takes most of a part, to be put behind the problem."""
    if part not in timeline.longest_calls:
        return ""
    name, seconds = timeline.longest_calls[part]
    return f" (most in {_short(name)}, {seconds * 1e3:.3f} ms)"


def _short(name: str) -> str:
    return shorten_all([name], MAX_CALL_LENGTH)[0]


def _memory_kernels(timeline: Timeline) -> Bottleneck:
    return _bounded(
        timeline,
        "chains of memory-bound kernels",
        timeline.parts["memory"],
        min(timeline.fusion_saving, timeline.parts["memory"]),
        FUSE,
        "each chain as one kernel that takes as long as its longest kernel",
    )


def _products(timeline: Timeline, kernels: Sequence[KernelTime]) -> Bottleneck:
    """Only kernels with a roofline position below the roof count for the bound."""
    products = [
        (kernel, kernel.roofline)
        for kernel in kernels
        if kernel.kind is WorkKind.COMPUTE
        and kernel.roofline is not None
        and kernel.roofline.attained_share <= 1
    ]
    compute = timeline.parts["compute"]
    if not products:
        return _unbounded(
            "matrix products, convolutions and attention",
            compute,
            TUNE,
            "unknown: a bound needs --hardware, and shapes in the trace (record_shapes=True)",
            is_idle=False,
        )
    recoverable = sum(k.roofline_seconds - roofline.roof_seconds for k, roofline in products)
    placed = sum(kernel.roofline_seconds for kernel, _ in products)
    return _bounded(
        timeline,
        "matrix products below their roof",
        compute,
        min(recoverable, compute),
        TUNE,
        f"the products with recorded shapes ({placed * 1e3:.3f} ms) at the peak of their roofline",
    )


def _copies(timeline: Timeline) -> Bottleneck:
    return _unbounded(
        "copies on and from the GPU that nothing hides",
        timeline.parts["copies"],
        "outside nostall: avoid them, or copy in another stream",
        "unknown: the trace does not show which copies are needed",
        is_idle=False,
    )


def _single_gaps(timeline: Timeline) -> Bottleneck:
    gaps = timeline.single_gaps
    named = "; ".join(
        f"{gap.seconds * 1e3:.3f} ms at {gap.start * 1e3:.3f} ms"
        + (f" in {_short(gap.call)}" if gap.call else "")
        for gap in gaps[:MAX_SINGLE_GAPS]
    )
    more = f" and {len(gaps) - MAX_SINGLE_GAPS} more" if len(gaps) > MAX_SINGLE_GAPS else ""
    return _unbounded(
        f"gaps that occur once ({named}{more})",
        timeline.parts["idle_once"],
        "outside nostall: record several steps after the warm-up, to see whether they recur",
        "none: a gap that does not recur, such as a first launch, a compilation or a checkpoint, "
        "says nothing about other steps",
    )


def _other_idle(timeline: Timeline) -> list[Bottleneck]:
    other = timeline.other
    return [
        _unbounded(
            "the GPU does not begin work that is launched",
            other[OtherIdle.QUEUED],
            f"{FUSE}; or fewer dependences between streams",
            "unknown: the gap between two kernels, a wait for another stream or GPU, or work that "
            "is not recorded",
        ),
        _unbounded(
            "gaps between the kernels of a CUDA graph",
            other[OtherIdle.GRAPH],
            FUSE,
            "unknown: the GPU itself launches the kernels of a graph",
        ),
        _unbounded(
            "the GPU is idle before work without a recorded launch",
            other[OtherIdle.UNKNOWN],
            "record the runtime calls, too (ProfilerActivity.CPU)",
            "unknown: without the launch of the next kernel the cause of a gap is not known",
        ),
    ]
