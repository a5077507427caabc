"""Placements by layer: one row for each parameter, and one for equal parameters of layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nostall.parallel.sharding.graph import Edge, input_placements, output_placements
from nostall.parallel.sharding.placements import Placements
from nostall.parallel.sharding.planners.sharding import ShardingPlan

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """Parameters of equal shape and placements whose names differ in numbers of layers only."""

    name: str
    """Name, with a range for the numbers of the layers: ``layers.0-31.norm.weight``."""
    count: int
    shape: tuple[int, ...]
    placement: Placements
    """How a GPU keeps the parameter and its gradient."""
    read: Placements
    """How the first operator that is no view reads it."""
    result: Placements
    """The placement of that operator's result."""
    local_bytes: float
    """Bytes of one of the parameters on a GPU."""


def parameter_rows(plan: ShardingPlan) -> list[ParameterRow]:
    """Rows in the order of the first parameter of each."""
    groups: dict[ParameterRow, list[str]] = {}
    for number in plan.prices.graph.parameters:
        row = _row(plan, number)
        key = replace(row, name=_NUMBER.sub("*", row.name))
        groups.setdefault(key, []).append(row.name)
    return [
        replace(key, name=_common_name(names), count=len(names)) for key, names in groups.items()
    ]


def _row(plan: ShardingPlan, number: int) -> ParameterRow:
    graph = plan.prices.graph
    operator = graph.operators[number]
    (tensor,) = operator.outputs
    placement = output_placements(graph, plan.assignment, tensor)
    use = _first_use(plan, tensor)
    read = input_placements(graph, plan.assignment, use) if use is not None else placement
    results = graph.operators[use.consumer].outputs if use is not None else ()
    result = output_placements(graph, plan.assignment, results[0]) if results else ()
    local_bytes = plan.prices.local_bytes(graph.tensors[tensor], placement) or 0.0
    shape = graph.tensors[tensor].shape
    return ParameterRow(operator.target, 1, shape, placement, read, result, local_bytes)


def _first_use(plan: ShardingPlan, tensor: int) -> Edge | None:
    """The first edge from a tensor, its views and branches into an operator that is none."""
    graph, reached = plan.prices.graph, {tensor}
    for edge in graph.edges:
        if edge.tensor in reached and graph.operators[edge.consumer].kind != "parameter":
            consumer = graph.operators[edge.consumer]
            if consumer.kind != "branch" and consumer.moves_memory:
                return edge
            reached.update(consumer.outputs)
    return None


def _common_name(names: Sequence[str]) -> str:
    """The name of all, with ``a-b`` for numbers that differ."""
    columns = [[int(n) for n in _NUMBER.findall(name)] for name in names]
    ranges = iter(
        str(min(own)) if min(own) == max(own) else f"{min(own)}-{max(own)}"
        for own in zip(*columns, strict=True)
    )
    return _NUMBER.sub(lambda _: next(ranges), names[0])
