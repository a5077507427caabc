"""Modelled peak memory of a GPU: the state of the parameters and the tensors that are alive."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.graph import (
    Assignment,
    Edge,
    Operator,
    ShardingGraph,
    input_placements,
    output_placements,
)
from nostall.parallel.sharding.schedule import PREFETCH, Schedule, Start, schedule

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
    done.  Of the parameters that are gathered ahead, the largest number that may exist at once
    counts during the whole step.
    """
    graph, state = prices.graph, 0.0
    ends: dict[int, list[int]] = {}
    for tensor, last in _last_uses(graph).items():
        ends.setdefault(last, []).append(tensor)
    edges: dict[int, list[Edge]] = {}
    for edge in graph.edges:
        edges.setdefault(edge.consumer, []).append(edge)
    plan = schedule(graph, assignment)
    memory = _AliveTensors(prices, assignment, plan.started)
    for number, operator in enumerate(graph.operators):
        if operator.kind == "parameter":
            state += state_factor * memory.local_bytes(operator.outputs[0])
            continue
        memory.run(operator, edges.get(number, []))
        for tensor in ends.get(number, []):
            memory.free(tensor)
    return MemoryUse(state, memory.peak + _bytes_ahead(prices, assignment, plan))


def _bytes_ahead(prices: Prices, assignment: Assignment, plan: Schedule) -> float:
    """Largest sum of the parameters that are gathered and not read yet.

    Small parameters that share a gather count for the whole step.
    """
    graph, sizes, shared = prices.graph, list[float](), 0.0
    for action in plan.actions:
        if not isinstance(action, Start):
            continue
        if graph.operators[action.edges[0].consumer].kind == "parameter":
            continue
        own = sum(
            prices.local_bytes(graph.tensors[e.tensor], input_placements(graph, assignment, e))
            or 0.0
            for e in action.edges
        )
        if len(action.edges) > 1:
            shared += own
        else:
            sizes.append(own)
    ahead = (sum(sizes[i : i + PREFETCH + 1]) for i in range(len(sizes)))
    return shared + max(ahead, default=0.0)


class _AliveTensors:
    """Tensors that are alive while the program runs; those that share memory count once."""

    def __init__(self, prices: Prices, assignment: Assignment, ahead: Collection[Edge]) -> None:
        """``ahead`` are edges whose redistributions are counted apart."""
        self.prices, self.assignment, self.ahead = prices, assignment, ahead
        self.alive = self.peak = 0.0
        self._owner: dict[int, int] = {}
        """For each tensor that is alive, the tensor whose memory it shares, or itself."""
        self._users: dict[int, int] = {}
        """For each owner, the number of tensors that share its memory."""
        self._bytes: dict[int, float] = {}

    def local_bytes(self, tensor: int) -> float:
        """Bytes of a tensor as its producer returns it."""
        graph = self.prices.graph
        placements = output_placements(graph, self.assignment, tensor)
        return self.prices.local_bytes(graph.tensors[tensor], placements) or 0.0

    def run(self, operator: Operator, edges: Sequence[Edge]) -> None:
        """Account for the inputs that are redistributed and the outputs of an operator."""
        graph, temporary, shared = self.prices.graph, 0.0, None
        for edge in edges:
            source = output_placements(graph, self.assignment, edge.tensor)
            target = input_placements(graph, self.assignment, edge)
            if edge in self.ahead:
                continue
            if source != target:
                temporary += self.prices.local_bytes(graph.tensors[edge.tensor], target) or 0.0
            elif shared is None:
                shared = self._owner.get(edge.tensor)
        is_view = operator.kind == "branch" or not operator.moves_memory
        for tensor in operator.outputs:
            owner = shared if is_view and shared is not None else tensor
            if owner == tensor:
                self._bytes[tensor] = self.local_bytes(tensor)
                self.alive += self._bytes[tensor]
            self._owner[tensor] = owner
            self._users[owner] = self._users.get(owner, 0) + 1
        if operator.kind != "branch":  # a branch returns the redistributed tensor itself
            self.peak = max(self.peak, self.alive + temporary)

    def free(self, tensor: int) -> None:
        """Free a tensor; its memory becomes free with the last tensor that shares it."""
        owner = self._owner.get(tensor)
        if owner is not None:
            self._users[owner] -= 1
            if self._users[owner] == 0:
                self.alive -= self._bytes[owner]


def _last_uses(graph: ShardingGraph) -> dict[int, int]:
    """For each tensor, the operator after which it is free; gradients are part of the state."""
    last = {t: n for n, o in enumerate(graph.operators) for t in o.outputs}
    for edge in graph.edges:
        if graph.operators[edge.consumer].kind != "parameter":
            last[edge.tensor] = max(last[edge.tensor], edge.consumer)
    return last
