"""Plain against stitched, the whole graph forward and backward, side by side on equal inputs.

The rules are those of all comparisons of nostall: interleaved samples, the plain version a second
time as the null, and stitched kernels only where the whole interval is above 1 and above the null.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from nostall.attach.torch_compile.measure.accuracy import Version, largest_difference, run_version
from nostall.attach.torch_compile.measure.call import Call
from nostall.attach.torch_compile.runtime.custom_op import observed
from nostall.attach.torch_compile.store.records import ComparisonRecord
from nostall.core.measurement import Comparison
from nostall.gpu.clock import Clock

LONGER = 4.0
"""Times as long a comparison is made once more that could have been a gain but for the noise."""


class NotStitched(Exception):
    """The stitched version calls no stitched kernel."""


def judge(
    graph: str, plain: Version, stitched: Version, call: Call, clock: Clock, seconds: float
) -> tuple[ComparisonRecord, tuple[str, ...]]:
    """Compare two versions on a call; also the kernels that the stitched one has called.

    Raises :class:`NotStitched`, :class:`Differs`, and whatever a version raises.
    """
    with _as_called(call):
        # Compiled graphs may come from PyTorch's caches: only running them shows what they call.
        with observed() as called:
            seeds = run_version(plain, call.fresh()).seeds
            difference = largest_difference(plain, stitched, call, seeds)
        if not called:
            raise NotStitched
        args = call.fresh()
        runs = [
            lambda v=version: run_version(v, args, seeds) for version in (plain, stitched, plain)
        ]
        one, other, null = clock.samples(graph, runs, seconds)
        found = Comparison.of(one, other, null, kind=clock.kind)
        if found.verdict == "same" and found.high > 1.0:
            # The first samples decided nothing, so they are no part of what does.
            one, other, null = clock.samples(graph, runs, LONGER * seconds)
            found = Comparison.of(one, other, null, kind=clock.kind)
    record = ComparisonRecord(
        kind=found.kind,
        clock=clock.name,
        inductor=tuple(one),
        stitched=tuple(other),
        null=tuple(null),
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        null_low=found.null_low,
        null_high=found.null_high,
        difference=difference,
    )
    return record, tuple(sorted(called))


@contextlib.contextmanager
def _as_called(call: Call) -> Iterator[None]:
    """The modes of the call; the program's random numbers go on as if nothing had been run."""
    devices = {x.device.index for x in call.args if isinstance(x, Tensor) and x.is_cuda}
    with (
        torch.random.fork_rng(sorted(devices)),
        torch.inference_mode(call.inference),
        torch.set_grad_enabled(call.grad),
    ):
        yield
