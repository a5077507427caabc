"""Equal patterns are evaluated once; that must not make unequal ones equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.generate import refused
from nostall.fusion.evaluate import DeltaEvaluator, delta
from nostall.fusion.explore import explore
from nostall.fusion.explore.integer_program import enumerate_columns
from nostall.fusion.graph.partition import Mask, members, to_mask
from nostall.fusion.graph.regions import extract_region
from tests.unit.fusion.codegen.operator_graphs import operator_graphs


def twice(graph: Graph) -> Graph:
    """The graph beside itself, with its last output read once more."""
    build = Builder()
    ends: list[int] = []
    for _ in range(2):
        place: dict[int, int] = {}
        for node in graph:
            place[node.index] = len(build.nodes)
            inputs = tuple(place[i] for i in node.inputs)
            build.nodes.append(replace(node, index=len(build.nodes), inputs=inputs))
        ends += [place[i] for i in graph.outputs]
    return build.graph(*ends, build("exp", ends[-1]))


def check(shared: DeltaEvaluator, masks: Iterable[Mask]) -> None:
    """The oracle knows no other pattern: an evaluator for each as a graph of its own."""
    for mask in masks:
        alone = DeltaEvaluator(extract_region(shared.graph, list(members(mask))).graph)
        whole = to_mask(alone.graph.operators)
        assert shared.kernel_time(mask) == alone.kernel_time(whole)
        assert shared.can_fuse(mask) == alone.can_fuse(whole)


@settings(max_examples=15, deadline=None)
@given(operator_graphs(most=6))
def test_a_pattern_costs_what_it_costs_alone(graph: Graph) -> None:
    shared = DeltaEvaluator(twice(graph))
    check(shared, enumerate_columns(shared, max_columns=60).patterns)


def test_look_alikes_are_told_apart() -> None:
    """Pairs of equal operators, but for one thing."""
    build = Builder()
    x, y, row = build.input((512, 512)), build.input((512, 512)), build.input((512,))
    turned = build("permute", x, dims=(1, 0))
    straight = build("view", x, shape=(512, 512))
    pairs = []
    for other in (x, turned, straight, y, row):
        total = build("sum", x, dims=(1,), keepdim=True)
        pairs.append((total, build("mul", total, other)))
        first = build("exp", x)
        pairs.append((first, build("add", first, other)))
        # The same operators, but what is read stands elsewhere.
        pairs.append((build("exp", x), build("add", y, other)))
        pairs.append((build("exp", x), build("add", first, other)))
    results = [index for pair in pairs for index in pair]
    for written in (results, results[1::2]):
        shared = DeltaEvaluator(build.graph(*written))
        # What nobody reads is no operator.
        masks = [1 << one | 1 << two for one, two in pairs]
        wanted = [mask for mask in masks if not mask & ~shared.operators]
        assert len(wanted) >= len(pairs) // 2
        check(shared, wanted)


def chain(layers: int) -> Graph:
    """Norms with borders between them, each with its own weight."""
    build = Builder()
    x = build.input((4096, 768))
    for _ in range(layers):
        squares = build("sum", build("square", x), dims=(1,), keepdim=True)
        x = build("mul", build("mul", x, build("rsqrt", squares)), build.input((768,)))
        x = build.opaque("matmul", x, shape=(4096, 768), dtype="float32")
    return build.graph(x)


def test_layers_that_repeat_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Graph] = []

    def counted(graph: Graph, operators: Iterable[int]) -> str | None:
        asked.append(graph)
        return refused(graph, operators)

    monkeypatch.setattr(delta, "refused", counted)
    counts = []
    for layers in (3, 30):
        explore(DeltaEvaluator(chain(layers)))
        counts.append(len(asked))
        asked.clear()
    assert 0 < counts[0] == counts[1]
