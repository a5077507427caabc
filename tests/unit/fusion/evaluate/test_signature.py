"""Tests of signatures: equal patterns are evaluated once, and unequal ones stay apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.generate import no_kernel_reason
from nostall.fusion.evaluate import delta
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore import explore
from nostall.fusion.explore.integer_program import enumerate_columns
from nostall.fusion.graph.partition import Mask, members, to_mask
from nostall.fusion.graph.regions import extract_region
from tests.unit.fusion.codegen.graphs.operator_graphs import operator_graphs


def two_copies(graph: Graph) -> Graph:
    """Two copies of a graph as one graph, with an operator that reads the very last output."""
    build = Builder()
    outputs: list[int] = []
    for _ in range(2):
        place: dict[int, int] = {}
        for node in graph:
            place[node.index] = len(build.nodes)
            inputs = tuple(place[i] for i in node.inputs)
            build.nodes.append(replace(node, index=len(build.nodes), inputs=inputs))
        outputs += [place[i] for i in graph.outputs]
    return build.graph(*outputs, build("exp", outputs[-1]))


def check(shared: DeltaEvaluator, masks: Iterable[Mask]) -> None:
    """Compare patterns with an evaluator of their own, which can share nothing with others."""
    for mask in masks:
        single = DeltaEvaluator(extract_region(shared.graph, list(members(mask))).graph)
        operators = to_mask(single.graph.operators)
        assert shared.kernel_time(mask) == single.kernel_time(operators)
        assert shared.can_fuse(mask) == single.can_fuse(operators)


@settings(max_examples=15, deadline=None)
@given(operator_graphs(most=6))
def test_patterns_cost_the_same_in_a_graph_of_their_own(graph: Graph) -> None:
    shared = DeltaEvaluator(two_copies(graph))
    check(shared, enumerate_columns(shared, max_columns=60).patterns)


def test_similar_patterns_are_distinguished() -> None:
    """Pairs of operators that differ in one property."""
    build = Builder()
    x, y, row = build.input((512, 512)), build.input((512, 512)), build.input((512,))
    transposed = build("permute", x, dims=(1, 0))
    viewed = build("view", x, shape=(512, 512))
    pairs = []
    for other in (x, transposed, viewed, y, row):
        total = build("sum", x, dims=(1,), keepdim=True)
        pairs.append((total, build("mul", total, other)))
        first = build("exp", x)
        pairs.append((first, build("add", first, other)))
        # The same operators with other operands.
        pairs.append((build("exp", x), build("add", y, other)))
        pairs.append((build("exp", x), build("add", first, other)))
    results = [index for pair in pairs for index in pair]
    for written in (results, results[1::2]):
        shared = DeltaEvaluator(build.graph(*written))
        # Dead nodes are no operators.
        masks = [1 << first | 1 << second for first, second in pairs]
        live = [mask for mask in masks if not mask & ~shared.operators]
        assert len(live) >= len(pairs) // 2
        check(shared, live)


def chain(layers: int) -> Graph:
    """Norms with opaque nodes between them, each norm with a weight of its own."""
    build = Builder()
    x = build.input((4096, 768))
    for _ in range(layers):
        squares = build("sum", build("square", x), dims=(1,), keepdim=True)
        x = build("mul", build("mul", x, build("rsqrt", squares)), build.input((768,)))
        x = build.opaque("matmul", x, shape=(4096, 768), dtype="float32")
    return build.graph(x)


def test_repeated_layers_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Graph] = []

    def recorded(graph: Graph, operators: Iterable[int]) -> str | None:
        checked.append(graph)
        return no_kernel_reason(graph, operators)

    monkeypatch.setattr(delta, "no_kernel_reason", recorded)
    counts = []
    for layers in (3, 30):
        explore(DeltaEvaluator(chain(layers)))
        counts.append(len(checked))
        checked.clear()
    assert 0 < counts[0] == counts[1]
