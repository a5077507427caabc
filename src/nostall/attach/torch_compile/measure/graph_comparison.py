"""Compare the baseline and the candidate of a whole graph, forward and backward, on equal inputs.

The rules are those of all comparisons of nostall: samples are interleaved, the baseline is measured
twice (the second time as the null), and the candidate is faster only if its whole interval is above
1 and above the null's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nostall.attach.torch_compile.measure.accuracy import GraphFunction, max_error, run_graph
from nostall.attach.torch_compile.measure.call import Call
from nostall.attach.torch_compile.runtime.custom_op import record_calls
from nostall.attach.torch_compile.store.records import ComparisonRecord
from nostall.core.measurement import Comparison
from nostall.gpu.clock import Clock

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
"""A candidate may have so many times the peak memory of Inductor's version, and
:data:`MEMORY_SLACK` bytes more."""
MEMORY_SLACK = 1 << 20
LESS_MEMORY = 0.95
"""A peak memory below this share of that of Inductor's version is a reason for a candidate."""
RETRY_FACTOR = 4.0
"""If noise may hide a gain, the comparison is repeated, so many times as long."""


class NoStitchedKernel(Exception):
    """The candidate calls no stitched kernel, so there is nothing to compare."""


def judge(record: ComparisonRecord) -> str:
    """The verdict on a candidate, by its time and its peak memory."""
    verdict = record.comparison().verdict
    if not record.inductor_bytes or record.stitched_bytes is None:
        return verdict
    limit = MOST_MEMORY * record.inductor_bytes + MEMORY_SLACK
    if verdict == "faster":
        return "more memory" if record.stitched_bytes > limit else verdict
    is_less = record.stitched_bytes < LESS_MEMORY * record.inductor_bytes - MEMORY_SLACK
    return "less memory" if is_less and verdict == "same" else verdict


def compare_graphs(
    graph: str,
    baseline: GraphFunction,
    candidate: GraphFunction,
    call: Call,
    clock: Clock,
    seconds: float,
    program: GraphFunction | None = None,
    needs_kernels: bool = True,
) -> tuple[ComparisonRecord, tuple[str, ...]]:
    """Compare two versions of a graph on a call; also returns the kernels that the candidate calls.

    ``seconds``: approximate duration of the measurement. ``program``: the graph as PyTorch runs it,
    for a reference in higher precision. ``needs_kernels``: whether the candidate differs from the
    baseline only by stitched kernels.

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
        inductor_bytes, stitched_bytes = (peak_bytes(run, args) for run in runs[:2])
        first, second, null = clock.samples(graph, runs, seconds)
        comparison = Comparison.from_samples(first, second, null, kind=clock.kind)
        if comparison.verdict == "same" and comparison.high > 1.0:
            # Only the longer measurement decides, so that its samples are not a selection.
            first, second, null = clock.samples(graph, runs, RETRY_FACTOR * seconds)
            comparison = Comparison.from_samples(first, second, null, kind=clock.kind)
    record = ComparisonRecord(
        kind=comparison.kind,
        clock=clock.name,
        inductor=tuple(first),
        stitched=tuple(second),
        null=tuple(null),
        ratio=comparison.ratio,
        low=comparison.low,
        high=comparison.high,
        null_low=comparison.null_low,
        null_high=comparison.null_high,
        difference=difference,
        inductor_bytes=inductor_bytes,
        stitched_bytes=stitched_bytes,
    )
    return record, tuple(sorted(kernels))


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
