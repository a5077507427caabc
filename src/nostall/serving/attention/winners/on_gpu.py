"""The search for the plan of a batch's kind on this GPU, and the storing of its winner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from nostall.core.errors import MissingPart
from nostall.core.measurement import Comparison
from nostall.core.search import Budget
from nostall.gpu.clock import Clock, ReplayClock, Run
from nostall.search import make
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.gluon_launch import has_gluon_kernel
from nostall.serving.attention.plan import AttentionPlan
from nostall.serving.attention.rules import PLANS, BatchKind, Kind, plan_for
from nostall.serving.attention.space import FAILURES, PlanObjective, PlanSpace
from nostall.serving.attention.winners.gpu_batch import GpuBatch
from nostall.serving.attention.winners.plan_store import PlanKey, record_of, save_plan
from nostall.serving.batch.ragged import RaggedBatch

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
    return PlanSpace(kernels, has_fixed_grid=True, has_prefixes=shape.has_prefixes, start=rule)


def search_on_gpu(
    batch: RaggedBatch, name: str, shape: AttentionShape, dtype: str, seconds: float, seed: int
) -> Outcome:
    """Search on the current GPU, and store the winner. Raises :class:`MissingPart` without one.

    ``dtype``: bfloat16 or float16. ``name``: the batch's name in the record.
    """
    if not torch.cuda.is_available():
        raise MissingPart("no GPU is present; run this command on the GPU that will serve")
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
    key = PlanKey.of(shape, dtype, kind, str(torch.cuda.get_device_name(device)))
    ratios = (compared.ratio, compared.low, compared.high)
    record = record_of(key, found.plan, name, ratios, found.samples, found.evaluations)
    return Outcome(kind, found, save_plan(record))
