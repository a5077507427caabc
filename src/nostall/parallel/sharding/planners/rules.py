"""Shardings of one rule: data parallelism, FSDP-like, and Megatron's tensor parallelism.

A rule restricts the placements of parameters and of the batch on a mesh dimension.  The integer
program places everything else, so each rule is as fast as the cost model allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nostall.parallel.sharding.graph import Operator, ShardingGraph
from nostall.parallel.sharding.placements import REPLICATED, Placement, is_sharded, shard

Wanted = Callable[[Operator, ShardingGraph], Placement | None]
"""The placement that a parameter or a tensor of the batch should have; None allows any."""

_COLUMN, _ROW = 0, 1
"""Dimensions of nn.Linear's weight that Megatron shards: outputs, and inputs."""
_MEGATRON: tuple[tuple[str, int, int | None], ...] = (
    (r"(^|\.)c_attn\.|(^|\.)c_fc\.", 1, 0),  # GPT-2's Conv1D has transposed weights
    (r"(attn|mlp)\.c_proj\.", 0, None),
    (r"(q|k|v|gate|up)_proj\.|\.(query|key|value|q|k|v|wi|wi_0|wi_1|w1|w3)\.", _COLUMN, 0),
    (r"(intermediate\.dense|fc1|linear1|dense_h_to_4h)\.", _COLUMN, 0),
    (r"(o|down)_proj\.|\.(o|wo|w2)\.", _ROW, None),
    (r"(output\.dense|fc2|linear2|dense_4h_to_h)\.", _ROW, None),
    (r"(embed_tokens|wte|word_embeddings|shared|lm_head|decoder)\.weight", 1, None),
)
"""(part of a parameter's name, sharded dimension of a matrix, that of a vector or None).  Megatron
shards embeddings by vocabulary; DTensor's strategies have no such one, so it is their width."""
HEADS = r"(^|\.)(lm_head|output_layer)($|\.)"
"""Names of layers whose outputs are logits of classes."""


@dataclass(frozen=True)
class Rule:
    """One named rule."""

    name: str
    inner: Wanted
    """For the last mesh dimension."""
    outer: Wanted
    """For the others."""
    keeps_parameters: bool = False
    """Whether operators read parameters as they are stored, so that none is gathered."""


def _data_parallel(operator: Operator, graph: ShardingGraph) -> Placement | None:
    """Parameters replicated, the batch sharded by samples."""
    if operator.kind == "parameter":
        return REPLICATED
    return shard(0) if operator.kind == "input" else None


def _fsdp(operator: Operator, graph: ShardingGraph) -> Placement | None:
    """Parameters sharded along their first dimension, the batch sharded by samples."""
    return shard(0) if operator.kind in ("parameter", "input") else None


def _megatron(operator: Operator, graph: ShardingGraph) -> Placement | None:
    """Parameters sharded by Megatron's rules for their names, the batch replicated."""
    if operator.kind != "parameter":
        return REPLICATED if operator.kind == "input" else None
    is_matrix = len(graph.tensors[operator.outputs[0]].shape) > 1
    for pattern, matrix_dim, vector_dim in _MEGATRON:
        if re.search(pattern, operator.target):
            dim = matrix_dim if is_matrix else vector_dim
            return REPLICATED if dim is None else shard(dim)
    return REPLICATED


def _tensor_parallel(operator: Operator, graph: ShardingGraph) -> Placement | None:
    """As Megatron's rules, with heads cut by classes and embeddings whole: no strategy of DTensor
    cuts an embedding by words."""
    if operator.kind == "parameter" and re.search(_MEGATRON[-1][0], operator.target):
        return shard(0) if re.search(HEADS, operator.target) else REPLICATED
    return _megatron(operator, graph)


def megatron_dim(weight: str) -> int | None:
    """The dimension of a linear layer's weight inside a block that Megatron's rules shard.

    None for other names, also those of embeddings and heads.
    """
    return next((dim for pattern, dim, _ in _MEGATRON[2:-1] if re.search(pattern, weight)), None)


def _replicated(operator: Operator, graph: ShardingGraph) -> Placement | None:
    """Everything replicated: each device does the same work."""
    return REPLICATED if operator.kind in ("parameter", "input") else None


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("data-parallel", _data_parallel, _data_parallel),
        Rule("fsdp", _fsdp, _fsdp),
        Rule("megatron", _megatron, _data_parallel),
        Rule("tensor-parallel", _tensor_parallel, _data_parallel, keeps_parameters=True),
        Rule("replicated", _replicated, _replicated),
    )
}
"""Rules by name.  On two mesh dimensions, ``megatron`` and ``tensor-parallel`` are data parallel on
the outer one."""


def allowed_strategies(rule: Rule, graph: ShardingGraph, mesh_dim: int) -> list[frozenset[int]]:
    """For each operator, the numbers of the strategies that a rule allows on a mesh dimension.

    A tensor that cannot be sharded as wanted is replicated.
    """
    wanted = rule.inner if mesh_dim == len(graph.mesh) - 1 else rule.outer
    result = []
    for operator in graph.operators:
        strategies = operator.strategies[mesh_dim]
        placement = wanted(operator, graph)
        if placement is None:
            result.append(frozenset(range(len(strategies))))
            continue
        placements: Sequence[Placement] = [s.outputs[0] for s in strategies]
        found = placement if placement in placements else REPLICATED
        is_fallback = not is_sharded(found)
        fallback = placements.index(REPLICATED)
        result.append(frozenset({fallback if is_fallback else placements.index(found)}))
    if rule.keeps_parameters and mesh_dim == len(graph.mesh) - 1:
        _keep_parameters(graph, mesh_dim, result)
    return result


def _keep_parameters(graph: ShardingGraph, mesh_dim: int, allowed: list[frozenset[int]]) -> None:
    """Leave the strategies that read parameters, and views of them, as they are stored."""
    stored: dict[int, Placement] = {}
    for number, operator in enumerate(graph.operators):
        strategies = operator.strategies[mesh_dim]
        known = {p: stored[t] for p, t in enumerate(operator.inputs) if t in stored}
        if operator.kind != "parameter":
            fitting = frozenset(
                n for n in allowed[number]
                if known and all(strategies[n].inputs[p] == own for p, own in known.items())
            )  # fmt: skip
            allowed[number] = fitting or allowed[number]
        if operator.kind == "parameter" or (known and number in graph.stored_operators):
            for position, tensor in enumerate(operator.outputs):
                found = {strategies[n].outputs[position] for n in allowed[number]}
                if len(found) == 1:
                    stored[tensor] = next(iter(found))
