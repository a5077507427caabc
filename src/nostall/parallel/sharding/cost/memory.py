"""Modelled peak memory of a GPU: the state of the parameters and the tensors that are alive."""

from __future__ import annotations

from dataclasses import dataclass

from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.graph import (
    Assignment,
    Edge,
    ShardingGraph,
    input_placements,
    output_placements,
)

ADAM_STATE_FACTOR = 4.0
"""Parameters, gradients and Adam's two moments in the parameters' type."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one GPU; all GPUs of a plan have equal tensors."""

    state: float
    """Parameters, gradients and optimiser state."""
    tensors: float
    """Largest sum of all other tensors that are alive at once."""

    @property
    def peak(self) -> float:
        """Bytes of both together."""
        return self.state + self.tensors


def memory_use(prices: Prices, assignment: Assignment, state_factor: float) -> MemoryUse:
    """Peak memory of a plan that is possible.

    The program runs the operators in their order and frees a tensor after its last use.  Views and
    branches share the memory of their input; a redistributed tensor lives until its consumer is
    done.
    """
    graph = prices.graph
    last_use = _last_uses(graph)
    owner: dict[int, int] = {}
    users: dict[int, int] = {}
    size: dict[int, float] = {}
    ends: dict[int, list[int]] = {}
    for tensor, operator in last_use.items():
        ends.setdefault(operator, []).append(tensor)
    edges: dict[int, list[Edge]] = {}
    for edge in graph.edges:
        edges.setdefault(edge.consumer, []).append(edge)
    alive = peak = state = 0.0

    def own_bytes(tensor: int) -> float:
        placements = output_placements(graph, assignment, tensor)
        return prices.local_bytes(graph.tensors[tensor], placements) or 0.0

    for number, operator in enumerate(graph.operators):
        if operator.kind == "parameter":
            state += state_factor * own_bytes(operator.outputs[0])
            continue
        temporary = 0.0
        shared: int | None = None
        for edge in edges.get(number, []):
            source = output_placements(graph, assignment, edge.tensor)
            target = input_placements(graph, assignment, edge)
            if source != target:
                temporary += prices.local_bytes(graph.tensors[edge.tensor], target) or 0.0
            elif shared is None and edge.tensor in owner:
                shared = owner[edge.tensor]
        is_view = operator.kind == "branch" or not operator.moves_memory
        for tensor in operator.outputs:
            if is_view and shared is not None:
                owner[tensor] = shared
            else:
                owner[tensor] = tensor
                size[tensor] = own_bytes(tensor)
                alive += size[tensor]
            users[owner[tensor]] = users.get(owner[tensor], 0) + 1
        peak = max(peak, alive + (0.0 if operator.kind == "branch" else temporary))
        for tensor in ends.get(number, []):
            root = owner.get(tensor)
            if root is not None:
                users[root] -= 1
                if users[root] == 0:
                    alive -= size[root]
    return MemoryUse(state, peak)


def _last_uses(graph: ShardingGraph) -> dict[int, int]:
    """For each tensor, the operator after which it is free; gradients are part of the state."""
    last = {t: n for n, o in enumerate(graph.operators) for t in o.outputs}
    for edge in graph.edges:
        if graph.operators[edge.consumer].kind != "parameter":
            last[edge.tensor] = max(last[edge.tensor], edge.consumer)
    return last
