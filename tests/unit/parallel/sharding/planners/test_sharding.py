"""The planner: optimum against enumeration, rules, memory limits, tied operators."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

from nostall.parallel.errors import Infeasible
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, CollectiveCost
from nostall.parallel.sharding.cost.prices import Prices, step_cost
from nostall.parallel.sharding.cost.timeline import timeline
from nostall.parallel.sharding.graph import Operator, ShardingGraph, TensorInfo
from nostall.parallel.sharding.placements import Strategy
from nostall.parallel.sharding.planners.integer_program import Problem, solve
from nostall.parallel.sharding.planners.rules import RULES, allowed_strategies
from nostall.parallel.sharding.planners.sharding import Options, plan_sharding
from nostall.parallel.sharding.planners.tied import tie
from tests.unit.parallel.sharding.cost.test_prices import CLUSTER, RATES, _linear


def _prices(gather_s: float | None = None) -> Prices:
    """Prices of the linear step; an all-gather may take a fixed time."""
    costs = {} if gather_s is None else {("all-gather", 0): CollectiveCost(gather_s, 0.0)}
    return Prices(_linear(), ClusterMesh(CLUSTER, (2,), costs), RATES)


def test_the_plan_is_the_optimum_of_all_assignments() -> None:
    prices = _prices()
    choices = [range(len(o.strategies[0])) for o in prices.graph.operators]
    possible = [
        (numbers,)
        for numbers in itertools.product(*choices)
        if step_cost(prices, (numbers,)) is not None
    ]
    optimum = min(timeline(prices, assignment).step_s for assignment in possible)
    plan, rules = plan_sharding(prices, Options())
    assert plan.step_s == pytest.approx(optimum)
    assert 0 < plan.bound_s <= optimum and plan.solutions[0].is_integral
    assert {rule.name for rule in rules} == set(RULES)
    assert all(rule.step_s >= plan.step_s for rule in rules)


def test_without_overlap_the_program_is_the_optimum_of_the_sums() -> None:
    prices = _prices()
    choices = [range(len(o.strategies[0])) for o in prices.graph.operators]
    costs = [step_cost(prices, (numbers,)) for numbers in itertools.product(*choices)]
    optimum = min(cost.step_s for cost in costs if cost is not None)
    problem = Problem(prices, tie(prices.graph), 0, ((0,) * len(prices.graph.operators),))
    solution = solve(problem, 10.0)
    assert solution.is_integral and solution.objective_s == pytest.approx(optimum, rel=1e-3)


def test_a_memory_limit_shards_the_parameter_or_is_infeasible() -> None:
    prices = _prices(gather_s=1.0)
    free, _ = plan_sharding(prices, Options(state_factor=1e3))
    assert free.memory.state == 400e3  # the parameter is replicated
    limited, _ = plan_sharding(prices, Options(memory=350e3, state_factor=1e3))
    assert limited.memory.state == 200e3 and not limited.is_proven
    assert limited.memory.peak <= 350e3
    assert limited.step_s >= free.step_s
    with pytest.raises(Infeasible, match="use more GPUs"):
        plan_sharding(prices, Options(memory=100e3, state_factor=1e3))


def test_a_rule_falls_back_to_replication() -> None:
    graph = _linear()
    names = {o.name: number for number, o in enumerate(graph.operators)}
    fsdp = allowed_strategies(RULES["fsdp"], graph, 0)
    assert fsdp[names["w"]] == {1}
    whole = tuple(
        replace(o, strategies=(o.strategies[0][:1],)) if o.name == "w" else o
        for o in graph.operators
    )
    unsharded = replace(graph, operators=whole)
    assert allowed_strategies(RULES["fsdp"], unsharded, 0)[names["w"]] == {0}
    megatron = allowed_strategies(RULES["megatron"], graph, 0)
    assert megatron[names["x"]] == {0}
    assert megatron[names["mm"]] == {0, 1}


def test_equal_layers_are_tied() -> None:
    """Ten equal products in a row: those far from both ends get one class."""
    rule = (Strategy(("R",), ("R",)), Strategy(("S0",), ("S0",)))
    source = Operator("x", "input", "x", (), (0,), ((Strategy((), ("R",)),),))
    layers = [
        Operator(f"layer{i}", "operation", "mm", (i,), (i + 1,), (rule,), signature="mm")
        for i in range(10)
    ]
    tensors = (TensorInfo((4,), "float32", 4),) * 11
    graph = ShardingGraph("chain", (2,), tensors, (source, *layers))
    assert len(tie(graph).members) == 11  # small graphs are not tied
    tied = tie(graph, radius=2)
    assert [len(members) for members in tied.members] == [1, 1, 1, 6, 1, 1]
    assert sum(edge.count for edge in tied.edges) == len(graph.edges)
    separated = tie(graph, (tuple(int(i == 5) for i in range(11)),), radius=0)
    assert len(separated.members) == 3  # the input, one layer with another strategy, the rest
