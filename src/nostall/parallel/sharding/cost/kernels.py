"""Kernels of compiled operators: elementwise operators and reductions share one where they can.

As Inductor does, operators of one size are in one kernel if they read each other's results, or the
same tensor, and nothing between them is a kernel of its own.  Results that no other kernel reads
stay out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.parallel.sharding.graph import Operator, ShardingGraph


@dataclass(frozen=True, slots=True)
class KernelShare:
    """What an operator adds to the kernel that it is in."""

    reads: frozenset[int]
    """Positions of the inputs that are read from memory for it."""
    writes: frozenset[int]
    """Positions of the outputs that are written to memory."""
    starts: bool
    """Whether it is the first operator of a kernel."""


def kernel_shares(graph: ShardingGraph) -> Sequence[KernelShare]:
    """The share of each operator."""
    return _Kernels(graph).shares()


class _Kernels:
    """The kernel of each operator; views have none."""

    def __init__(self, graph: ShardingGraph) -> None:
        self._graph = graph
        self._source = list(range(len(graph.tensors)))
        """For each tensor, the one whose memory it is."""
        self._level = [0] * len(graph.tensors)
        """For each tensor, the most kernels in a row that lead to it."""
        self._kernel: list[int | None] = [None] * len(graph.operators)
        self._of_tensor: dict[int, int] = {}
        """The kernel that computes a tensor."""
        self._same: dict[tuple[object, ...], int] = {}
        """Kernels by level, size and pass, with a tensor that they read or compute."""
        self._last = -1
        for number, operator in enumerate(graph.operators):
            self._add(number, operator)

    def shares(self) -> Sequence[KernelShare]:
        """One for each operator."""
        outside = set[int]()
        for number, operator in enumerate(self._graph.operators):
            if self._kernel[number] is None and _is_view(operator):
                continue
            own = {self._source[t] for t in operator.inputs}
            outside |= {t for t in own if self._of_tensor.get(t) != self._kernel[number]}
        known: set[tuple[int | None, int]] = set()
        started: set[int] = set()
        result = []
        for number, operator in enumerate(self._graph.operators):
            kernel, reads = self._kernel[number], set[int]()
            for position, tensor in enumerate(operator.inputs):
                source = self._source[tensor]
                if self._of_tensor.get(source) != kernel and (kernel, source) not in known:
                    reads.add(position)
                    known.add((kernel, source))
            writes = {p for p, t in enumerate(operator.outputs) if t in outside}
            starts = kernel is not None and kernel not in started
            started |= {kernel} if kernel is not None else set()
            result.append(KernelShare(frozenset(reads), frozenset(writes), starts))
        return result

    def _add(self, number: int, operator: Operator) -> None:
        inputs = [self._source[t] for t in operator.inputs]
        if _is_view(operator):
            if inputs:
                for tensor in operator.outputs:
                    self._source[tensor] = inputs[0]
            return
        if operator.kind != "operation":
            return
        size = _size(self._graph, operator)
        level = max((self._after(t, operator, size) for t in inputs), default=0)
        kernel = None
        keys = [(level, size, operator.is_forward, t) for t in (*inputs, *operator.outputs)]
        if operator.may_fuse:
            kernel = next((self._same[key] for key in keys if key in self._same), None)
        if kernel is None:
            self._last += 1
            kernel = self._last
        self._kernel[number] = kernel
        for tensor in operator.outputs:
            self._of_tensor[tensor], self._level[tensor] = kernel, level
        if operator.may_fuse:
            self._same.update(dict.fromkeys(keys, kernel))

    def _after(self, tensor: int, reader: Operator, size: int) -> int:
        """The level of a reader of a tensor: the next one, unless it may share its kernel."""
        producer = self._graph.operators[self._graph.producers[tensor]]
        if tensor not in self._of_tensor:
            return 0
        is_shared = (
            producer.may_fuse
            and reader.may_fuse
            and producer.is_forward is reader.is_forward
            and _size(self._graph, producer) == size
        )
        return self._level[tensor] + (not is_shared)


def _is_view(operator: Operator) -> bool:
    is_view = operator.kind == "operation" and not operator.moves_memory
    return operator.kind == "branch" or is_view


def _size(graph: ShardingGraph, operator: Operator) -> int:
    """Elements of the largest tensor that an operator reads whole or writes."""
    read = (t for p, t in enumerate(operator.inputs) if p not in operator.unread)
    return max((graph.tensors[t].elements for t in (*read, *operator.outputs)), default=0)
