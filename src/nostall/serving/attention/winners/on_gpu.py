"""The search for the plan of a batch's kind on this GPU, and the storing of its winner.

A batch on a GPU with random queries and caches, that plans of attention can be timed on.

Exact attention of its sampled query tokens is computed in fp64 on the device of the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nostall.core.measurement import Comparison
from nostall.core.search import Budget
from nostall.gpu.clock import Clock, ReplayClock, Run
from nostall.search import make
from nostall.serving.attention.config import AttentionPlan, AttentionShape
from nostall.serving.attention.gluon_launch import has_gluon_kernel
from nostall.serving.attention.launch import (
    AttentionBuffers,
    BatchTensors,
    MetaAttention,
    PagedCache,
)
from nostall.serving.attention.rules import PLANS, BatchKind, Kind, plan_for
from nostall.serving.attention.space import FAILURES, PlanObjective, PlanSpace, plan_fields
from nostall.serving.attention.winners.plan_store import PlanKey, PlanRecord, save_plan
from nostall.serving.batch.ragged import RaggedBatch, pack_trees
from nostall.serving.errors import BadBatch, current_gpu
from nostall.serving.tables.columns import REDUCTIONS, UNITS
from nostall.serving.tables.host import build_tables


def sample_tokens(ragged: RaggedBatch, count: int = 32, seed: int = 0) -> NDArray[np.int64]:
    """The first and last tokens of the first and last sequences, and random ones."""
    starts = ragged.query_starts
    tokens = int(starts[-1])
    edges = [0, tokens - 1, min(int(starts[len(ragged) - 1]), tokens - 1)]
    drawn = np.random.default_rng(seed).integers(0, tokens, count)
    return np.unique(np.concatenate([edges, drawn])).astype(np.int64)


def exact_token(
    ragged: RaggedBatch, shape: AttentionShape, query: Tensor, cache: PagedCache, token: int
) -> Tensor:
    """The result of one query token in fp64, (heads, head dimension)."""
    starts = ragged.query_starts
    sequence = int(np.searchsorted(starts, token, side="right")) - 1
    keys = int(ragged.kv_lengths[sequence])
    own = token - int(starts[sequence])
    context = keys - int(ragged.query_lengths[sequence])
    positions = torch.arange(keys, device=query.device)
    seen = positions <= context + own
    if shape.window:
        seen &= positions > context + own - shape.window
    mask = ragged.tree_mask(sequence)
    if mask is not None:
        seen[context:] &= torch.from_numpy(mask[own]).to(query.device)
    at = np.flatnonzero(seen.cpu().numpy())
    pages = torch.from_numpy(ragged.block_table[sequence, at // ragged.page_size]).long()
    slots = torch.from_numpy(at % ragged.page_size)
    index = (pages.to(query.device), slots.to(query.device))
    key, value = (t[index].double().transpose(0, 1) for t in (cache.keys, cache.values))
    rows = query[token].double().view(shape.kv_heads, shape.group, shape.head_dim)
    scores = rows @ key.transpose(1, 2) * shape.score_scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    return (torch.softmax(scores, dim=-1) @ value).reshape(shape.heads, shape.head_dim)


ROTATED_BYTES = 256 << 20
"""Bytes of all copies of the cache at least, so that the L2 cache (50 MB) does not hold them."""
MOST_COPIES = 8
TABLE_WIDTH = 16
"""Widths of block tables are multiples of this, so that Triton compiles no kernel for each width.
"""
TOLERANCE = 2e-2
"""Allowed error, relative to the largest exact value."""


@dataclass(frozen=True, eq=False)
class PlanLaunch:
    """The launch of one plan on one batch, with its tables on the device."""

    kernel: MetaAttention
    query: Tensor
    tensors: BatchTensors
    buffers: AttentionBuffers

    def __call__(self, cache: PagedCache, out: Tensor) -> None:
        """Attention over ``cache`` into ``out``, of the shape of the queries."""
        self.kernel(self.query, cache, out, self.tensors, self.buffers)


@dataclass(frozen=True, eq=False)
class GpuBatch:
    """One batch with its tensors; all caches hold different values."""

    ragged: RaggedBatch
    shape: AttentionShape
    query: Tensor
    caches: tuple[PagedCache, ...]
    tensors: BatchTensors
    sampled: Tensor
    """Query tokens (rows of ``query``) whose results are checked."""
    exact: Tensor
    """Their results with the first cache in fp64, (sampled, heads, head dimension)."""

    @staticmethod
    def of(
        ragged: RaggedBatch,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
        most_copies: int = MOST_COPIES,
    ) -> GpuBatch:
        """Random tensors of a batch, with at most so many copies of the cache.

        Raises :class:`BadBatch` for a batch without query tokens.
        """
        if not ragged.query_lengths.any():
            raise BadBatch("the batch has no query tokens; there is nothing to measure")
        generator = torch.Generator(device).manual_seed(0)
        blocks = int(np.max(ragged.block_table, initial=0)) + 1
        size = (blocks, ragged.page_size, shape.kv_heads, shape.head_dim)

        def draw(*lengths: int) -> Tensor:
            return torch.randn(lengths, generator=generator, device=device, dtype=dtype)

        copies = min(max(2, -(-ROTATED_BYTES // (4 * int(np.prod(size))))), most_copies)
        caches = tuple(PagedCache(draw(*size), draw(*size)) for _ in range(copies))
        query = draw(int(ragged.query_lengths.sum()), shape.heads, shape.head_dim)
        tokens = sample_tokens(ragged)
        exact = torch.stack([exact_token(ragged, shape, query, caches[0], int(t)) for t in tokens])
        sampled = torch.from_numpy(tokens).to(device)
        return GpuBatch(ragged, shape, query, caches, batch_tensors(ragged, device), sampled, exact)

    @staticmethod
    def empty(ragged: RaggedBatch, shape: AttentionShape, dtype: torch.dtype) -> GpuBatch:
        """The same tensors without memory (PyTorch's device ``meta``), to compile launches."""
        device = torch.device("meta")
        size = (1, ragged.page_size, shape.kv_heads, shape.head_dim)
        pages = torch.empty(size, dtype=dtype, device=device)
        heads = (int(ragged.query_lengths.sum()), shape.heads, shape.head_dim)
        nothing = torch.empty(0, device=device)
        return GpuBatch(
            ragged,
            shape,
            torch.empty(heads, dtype=dtype, device=device),
            (PagedCache(pages, pages),),
            batch_tensors(ragged, device),
            sampled=nothing,
            exact=nothing,
        )

    def error(self, out: Tensor) -> float:
        """Largest error of the sampled tokens, relative to the largest exact value."""
        got = out[self.sampled].double()
        return float((got - self.exact).abs().max() / self.exact.abs().max())

    def launch(self, plan: AttentionPlan, sms: int) -> PlanLaunch:
        """The launch of a plan with tables for a GPU of so many SMs."""
        tables = build_tables(self.ragged, plan.table_settings(self.shape, sms))
        buffers = AttentionBuffers.of(tables, self.shape.head_dim, self.query.device)
        programs = plan.launched_programs(sms, int(tables.counts[UNITS]))
        kernel = MetaAttention(self.shape, plan.kernel, programs, bool(tables.counts[REDUCTIONS]))
        return PlanLaunch(kernel, self.query, self.tensors, buffers)

    def run(self, plan: AttentionPlan, sms: int) -> Run:
        """Launches of a plan, one for each cache, that a CUDA graph can hold.

        Raises ``ValueError`` if the result of the first one is wrong.
        """
        launch = self.launch(plan, sms)
        out = torch.full_like(self.query, float("nan"))
        launch(self.caches[0], out)
        error = self.error(out)
        if not error < TOLERANCE:
            raise ValueError(f"wrong result: relative error {error:.2g}")

        def run() -> None:
            for cache in self.caches:
                launch(cache, out)

        return run


def batch_tensors(ragged: RaggedBatch, device: torch.device) -> BatchTensors:
    """The tensors of a batch, its block table with zeros as wide as :data:`TABLE_WIDTH` says."""
    sequences, width = ragged.block_table.shape
    table = np.zeros((sequences, -(-width // TABLE_WIDTH) * TABLE_WIDTH), np.int32)
    table[:, :width] = np.maximum(ragged.block_table, 0)
    lengths = ragged.query_starts, ragged.kv_lengths
    return BatchTensors.of(*lengths, table, pack_trees(ragged), device)


CONFIRMATIONS = 2
"""Comparisons with the rule's plan, each with fresh runs, that must all say faster."""
CONFIRM_SECONDS, TRIAL_SECONDS = 1.0, 0.1
"""About how long a comparison takes, and the measurement of one plan of the search."""


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    plan: AttentionPlan | None
    """The winner; None if no plan is surely faster than the rule's."""
    comparison: Comparison | None
    """The last confirmation, also of a plan that was not confirmed."""
    samples: list[list[float]]
    evaluations: int


def search_plan(
    space: PlanSpace,
    make_run: Callable[[AttentionPlan], Run],
    clock: Clock,
    budget: Budget,
    seed: int = 0,
) -> Found:
    """Search the space within a budget; the winner is compared with the start, the rule's plan."""
    rule = space.start()
    objective = PlanObjective(make_run, clock, {"clock": clock.name}, TRIAL_SECONDS)
    result = make("anneal").run(space, objective, budget, seed=seed)
    best, evaluations = result.best, result.evaluations
    if best == rule or result.best_measurement.failure is not None:
        return Found(None, None, [], evaluations)
    comparison: Comparison | None = None
    samples: list[list[float]] = []
    for _ in range(CONFIRMATIONS):
        try:
            runs = [make_run(rule), make_run(best), make_run(rule)]
        except FAILURES:
            return Found(None, comparison, samples, evaluations)
        samples = clock.samples("confirmation", runs, CONFIRM_SECONDS)
        comparison = Comparison.from_samples(*samples, kind=clock.kind)
        if comparison.verdict != "faster":
            return Found(None, comparison, samples, evaluations)
    return Found(best, comparison, samples, evaluations)


class Outcome(NamedTuple):
    """What a search found for which kind of batch."""

    kind: Kind
    found: Found
    path: Path | None
    """File of the stored winner; None if there is none."""


def kind_of(batch: RaggedBatch) -> BatchKind:
    """The kind of a batch, from its lengths."""
    lengths = batch.query_lengths[batch.query_lengths > 0]
    has_decodes = bool((lengths == 1).any())
    return BatchKind(has_decodes, int(lengths.max(initial=1)), batch.speculative_limit)


def rule_space(rule: AttentionPlan, shape: AttentionShape) -> PlanSpace:
    """The plans that can replace a rule's plan in a CUDA graph; the search starts at the rule's."""
    kernels = [rule.kernel, *(plan.kernel for plan in PLANS.values())]
    return PlanSpace(kernels, has_prefixes=shape.has_prefixes, start=rule)


def search_on_gpu(
    batch: RaggedBatch, name: str, shape: AttentionShape, dtype: str, seconds: float, seed: int
) -> Outcome:
    """Search on the current GPU, and store the winner. Raises ``MissingPart`` without one.

    ``dtype``: bfloat16 or float16. ``name``: the batch's name in the record.
    """
    gpu = current_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    described = kind_of(batch)
    kind = described.kind(shape.group)
    rule: AttentionPlan = plan_for(shape, described, has_gluon=has_gluon_kernel(device))
    space = rule_space(rule, shape)
    tensors = GpuBatch.of(batch, shape, getattr(torch, dtype), device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    budget = Budget(seconds=seconds)
    found = search_plan(space, lambda plan: tensors.run(plan, sms), ReplayClock(), budget, seed)
    compared = found.comparison
    if found.plan is None or compared is None:
        return Outcome(kind, found, None)
    record = PlanRecord(
        key=PlanKey.of(shape, dtype, kind, gpu),
        plan=json.loads(json.dumps(plan_fields(found.plan))),
        batch=name,
        ratio=compared.ratio,
        low=compared.low,
        high=compared.high,
        samples=tuple(map(tuple, found.samples)),
        evaluations=found.evaluations,
    )
    return Outcome(kind, found, save_plan(record))
