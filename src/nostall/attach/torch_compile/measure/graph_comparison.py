"""Compare the baseline and the candidate of a whole graph, forward and backward, on equal inputs.

The rules are those of all comparisons of nostall: samples are interleaved, the baseline is measured
twice (the second time as the null), and the candidate is faster only if its whole interval is above
1 and above the null's.  On a GPU two clocks measure: a loop, which the host may hold up, and
replays of CUDA graphs, which it does not.  A candidate that is slower by either is not selected,
nor one that gains less by one than it seems to lose by the other.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from nostall.attach.torch_compile.measure.accuracy import GraphFunction, max_error, run_graph
from nostall.attach.torch_compile.measure.call import Call
from nostall.attach.torch_compile.runtime.custom_op import record_calls
from nostall.attach.torch_compile.store.records import ComparisonRecord, ReplayRecord
from nostall.core.errors import one_line
from nostall.core.measurement import Comparison
from nostall.gpu.clock import Clock, Run

_log = logging.getLogger("nostall")

VERDICTS = {
    "faster": "faster as a whole",
    "less memory": "less peak memory, and not slower beyond the noise",
    "more memory": "faster as a whole, but with more peak memory",
    "slower": "slower as a whole",
    "same": "no gain beyond the noise",
}
"""Reasons for a selection, by the verdict of the last comparison."""
CHOSEN = ("faster", "less memory")
"""Verdicts by which a candidate is selected."""
MOST_MEMORY = 1.02
"""A step of a candidate may have so many times the peak memory of Inductor's version, the graph's
inputs included, and :data:`MEMORY_SLACK` bytes more."""
MEMORY_SLACK = 1 << 20
LESS_MEMORY = 0.95
"""A peak memory, without the inputs, below this share of that of Inductor's version is a reason for
a candidate."""
RETRY_FACTOR = 4.0
"""If noise may hide a gain, the comparison is repeated, so many times as long."""


REPLAY_SHARE = 0.5
"""Duration of the measurement of replays, as a share of that of the loop."""
REPLAY_MEMORY = 4.5
"""Replays are measured if so many times the peak memory of a step is free: each of the three graphs
keeps its own, and so do the runs before the captures, on one stream."""


@dataclass(frozen=True)
class GraphClocks:
    """The clocks that time whole graphs."""

    # Times a loop.
    loop: Clock
    # Approximate duration of one measurement.
    seconds: float
    # Times the GPU without the host; None if nothing can.
    replays: Clock | None = None


class NoStitchedKernel(Exception):
    """The candidate calls no stitched kernel, so there is nothing to compare."""


def judge(record: ComparisonRecord) -> str:
    """The verdict on a candidate, by its time and its peak memory."""
    verdict = record.verdict
    if not record.inductor_bytes or record.stitched_bytes is None:
        return verdict
    if verdict == "faster":
        limit = MOST_MEMORY * (record.input_bytes + record.inductor_bytes) + MEMORY_SLACK
        is_more = record.input_bytes + record.stitched_bytes > limit
        return "more memory" if is_more else verdict
    is_less = record.stitched_bytes < LESS_MEMORY * record.inductor_bytes - MEMORY_SLACK
    return "less memory" if is_less and verdict == "same" else verdict


def compare_graphs(
    graph: str,
    baseline: GraphFunction,
    candidate: GraphFunction,
    call: Call,
    clocks: GraphClocks,
    program: GraphFunction | None = None,
    needs_kernels: bool = True,
    repeats: bool = True,
) -> tuple[ComparisonRecord, tuple[str, ...]]:
    """Compare two versions of a graph on a call; also returns the kernels that the candidate calls.

    ``program``: the graph as PyTorch runs it, for a reference in higher precision.
    ``needs_kernels``: whether the candidate differs from the baseline only by stitched kernels.
    ``repeats``: whether the comparison is repeated if noise may hide a gain.

    Raises :class:`NoStitchedKernel`, :class:`AccuracyError`, and whatever a version raises.
    """
    with call_state(call):
        # Compiled graphs may come from PyTorch's caches: only running them shows what they call.
        with record_calls() as kernels:
            seeds = run_graph(baseline, call.fresh_args()).seeds
            difference = max_error(baseline, candidate, call, seeds, program)
        if needs_kernels and not kernels:
            raise NoStitchedKernel
        args = call.fresh_args()
        functions = (baseline, candidate, baseline)
        runs = [
            lambda f=function: run_graph(
                f, call.fresh_args() if call.keeps_history else args, seeds
            )
            for function in functions
        ]
        peaks = [peak_bytes(run, args) for run in runs[:2]]
        record = _timed(graph, runs, clocks, peaks, difference, repeats)
    record = msgspec.structs.replace(record, input_bytes=input_bytes(call.args))
    return record, tuple(sorted(kernels))


def _timed(
    graph: str,
    runs: Sequence[Run],
    clocks: GraphClocks,
    peaks: Sequence[int | None],
    difference: float,
    repeats: bool,
) -> ComparisonRecord:
    """Time the baseline, the candidate and the baseline again, by both clocks."""

    def measured(seconds: float) -> ComparisonRecord:
        first, second, null = clocks.loop.samples(graph, runs, seconds)
        found = Comparison.from_samples(first, second, null, kind=clocks.loop.kind)
        return ComparisonRecord(
            kind=found.kind,
            clock=clocks.loop.name,
            inductor=tuple(first),
            stitched=tuple(second),
            null=tuple(null),
            ratio=found.ratio,
            low=found.low,
            high=found.high,
            null_low=found.null_low,
            null_high=found.null_high,
            difference=difference,
            inductor_bytes=peaks[0],
            stitched_bytes=peaks[1],
            replayed=replayed,
        )

    replayed: ReplayRecord | None = None
    record = measured(clocks.seconds)
    if record.comparison().verdict == "slower":
        return record
    replayed = _replayed(graph, runs, clocks, peaks)
    record = msgspec.structs.replace(record, replayed=replayed)
    if repeats and record.verdict == "same" and record.high > 1.0:
        # Only the longer measurement decides, so that its samples are not a selection.
        return measured(RETRY_FACTOR * clocks.seconds)
    return record


def _replayed(
    graph: str, runs: Sequence[Run], clocks: GraphClocks, peaks: Sequence[int | None]
) -> ReplayRecord | None:
    """The comparison by replays of CUDA graphs; None if the runs cannot be captured.

    Peaks are not known of runs that replay CUDA graphs themselves: the loop times their replays.
    """
    if clocks.replays is None or not all(peaks):
        return None
    needed = REPLAY_MEMORY * max(peak or 0 for peak in peaks)
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < needed:
        return None
    try:
        rows = clocks.replays.samples(graph, runs, REPLAY_SHARE * clocks.seconds)
    except Exception as error:  # the loop alone decides
        _log.debug("nostall: no replays are timed: %s", one_line(error))
        return None
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the memory of graphs serves no other allocation
    first, second, null = rows
    found = Comparison.from_samples(first, second, null, kind=clocks.replays.kind)
    return ReplayRecord(
        clock=clocks.replays.name,
        inductor_s=statistics.median(first),
        stitched_s=statistics.median(second),
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        null_low=found.null_low,
        null_high=found.null_high,
    )


def peak_bytes(run: Callable[[], object], args: Sequence[object]) -> int | None:
    """Peak memory of a run above what is allocated before it; None if that is not known.

    It is not known on a CPU, and not of CUDA graphs, whose memory stays allocated.  PyTorch's
    statistics of peak memory start again.
    """
    devices = {x.device for x in args if isinstance(x, Tensor) and x.is_cuda}
    if len(devices) != 1:
        return None
    (device,) = devices
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before or None


def input_bytes(args: Sequence[object]) -> int:
    """Memory of tensors on their GPU, or on the CPU if none is on a GPU; shared memory once."""
    tensors = [x for x in args if isinstance(x, Tensor) and x.layout == torch.strided]
    devices = {x.device for x in tensors if x.is_cuda} or {torch.device("cpu")}
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device in devices:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # subclasses without any
                memory = tensor.untyped_storage()
                sizes[memory._cdata] = memory.nbytes()
    return sum(sizes.values())


@contextlib.contextmanager
def call_state(call: Call) -> Iterator[None]:
    """The modes of the call; random generators are restored at the end."""
    devices = {x.device.index for x in call.args if isinstance(x, Tensor) and x.is_cuda}
    with (
        torch.random.fork_rng(sorted(devices)),
        torch.inference_mode(call.inference),
        torch.set_grad_enabled(call.grad),
    ):
        yield
