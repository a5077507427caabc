"""Inductor baselines of kernels: the ATen calls that kernels replace, as graphs of their own."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.attach.torch_compile.rewrite.kernel_selection import KernelMatch
from nostall.attach.torch_compile.rewrite.matching import operator_owners
from nostall.fusion.capture import CapturedGraph

Calls = frozenset[FxNode]


@dataclass(frozen=True)
class InductorBaseline:
    """A graph for Inductor that computes the same as some kernels."""

    # Kernels that can only be used together, because they compute parts of the same ATen calls.
    matches: tuple[KernelMatch, ...]
    module: GraphModule

    @property
    def bytes_moved(self) -> int:
        """Bytes of all inputs and outputs: what has to be read or written at least."""
        nodes = [*self.module.graph.find_nodes(op="placeholder")]
        nodes += self.module.graph.output_node().all_input_nodes
        return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in nodes)


def copy_graph(module: GraphModule) -> GraphModule:
    """A copy of the graph with its nodes' metadata, because compilers modify the original."""
    graph = FxGraph()
    graph.output(graph.graph_copy(module.graph, {}))
    return GraphModule(module, graph)


def inductor_baselines(
    module: GraphModule, captured: CapturedGraph, matches: Sequence[KernelMatch]
) -> list[InductorBaseline]:
    """One baseline for each kernel; a common one for kernels that share an ATen call."""
    owners = calls_of_operators(captured)
    groups: list[tuple[list[KernelMatch], Calls]] = []
    for match in matches:
        calls = frozenset(call for index in match.operators for call in owners[index])
        merged, rest = [match], []
        for group in groups:
            if group[1] & calls:
                merged = [*group[0], *merged]
                calls |= group[1]
            else:
                rest.append(group)
        groups = [*rest, (merged, calls)]
    owning = frozenset(call for calls in owners.values() for call in calls)
    return [
        InductorBaseline(tuple(group), _CallExtractor(captured, calls, owning).extract(module))
        for group, calls in groups
    ]


def calls_of_operators(captured: CapturedGraph) -> dict[int, list[FxNode]]:
    """For each operator, the ATen call it was lowered from, and calls that compute the same."""
    calls = {index: [call] for index, call in operator_owners(captured).items()}
    for node, value in captured.values.items():
        if isinstance(value, int) and not _is_item(node) and node not in calls.get(value, [node]):
            calls[value].append(node)
    return calls


def extract_calls(module: GraphModule, captured: CapturedGraph, calls: Calls) -> GraphModule:
    """Some calls of a graph, with all views and constants that they read, as a graph of its own."""
    owning = frozenset(x for each in calls_of_operators(captured).values() for x in each) | calls
    return _CallExtractor(captured, calls, owning, with_views=True).extract(module)


class _CallExtractor:
    """Extracts some calls of a graph, with the views and constants between them."""

    def __init__(
        self, captured: CapturedGraph, calls: Calls, owning: Calls, *, with_views: bool = False
    ) -> None:
        """``owning``: all calls that were lowered to operators, which cost something to compute.

        ``with_views``: views of other nodes are extracted, too; by default they are inputs.
        """
        self._captured, self._calls, self._owning = captured, calls, owning
        self._with_views = with_views
        self._known: dict[FxNode, bool] = {}

    def extract(self, module: GraphModule) -> GraphModule:
        """A graph of the calls.  Its outputs are the results that the rest of ``module`` reads."""
        nodes = self._nodes()
        graph, copies = FxGraph(), dict[FxNode, FxNode]()
        inputs = (x for node in nodes for x in node.all_input_nodes if x not in nodes)
        for node in dict.fromkeys(inputs):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in nodes:
            copies[node] = graph.node_copy(node, lambda operand: copies[operand])
        graph.output(tuple(copies[node] for node in nodes if self._is_output(node, nodes)))
        return GraphModule(module, graph)

    def _nodes(self) -> dict[FxNode, None]:
        """The extracted nodes in the order of their graph.

        These are the calls, the items of their results, and the views and constants that they read.
        """
        waiting = [*self._calls]
        waiting += [user for call in self._calls for user in call.users if _is_item(user)]
        extracted: set[FxNode] = set()
        while waiting:
            node = waiting.pop()
            if node not in extracted:
                extracted.add(node)
                waiting += [x for x in node.all_input_nodes if self._is_inside(x)]
        graph: Iterable[FxNode] = next(iter(self._calls)).graph.nodes
        return {node: None for node in graph if node in extracted}

    def _is_output(self, node: FxNode, nodes: dict[FxNode, None]) -> bool:
        is_result = node in self._calls or _is_item(node)
        return is_result and self._is_read_outside(node, nodes)

    def _is_read_outside(self, node: FxNode, nodes: dict[FxNode, None]) -> bool:
        """Whether a node that is not extracted reads a node, directly or by extracted views."""
        return any(
            user not in nodes
            or (
                user not in self._calls
                and not _is_item(user)
                and self._is_read_outside(user, nodes)
            )
            for user in node.users
        )

    def _is_inside(self, node: FxNode) -> bool:
        """Whether a node is extracted: a call, or a view or constant of nothing but such nodes."""
        if node not in self._known:
            self._known[node] = self._compute_is_inside(node)
        return self._known[node]

    def _compute_is_inside(self, node: FxNode) -> bool:
        if node in self._calls or node.op == "get_attr":
            return True
        if node.op != "call_function" or node in self._owning or self._is_opaque(node):
            return False
        if self._with_views and self._is_view(node):
            return True
        return all(self._is_inside(operand) for operand in node.all_input_nodes)

    def _is_view(self, node: FxNode) -> bool:
        value = self._captured.values.get(node)
        return isinstance(value, int) and self._captured.graph[value].kind == "layout"

    def _is_opaque(self, node: FxNode) -> bool:
        """Whether a node was not captured as operators, so that its cost is unknown."""
        if _is_item(node):
            return False
        value = self._captured.values.get(node)
        values = value if isinstance(value, tuple) else (value,)
        return any(i is None or self._captured.graph[i].kind == "opaque" for i in values)


def _is_item(node: FxNode) -> bool:
    """Whether a node is one of several results of a call."""
    return node.target is operator.getitem
