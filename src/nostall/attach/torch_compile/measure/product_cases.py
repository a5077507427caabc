"""The products of a graph, and the graph of its own in which each of them is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from nostall.attach.torch_compile.measure.baselines import copy_graph, extract_calls
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.rewrite.matching import operator_owners
from nostall.attach.torch_compile.rewrite.products import products_of
from nostall.attach.torch_compile.rewrite.rewrite import insert_kernels
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion.capture import CapturedGraph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.products.find import FoundProduct
from nostall.fusion.products.neighbours import operators_in_front

MAX_NEIGHBOURS = 64
"""Operators behind a kernel that are measured with it, at most."""


@dataclass(frozen=True)
class ProductCase:
    """A product of a graph, and the graph of its own in which it is measured."""

    found: FoundProduct
    module: GraphModule


@dataclass(frozen=True)
class Occurrence:
    """A product where it occurs in a graph; equal layers have equal products."""

    found: FoundProduct
    captured: CapturedGraph
    module: GraphModule
    graph: int
    """Number of the graph."""
    contested: frozenset[str] = frozenset()
    """Keys of the matches of stitched kernels that compute readers of the product."""

    @property
    def places(self) -> frozenset[tuple[int, str]]:
        """The calls of the products: number of the graph, name of the call."""
        return frozenset((self.graph, node.name) for node in self.found.products)

    @property
    def case(self) -> ProductCase:
        return ProductCase(self.found, product_module(self.module, self.captured, self.found))


def occurrences(graphs: Sequence[GraphModule], kernel_filter: KernelFilter) -> Iterator[Occurrence]:
    """All products of some graphs, behind the kernels that are inserted first."""
    for number, graph in enumerate(graphs):
        module = copy_graph(graph)
        if not kernel_filter.products_only:
            insert_kernels(module, KernelStore(), kernel_filter, RewriteResult())
        captured_and_products = products_of(module)
        if captured_and_products is not None:
            captured, products = captured_and_products
            for found in products.found:
                yield Occurrence(found, captured, module, number)


def by_bytes(found: Iterable[Occurrence]) -> list[list[Occurrence]]:
    """Occurrences of equal kernels together; those that could save the most bytes come first.

    Kernels with operators in front of their products come last.
    """
    groups: dict[str, list[Occurrence]] = {}
    saved: Counter[str] = Counter()
    for each in found:
        key = each.found.kernel.graph.key
        groups.setdefault(key, []).append(each)
        saved[key] += each.found.bytes_saved
    ordered = [groups[key] for key, _ in saved.most_common()]
    return sorted(ordered, key=lambda same: bool(same[0].found.kernel.prologue))


def product_module(
    module: GraphModule, captured: CapturedGraph, found: FoundProduct
) -> GraphModule:
    """The graph of a product, the operators around it and what Inductor would fuse with those."""
    graph, owners = captured.graph, operator_owners(captured)
    operators = {*found.operators, *operators_in_front(graph, found)}
    # Calls behind the product: what needs their results is no part of Inductor's next kernels.
    calls_behind = 0
    for index in found.anchors:
        calls_behind |= graph.descendants[index] & graph.opaque
    waiting = list(found.captured(found.kernel.graph.outputs))
    most = len(operators) + MAX_NEIGHBOURS
    while waiting and len(operators) < most:
        for reader in graph.consumers[waiting.pop()]:
            is_next = graph[reader].kind in COMPUTE and not graph.ancestors[reader] & calls_behind
            if is_next and reader not in operators:
                operators.add(reader)
                waiting.append(reader)
    calls = {owners[index] for index in operators if index in owners} | set(found.products)
    return extract_calls(module, captured, frozenset(calls))


def title(case: ProductCase) -> str:
    shape = case.found.kernel.shape
    graph = case.found.kernel.graph
    operators: Sequence[str] = list(dict.fromkeys(graph[i].op for i in case.found.kernel.epilogue))
    before = ", ".join(dict.fromkeys(graph[i].op for i in case.found.kernel.prologue[:-1]))
    return (
        f"{shape.rows} x {shape.columns} x {shape.depth} {shape.dtype}"
        f"{' (two products)' if shape.count == 2 else ''} with {', '.join(operators)}"
        f"{f' behind it and {before} in front' if before else ''}"
    )
