"""Segments of a program: operators between two redistributions as one compiled function.

Inductor sees the local tensors, so it fuses what one device computes between collectives.  Equal
segments, such as those of equal layers, share one function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from nostall.parallel.module.compilation import Compiled
from nostall.parallel.sharding.capture.operators import CapturedStep
from nostall.parallel.sharding.graph import Edge
from nostall.parallel.sharding.placements import Placements, local_shape
from nostall.parallel.sharding.program.local_operator import LocalOperator
from nostall.parallel.sharding.schedule import Action, Run, Start

_LEAST = 2
"""Operations of a segment that is worth a function of its own."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive operators as one function of local tensors of a device."""

    operators: tuple[int, ...]
    reads: tuple[Edge, ...]
    """What the function is given, redistributed."""
    outputs: tuple[int, ...]
    """Numbers of the tensors that the function returns."""
    function: Callable[..., Sequence[torch.Tensor]]


class SegmentCompiler:
    """Makes the segments of a captured step."""

    def __init__(
        self,
        step: CapturedStep,
        calls: Sequence[LocalOperator | None],
        edges: Sequence[Sequence[Edge]],
        targets: Mapping[Edge, Placements],
        redistributed: Collection[Edge],
        note: Callable[[str], None],
    ) -> None:
        """``calls`` and ``edges`` are those of each operator, ``targets`` how edges are read.

        ``redistributed`` are the edges that change placements.  ``note`` is told why a segment is
        not compiled.
        """
        self.step, self.graph = step, step.graph
        self._calls, self._edges, self._targets = calls, edges, targets
        self._redistributed, self._note = redistributed, note
        self._functions: dict[str, Compiled] = {}
        self._consumers: dict[int, set[int]] = {}
        for edge in self.graph.edges:
            self._consumers.setdefault(edge.tensor, set()).add(edge.consumer)

    def segments(
        self,
        actions: Sequence[Action],
        kept: Collection[int],
    ) -> list[Action | Segment]:
        """The actions with segments in the place of operators.

        ``kept`` are the tensors that are read after the last action.
        """
        result: list[Action | Segment] = []
        group: list[int] = []

        def close() -> None:
            if sum(self._calls[n] is not None for n in group) >= _LEAST:
                result.append(self._segment(group, kept))
            else:
                result.extend(map(Run, group))
            group.clear()

        for action in actions:
            kind = "" if isinstance(action, Start) else self.graph.operators[action.operator].kind
            if isinstance(action, Start) or kind not in ("operation", "branch"):
                close()
                result.append(action)
                continue
            # What is redistributed exists before the segment, and is waited for only where it is
            # read.
            if any(edge in self._redistributed for edge in self._edges[action.operator]):
                close()
            group.append(action.operator)
        close()
        return result

    def _segment(self, group: Sequence[int], kept: Collection[int]) -> Segment:
        graph, values = Graph(), dict[int, Node]()
        reads: list[Edge] = []
        for number in group:
            operator, inputs = self.graph.operators[number], []
            for edge in self._edges[number]:
                if edge in self._redistributed or edge.tensor not in values:
                    node = graph.placeholder(f"given_{len(reads)}")
                    reads.append(edge)
                    if edge not in self._redistributed:
                        values[edge.tensor] = node
                else:
                    node = values[edge.tensor]
                inputs.append(node)
            results = inputs if operator.kind == "branch" else self._call(graph, number, inputs)
            values.update(zip(operator.outputs, results, strict=True))
        inside = set(group)
        own = {t for number in group for t in self.graph.operators[number].outputs}
        needed = {tensor for tensor in own if not self._consumers.get(tensor, set()) <= inside}
        outputs = tuple(sorted(needed | (own & set(kept))))
        graph.output(tuple(values[tensor] for tensor in outputs))
        return Segment(tuple(group), tuple(reads), outputs, self._function(graph, reads))

    def _call(self, graph: Graph, number: int, inputs: Sequence[Node]) -> list[Node]:
        """Add an operation to a graph; returns the nodes of its outputs."""
        call, source = self._calls[number], self.step.nodes[number]
        assert call is not None and source is not None
        shaped = [torch.empty(self._shape(e), device="meta") for e in self._edges[number]]
        args, kwargs = call.bind(inputs, shaped)
        node = graph.call_function(call.target, tuple(args), kwargs)
        if not isinstance(source.meta["val"], list | tuple):
            return [node]
        return [graph.call_function(_item, (node, index)) for index in call.indices]

    def _shape(self, edge: Edge) -> tuple[int, ...]:
        """The local shape of what a consumer reads."""
        whole = self.graph.tensors[edge.tensor].shape
        return local_shape(whole, self._targets[edge], self.graph.mesh) or ()

    def _function(self, graph: Graph, reads: Sequence[Edge]) -> Compiled:
        module = GraphModule(torch.nn.Module(), graph)
        given = [(self._shape(edge), self.graph.tensors[edge.tensor].dtype) for edge in reads]
        key = f"{module.code}\n{given}"
        if key not in self._functions:
            self._functions[key] = Compiled(module, self._note)
        return self._functions[key]


def _item(values: Any, index: int) -> Any:
    return values[index]
