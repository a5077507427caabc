"""Hybrid plans that ``benchmarks.sharding.gpu.hybrids`` compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from benchmarks.sharding.gpu.results import PLANNER
from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import Infeasible
from nostall.parallel.module import Model
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import Assignment, Operator, ShardingGraph, replicated
from nostall.parallel.sharding.hybrid.planner import (
    Hybrid,
    HybridEffort,
    Measured,
    first_gpus,
    plan_hybrid,
    stage_ends,
    stage_s,
    transfer_s,
)
from nostall.parallel.sharding.hybrid.run import capture_stage
from nostall.parallel.sharding.hybrid.search import HybridPlan, HybridStage, Key
from nostall.parallel.sharding.hybrid.stage_job import RECEIVED, StageJob
from nostall.parallel.sharding.placements import Placement
from nostall.parallel.sharding.planners.rules import RULES, Rule
from nostall.parallel.sharding.planners.sharding import (
    Options,
    ShardingPlan,
    plan_by_rule,
    priced_plan,
)

MICRO_BATCHES = (4, 2, 8)
PIECES = 4
"""Pieces of a model that stages consist of."""
STATE_FACTOR = 2.0
"""Parameters and gradients; the steps are without an optimiser."""
_RULES = ("data-parallel", "megatron")
"""Rules for the stages of the best plan whose stages have several GPUs."""
_RULED_MICRO_BATCHES = 4
"""Micro-batches of the plans of rules and of other cuts."""


@dataclass(frozen=True)
class HybridCandidate:
    """A plan without graphs, which ranks send each other."""

    name: str
    stages: tuple[HybridStage, ...]
    micro_batches: int
    assignments: tuple[Assignment, ...]

    @property
    def place(self) -> str:
        """Stages and micro-batches: ``2:2, 4 micro-batches``."""
        gpus = ":".join(str(stage.devices) for stage in self.stages)
        return f"{gpus}, {self.micro_batches} micro-batches"

    @property
    def step_s(self) -> float:
        """Modelled seconds of a step."""
        return HybridPlan(self.stages, self.micro_batches).step_s


@dataclass(frozen=True)
class Setting:
    """What all plans of a model have in common."""

    model: Model
    cluster: Cluster
    rates: DeviceRates
    measured: Measured
    micro_batches: int
    seconds: float
    """Longest search for stages, and for the sharding of one stage by a rule."""

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        return self.model.job.samples // self.micro_batches


def counts(samples: int) -> list[int]:
    """Numbers of micro-batches into which a batch is split, of at least two samples each."""
    return [n for n in MICRO_BATCHES if samples % n == 0 and samples // n >= 2]


def hybrid_candidates(setting: Setting) -> list[HybridCandidate]:
    """The plans of one number of micro-batches; none if stages are impossible."""
    model, gpus = setting.model, len(setting.cluster)
    try:
        found = plan_hybrid(
            model, setting.cluster, setting.rates, setting.samples, setting.micro_batches,
            STATE_FACTOR,
            HybridEffort(until=monotonic() + setting.seconds, ends=_even_ends(model)),
            setting.measured,
        )  # fmt: skip
    except Infeasible:
        return []
    plans: dict[tuple[tuple[Key, ...], str], HybridCandidate] = {}

    def add(name: str, candidate: HybridCandidate | None) -> None:
        if candidate is not None:
            keys = tuple((s.first, s.end, s.devices) for s in candidate.stages)
            plans.setdefault((keys, name if name in _RULES else ""), candidate)

    for name, is_allowed in _kinds(len(model), gpus).items():
        add(name, _of_planner(name, found, setting, is_allowed))
    if setting.micro_batches == _RULED_MICRO_BATCHES:
        even = found.best_with(lambda key: 1 < key[2] < gpus)
        for name in _RULES if even is not None else ():
            add(name, _by_rule(RULES[name], even, setting))
        for cut in _even_ends(model)[1:-1] if gpus == 2 else ():
            is_allowed = _cut_at(cut)
            add(
                f"cut at layer {cut}",
                _of_planner(f"cut at layer {cut}", found, setting, is_allowed),
            )
    return list(plans.values())


def _kinds(layers: int, gpus: int) -> dict[str, Callable[[Key], bool]]:
    """Conditions on stages (first layer, end, GPUs) by the name of the best plan."""
    return {
        PLANNER: lambda key: key[:2] != (0, layers),
        "stages of one GPU": lambda key: key[2] == 1,
        "stages of half the GPUs": lambda key: key[2] == gpus // 2,
        "first stage of half the GPUs": lambda key: key[2] == (gpus // 2 if key[0] == 0 else 1),
        "last stage of half the GPUs": (
            lambda key: key[2] == (gpus // 2 if key[1] == layers else 1)
        ),
    }


def _cut_at(cut: int) -> Callable[[Key], bool]:
    return lambda key: cut in key[:2] and key[2] == 1


def _of_planner(
    name: str, found: Hybrid, setting: Setting, is_allowed: Callable[[Key], bool]
) -> HybridCandidate | None:
    plan = found.best_with(is_allowed)
    if plan is None or len(plan.stages) == 1:
        return None
    planned = found.planned(plan)
    assignments = tuple(sharding.assignment for _, sharding in planned)
    return HybridCandidate(name, plan.stages, setting.micro_batches, assignments)


def _by_rule(rule: Rule, plan: HybridPlan, setting: Setting) -> HybridCandidate | None:
    """The stages of a plan with the shardings of a rule."""
    stages, assignments = [], []
    for stage in plan.stages:
        sharding = _sharding_by_rule(rule, stage, setting)
        if sharding is None:
            return None
        seconds = stage_s(setting.model, sharding, stage.first, stage.end, setting.samples)
        seconds += transfer_s(setting.model, setting.cluster, stage.end, setting.samples)
        stages.append(replace(stage, seconds=seconds))
        assignments.append(sharding.assignment)
    return HybridCandidate(rule.name, tuple(stages), setting.micro_batches, tuple(assignments))


def _sharding_by_rule(rule: Rule, stage: HybridStage, setting: Setting) -> ShardingPlan | None:
    captured = capture_stage(setting.model, stage.first, stage.end, setting.samples, stage.devices)
    part = first_gpus(setting.cluster, stage.devices)
    mesh = ClusterMesh(part, (stage.devices,), setting.measured.get(stage.devices, {}))
    prices = Prices(captured.step.graph, mesh, setting.rates)
    if stage.devices == 1:
        return priced_plan("one GPU", prices, replicated(prices.graph), STATE_FACTOR)
    return plan_by_rule(prices, _for_stage(rule, captured.stage), Options(seconds=setting.seconds))


def _for_stage(rule: Rule, stage: StageJob) -> Rule:
    """A rule for the model's names; received tensors are placed as the batch is."""

    def wanted(operator: Operator, graph: ShardingGraph) -> Placement | None:
        if operator.target.startswith(RECEIVED):
            return rule.inner(replace(operator, kind="input"), graph)
        name = stage.names.get(operator.target, operator.target)
        return rule.inner(replace(operator, target=name), graph)

    return Rule(rule.name, wanted, wanted)


def _even_ends(model: Model, pieces: int = PIECES) -> Sequence[int]:
    """Ends of pieces with about as many parameters each, among the layers at which stages may end.

    The parameters of a matrix are proportional to its work.
    """
    ends = stage_ends(model, len(model))
    before = [sum(p.numel() for p in model.stage_parameters(0, end)) for end in ends]
    chosen = {
        min(range(1, len(ends) - 1), key=lambda i: abs(before[i] / before[-1] - part / pieces))
        for part in range(1, pieces)
        if len(ends) > 2
    }
    return [0, *(ends[i] for i in sorted(chosen)), len(model)]
