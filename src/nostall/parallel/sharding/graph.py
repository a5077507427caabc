"""Graph of a training step for sharding: tensors, and operators with their strategies.

The graph is free of PyTorch.  A parameter is an operator that reads its gradient, so its placement
is also that of its gradient; it is the only operator that may read a tensor of a later one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from nostall.parallel.sharding.placements import Strategy

OperatorKind = Literal["parameter", "input", "constant", "operation", "branch", "loss"]
"""``branch`` returns its input: consumers behind it share one redistribution."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and element type of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """PyTorch's name without prefix, such as ``float32``."""
    itemsize: int
    """Bytes of an element."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the graph."""

    name: str
    kind: OperatorKind
    target: str
    """PyTorch's operator; for a parameter its name in the module."""
    inputs: tuple[int, ...]
    """Numbers of the tensors that the operator reads, in the order of its arguments."""
    outputs: tuple[int, ...]
    """Numbers of the tensors that the operator returns."""
    strategies: tuple[tuple[Strategy, ...], ...]
    """For each mesh dimension, the strategies; the first one replicates everything."""
    flops: float = 0.0
    """Floating-point operations on the whole tensors."""
    unread: frozenset[int] = frozenset()
    """Positions of inputs of which only a few rows are read, such as an embedding table."""
    moves_memory: bool = True
    """Whether the operator reads and writes memory; views do not."""
    is_forward: bool = True
    """Whether the loss depends on the operator."""
    signature: str = ""
    """Text that is equal for operators with equal target, arguments and shapes."""
    may_fuse: bool = False
    """Whether a compiler puts the operator into one kernel with others of its size."""


@dataclass(frozen=True)
class ShardingGraph:
    """Operators in an order in which they can run, and the tensors between them."""

    name: str
    mesh: tuple[int, ...]
    """Number of devices along each mesh dimension, which the strategies are for."""
    tensors: tuple[TensorInfo, ...]
    operators: tuple[Operator, ...]
    without_rule: tuple[str, ...] = ()
    """Targets without any sharding rule, one entry for each operator; these are replicated."""

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """For each tensor, the number of the operator that returns it."""
        producers = [-1] * len(self.tensors)
        for number, operator in enumerate(self.operators):
            for tensor in operator.outputs:
                producers[tensor] = number
        return tuple(producers)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """One edge for each input of each operator."""
        return tuple(
            Edge(tensor, self.producers[tensor], self._output_position(tensor), consumer, position)
            for consumer, operator in enumerate(self.operators)
            for position, tensor in enumerate(operator.inputs)
        )

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Numbers of the operators that are parameters."""
        return self.of_kind("parameter")

    def of_kind(self, kind: OperatorKind) -> tuple[int, ...]:
        """Numbers of the operators of one kind."""
        return tuple(i for i, operator in enumerate(self.operators) if operator.kind == kind)

    @cached_property
    def stored_operators(self) -> tuple[int, ...]:
        """Parameters, constants and the batch, and views of these, in the graph's order."""
        stored: dict[int, None] = {}
        for number, operator in enumerate(self.operators):
            is_view = operator.kind == "branch" or (
                operator.kind == "operation" and not operator.moves_memory and operator.inputs
            )
            is_source = operator.kind in ("parameter", "constant", "input")
            if is_source or (is_view and all(self.producers[t] in stored for t in operator.inputs)):
                stored[number] = None
        return tuple(stored)

    @cached_property
    def saved_tensors(self) -> tuple[int, ...]:
        """Results of forward operations that the backward pass reads: the stored activations."""
        saved = {
            edge.tensor
            for edge in self.edges
            if not self.operators[edge.consumer].is_forward
            and self.operators[edge.producer].is_forward
            and self.operators[edge.producer].kind in ("operation", "branch", "input")
        }
        return tuple(sorted(saved))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of mesh, operators and tensors; equal if a plan of one graph fits the other."""
        parts = [repr((self.mesh, self.tensors))]
        parts += [repr((o.name, o.kind, o.target, o.inputs, o.outputs)) for o in self.operators]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _output_position(self, tensor: int) -> int:
        return self.operators[self.producers[tensor]].outputs.index(tensor)


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor on its way from one operator to one input of another."""

    tensor: int
    producer: int
    output: int
    """Position of the tensor among the outputs of the producer."""
    consumer: int
    position: int
    """Position of the tensor among the inputs of the consumer."""


Assignment = tuple[tuple[int, ...], ...]
"""For each mesh dimension, the number of the strategy of each operator."""


def replicated(graph: ShardingGraph) -> Assignment:
    """The assignment in which every device does all the work."""
    return tuple((0,) * len(graph.operators) for _ in graph.mesh)


def input_placements(graph: ShardingGraph, assignment: Assignment, edge: Edge) -> tuple[str, ...]:
    """Placements of a tensor, one for each mesh dimension, in which its consumer reads it."""
    operator = graph.operators[edge.consumer]
    return tuple(
        operator.strategies[d][numbers[edge.consumer]].inputs[edge.position]
        for d, numbers in enumerate(assignment)
    )


def output_placements(graph: ShardingGraph, assignment: Assignment, tensor: int) -> tuple[str, ...]:
    """Placements of a tensor, one for each mesh dimension, as its producer returns it."""
    producer = graph.producers[tensor]
    position = graph.operators[producer].outputs.index(tensor)
    return tuple(
        graph.operators[producer].strategies[d][numbers[producer]].outputs[position]
        for d, numbers in enumerate(assignment)
    )


def strategy_of(graph: ShardingGraph, assignment: Assignment, operator: int) -> Sequence[Strategy]:
    """The chosen strategies of an operator, one for each mesh dimension."""
    chosen = graph.operators[operator].strategies
    return [chosen[d][numbers[operator]] for d, numbers in enumerate(assignment)]
