"""Checked launches of an attention step: its own batch, and seeded batches of odd lengths.

A candidate must give the bits of the original, whose result is compared with fp64. The scratch and
the result hold NaN before each launch, so that a result of an earlier launch is not taken for this
one's. In batches of odd lengths so do the slots of the cache that no sequence owns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nostall.core.errors import BadInput
from nostall.serving.attention.launch import PagedCache
from nostall.serving.attention.winners.exact import exact_token
from nostall.serving.attention.winners.gpu_batch import GpuBatch, PlanLaunch
from nostall.serving.batch.odd_batches import odd_batch, unowned_slots
from nostall.tuning.attention.step import AttentionStep

_GUARD_ROWS, _GUARD = 64, 7.0
"""Rows behind the result that no kernel may write, and what they hold."""
_LIMIT = 1.1
"""Allowed error, in units of the roundings of weights and results to the inputs' dtype."""
_FEW_SMS = 7
_MOST_ELEMENTS = 1 << 24
"""Elements of a cache that is compared after each launch, at most."""
_LEAST_SPLIT = 256
"""Keys of a unit in checked batches, so that short sequences are split too."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A launch with known results."""

    batch: GpuBatch
    launch: PlanLaunch
    expected: Tensor
    """The original's result, with the rows behind it."""
    allowed: Tensor
    """Allowed error of the sampled tokens, (sampled, heads, head dimension)."""
    before: tuple[Tensor, ...]
    """Copies of what a launch reads."""

    @staticmethod
    def of(batch: GpuBatch, launch: PlanLaunch) -> Sample:
        """Run the original twice.

        Raises :class:`BadInput` if its result is wrong or does not repeat: then nothing can be
        compared with it.
        """
        before = tuple(tensor.clone() for tensor in _inputs(batch, launch))
        results = [_run(batch, launch) for _ in range(2)]
        sample = Sample(batch, launch, results[0], _allowed_error(batch), before)
        if not sample.is_exact(results[0]):
            raise BadInput(
                f"the original attention of {len(batch.ragged)} sequences differs from fp64; "
                "nothing can be compared with it: please report this bug"
            )
        if not _same(*results):
            raise BadInput(
                "two launches of the original attention differ; nothing can be compared with it: "
                "please report this bug"
            )
        return sample

    def is_exact(self, result: Tensor) -> bool:
        """Whether the sampled tokens are those of fp64, up to the roundings of the dtype."""
        error = (result[self.batch.sampled].double() - self.batch.exact).abs()
        return bool((error <= self.allowed).all())

    def problem(self) -> str:
        """Run the kernel that is in use now; why its result is refused, or an empty text."""
        result = _run(self.batch, self.launch)
        inputs = list(zip(_inputs(self.batch, self.launch), self.before, strict=True))
        checks = {
            "differs from the original's": _same(result, self.expected),
            "differs from fp64": self.is_exact(result),
            "comes with changed inputs": all(_same(now, then) for now, then in inputs),
            "comes with a queue that is not empty": not bool(self.launch.buffers.queue.any()),
        }
        wrong = [text for text, is_right in checks.items() if not is_right]
        for now, then in inputs if wrong else ():
            now.copy_(then)  # the next candidate is judged on the same inputs
        sequences = len(self.batch.ragged)
        return f"the result of {sequences} sequences {', and '.join(wrong)}" if wrong else ""


def own_sample(step: AttentionStep, batch: GpuBatch, sms: int) -> Sample:
    """The step itself, with the first cache of ``batch``."""
    first = replace(batch, caches=batch.caches[:1])
    return Sample.of(first, first.launch(step.plan, sms))


def odd_sample(step: AttentionStep, seed: int, sms: int, device: torch.device) -> Sample:
    """A batch of odd lengths for the same kernels; its tables are for the GPU or for a few SMs."""
    rng = np.random.default_rng(seed)
    shape = step.shape
    ragged = odd_batch(
        rng,
        shape.page_size,
        seed=seed,
        has_prefixes=shape.has_prefixes,
        has_trees=shape.has_trees,
    )
    if not ragged.query_lengths.any():
        return odd_sample(step, seed + (1 << 32), sms, device)
    plan = replace(
        step.plan, units_per_program=int(rng.choice([0, 1, 4])), least_split=_LEAST_SPLIT
    )
    batch = GpuBatch.of(ragged, shape, getattr(torch, step.dtype), device, most_copies=1)
    # Small scales spread the weights over many keys, large ones put them on few.
    batch.query.mul_(float(rng.choice([0.1, 1.0, 4.0])))
    cache = PagedCache(*(pages.clone() for pages in batch.caches[0][:2]))
    free = torch.from_numpy(unowned_slots(ragged)).to(device)
    for pages in cache[:2]:
        pages[free] = float("nan")
    exact = [exact_token(ragged, shape, batch.query, cache, int(t)) for t in batch.sampled]
    batch = replace(batch, caches=(cache,), exact=torch.stack(exact))
    return Sample.of(batch, batch.launch(plan, int(rng.choice([sms, _FEW_SMS]))))


def _run(batch: GpuBatch, launch: PlanLaunch) -> Tensor:
    """The result of one launch with the first cache, and the rows behind it."""
    tokens = len(batch.query)
    size = (tokens + _GUARD_ROWS, *batch.query.shape[1:])
    guarded = torch.full(size, _GUARD, dtype=batch.query.dtype, device=batch.query.device)
    guarded[:tokens] = float("nan")
    launch.buffers.queue.zero_()
    launch.buffers.partial.fill_(float("nan"))
    launch.buffers.partial_log_sums.fill_(float("nan"))
    launch(batch.caches[0], guarded[:tokens])
    return guarded


def _allowed_error(batch: GpuBatch) -> Tensor:
    """The allowed error of the sampled tokens: roundings of the weights and of the result."""
    pages = batch.caches[0]
    absolute = pages._replace(values=pages.values.abs())
    sums = [
        exact_token(batch.ragged, batch.shape, batch.query, absolute, int(token))
        for token in batch.sampled
    ]
    roundoff = torch.finfo(batch.query.dtype).eps / 2
    return _LIMIT * (roundoff * (batch.exact.abs() + torch.stack(sums)) + 1e-6)


def _inputs(batch: GpuBatch, launch: PlanLaunch) -> tuple[Tensor, ...]:
    """What a launch reads; large caches are left out, to save time and memory."""
    tables = launch.buffers.tables
    pages = batch.caches[0][:2]
    is_small = pages[0].numel() < _MOST_ELEMENTS
    return (
        batch.query,
        *(pages if is_small else ()),
        *batch.tensors,
        tables.tasks,
        tables.program_offsets,
        tables.reductions,
        tables.counts,
        tables.prefix_rows,
    )


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return bool(torch.equal(first.view(words), second.view(words)))
