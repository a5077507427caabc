"""Plans that ``benchmarks.sharding.gpu.plans`` compares: rules, mixed rules and the planner's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.graph import Operator, ShardingGraph
from nostall.parallel.sharding.placements import REPLICATED, Placement, shard
from nostall.parallel.sharding.planners.rules import RULES, Rule
from nostall.parallel.sharding.planners.sharding import (
    Options,
    ShardingPlan,
    plan_by_rule,
    plan_sharding,
)

_BETWEEN_LAYERS = ("layer_norm", "aten.add.")
_data_parallel, _fsdp, _megatron = (
    RULES[name].outer if name != "megatron" else RULES[name].inner
    for name in ("data-parallel", "fsdp", "megatron")
)


def _columns(operator: Operator, graph: ShardingGraph) -> Placement | None:
    """All parameters sharded along their first dimension, the batch replicated."""
    if operator.kind == "parameter":
        return shard(0)
    return REPLICATED if operator.kind == "input" else None


def _rows(operator: Operator, graph: ShardingGraph) -> Placement | None:
    """All matrices sharded along their second dimension, the batch replicated."""
    if operator.kind == "parameter":
        return shard(len(graph.tensors[operator.outputs[0]].shape) - 1)
    return REPLICATED if operator.kind == "input" else None


def _mixed(is_megatron: Callable[[str], bool]) -> Rule:
    """Megatron's rules for some parameters, data parallelism for the others."""

    def wanted(operator: Operator, graph: ShardingGraph) -> Placement | None:
        if operator.kind == "parameter" and is_megatron(operator.target):
            return _megatron(operator, graph)
        return _data_parallel(operator, graph)

    return Rule("mixed", wanted, _data_parallel)


def _with_whole_activations(rule: Rule) -> Rule:
    """The rule with replicated norms and residual sums: tensor parallelism within a layer only."""

    def wanted(operator: Operator, graph: ShardingGraph) -> Placement | None:
        is_between_layers = any(name in operator.target for name in _BETWEEN_LAYERS)
        return REPLICATED if is_between_layers else rule.inner(operator, graph)

    return Rule(f"{rule.name}, whole activations", wanted, rule.outer)


def _everything_replicated(operator: Operator, graph: ShardingGraph) -> Placement | None:
    return REPLICATED if operator.kind in ("parameter", "input", "operation") else None


def _is_odd_layer(name: str) -> bool:
    found = re.search(r"layers\.(\d+)", name)
    return found is not None and int(found[1]) % 2 == 1


ONE_DIMENSION: tuple[Rule, ...] = (
    RULES["data-parallel"],
    RULES["fsdp"],
    RULES["megatron"],
    Rule("columns", _columns, _columns),
    _with_whole_activations(RULES["megatron"]),
    _with_whole_activations(Rule("columns", _columns, _columns)),
    _with_whole_activations(Rule("rows", _rows, _rows)),
    Rule("replicated", _everything_replicated, _everything_replicated),
    replace(_mixed(_is_odd_layer), name="odd layers megatron"),
    replace(_mixed(lambda name: "proj" in name), name="layers megatron"),
    replace(_mixed(lambda name: "layers" not in name), name="head megatron"),
)
TWO_DIMENSIONS: tuple[Rule, ...] = (
    RULES["megatron"],
    _with_whole_activations(RULES["megatron"]),
    Rule("fsdp x megatron", _megatron, _fsdp),
    Rule("data-parallel x fsdp", _fsdp, _data_parallel),
)
"""Rules whose outer dimension is data parallel or FSDP-like."""


def meshes(gpus: int) -> list[tuple[int, ...]]:
    """All GPUs in one dimension, and two halves of them."""
    return [(gpus,), (2, gpus // 2)] if gpus >= 4 else [(gpus,)]


def candidates(
    prices: Prices, seconds: float, names: Sequence[str] | None = None
) -> list[ShardingPlan]:
    """The plans of rules and of the planner, each within ``seconds``; impossible ones lack.

    ``names`` selects rules; None stands for all.
    """
    every: Sequence[Rule] = ONE_DIMENSION if len(prices.graph.mesh) == 1 else TWO_DIMENSIONS
    rules = [rule for rule in every if names is None or rule.name in names]
    found = [plan_by_rule(prices, rule, Options(seconds=seconds)) for rule in rules]
    best, _ = plan_sharding(prices, Options(seconds=seconds))
    return [plan for plan in [best, *found] if plan is not None]
