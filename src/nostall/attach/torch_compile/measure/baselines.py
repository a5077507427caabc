"""What Inductor is given to compute in place of some kernels: their ATen calls, on their own."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.attach.torch_compile.rewrite.matching import Part, owners
from nostall.fusion.capture import CapturedGraph

Calls = frozenset[FxNode]


@dataclass(frozen=True)
class Rival:
    """``module`` computes what the kernels of ``parts`` compute; they come and go together."""

    parts: tuple[Part, ...]
    module: GraphModule

    @property
    def moved(self) -> int:
        """Bytes that are read or written at least."""
        nodes = [*self.module.graph.find_nodes(op="placeholder")]
        nodes += self.module.graph.output_node().all_input_nodes
        return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in nodes)


def copied(module: GraphModule) -> GraphModule:
    """The graph with all that its nodes know, for later: compilers change theirs."""
    graph = FxGraph()
    graph.output(graph.graph_copy(module.graph, {}))
    return GraphModule(module, graph)


def rivals(module: GraphModule, captured: CapturedGraph, parts: Sequence[Part]) -> list[Rival]:
    """For every kernel one; for all those together that compute parts of the same ATen call."""
    owner = owners(captured)
    groups: list[tuple[list[Part], Calls]] = []
    for part in parts:
        calls = frozenset(owner[index] for index in part.operators)
        together, others = [part], []
        for group in groups:
            if group[1] & calls:
                together = [*group[0], *together]
                calls |= group[1]
            else:
                others.append(group)
        groups = [*others, (together, calls)]
    return [
        Rival(tuple(group), _Alone(captured, calls, frozenset(owner.values())).module(module))
        for group, calls in groups
    ]


class _Alone:
    """Some calls of a graph, and whatever costs nothing between them."""

    def __init__(self, captured: CapturedGraph, calls: Calls, owning: Calls) -> None:
        self._captured, self._calls, self._owning = captured, calls, owning
        self._known: dict[FxNode, bool] = {}

    def module(self, whole: GraphModule) -> GraphModule:
        """Their graph.  Whatever it reads from outside is an input; the results that others read
        are its outputs."""
        needed = self._needed()
        graph, new = FxGraph(), dict[FxNode, FxNode]()
        given = (x for node in needed for x in node.all_input_nodes if x not in needed)
        for node in dict.fromkeys(given):
            new[node] = graph.placeholder(node.name)
            new[node].meta = dict(node.meta)
        for node in needed:
            new[node] = graph.node_copy(node, lambda operand: new[operand])
        graph.output(tuple(new[node] for node in needed if self._is_result(node, needed)))
        return GraphModule(whole, graph)

    def _needed(self) -> dict[FxNode, None]:
        """The calls, the parts of their results, and the views and constants that they read, in the
        order of the whole graph."""
        waiting = [*self._calls]
        waiting += [user for call in self._calls for user in call.users if _is_item(user)]
        found: set[FxNode] = set()
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [x for x in node.all_input_nodes if self._inside(x)]
        every: Iterable[FxNode] = next(iter(self._calls)).graph.nodes
        return {node: None for node in every if node in found}

    def _is_result(self, node: FxNode, needed: dict[FxNode, None]) -> bool:
        computed = node in self._calls or _is_item(node)
        return computed and any(user not in needed for user in node.users)

    def _inside(self, node: FxNode) -> bool:
        """Whether a node is computed here: a call, or a view or constant that leads to nothing but
        calls."""
        if node not in self._known:
            self._known[node] = self._is_inside(node)
        return self._known[node]

    def _is_inside(self, node: FxNode) -> bool:
        if node in self._calls or node.op == "get_attr":
            return True
        free = node.op == "call_function" and node not in self._owning and not self._opaque(node)
        return free and all(self._inside(operand) for operand in node.all_input_nodes)

    def _opaque(self, node: FxNode) -> bool:
        if _is_item(node):
            return False
        value = self._captured.values.get(node)
        values = value if isinstance(value, tuple) else (value,)
        return any(i is None or self._captured.graph[i].kind == "opaque" for i in values)


def _is_item(node: FxNode) -> bool:
    """Whether this is one of several results of a call."""
    return node.target is operator.getitem
