"""Which operators of a graph are those of a softmax, and may be written shorter."""

from __future__ import annotations

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.expressions.softmax import EXP, NORMALIZE, SUBTRACT, softmax_template
from nostall.fusion.graph.graph import Graph

SHAPE = (8, 8)


def found(graph: Graph, op: str) -> list[str | None]:
    return [softmax_template(graph, node.index) for node in graph if node.op == op]


def softmax(build: Builder, x: int, highest: int, dims: tuple[int, ...] = (1,)) -> Graph:
    powers = build("exp", build("sub", x, highest))
    return build.graph(build("div", powers, build("sum", powers, dims=dims, keepdim=True)))


def test_a_softmax() -> None:
    build = Builder()
    x = build.input(SHAPE)
    graph = softmax(build, x, build("amax", x, dims=(1,), keepdim=True))
    assert found(graph, "sub") == [SUBTRACT]
    assert found(graph, "exp") == [EXP]
    assert found(graph, "div") == [NORMALIZE]


def test_a_maximum_that_is_seen_through_views() -> None:
    build = Builder()
    x = build.input(SHAPE)
    highest = build("view", build("amax", x, dims=(1,), keepdim=False), shape=(8, 1))
    graph = softmax(build, x, build("expand", highest, shape=SHAPE))
    assert found(graph, "exp") == [EXP]


def test_a_log_softmax_and_its_gradient() -> None:
    build = Builder()
    x = build.input(SHAPE)
    below = build("sub", x, build("amax", x, dims=(1,), keepdim=True))
    total = build("sum", build("exp", below), dims=(1,), keepdim=True)
    graph = build.graph(build("exp", build("sub", below, build("log", total))))
    assert found(graph, "exp") == [EXP, EXP]


def test_a_logsumexp_subtracts_nothing_where_the_maximum_is_infinite() -> None:
    build = Builder()
    x = build.input(SHAPE)
    highest = build("amax", x, dims=(1,), keepdim=True)
    told = build("eq", build("abs", highest), build.constant(float("inf")))
    guarded = build("where", told, build.constant(0.0), highest)
    assert found(softmax(build, x, guarded), "exp") == [EXP]


def _other_tensor(build: Builder, x: int) -> int:
    return build("amax", build("neg", x), dims=(1,), keepdim=True)


def _minimum(build: Builder, x: int) -> int:
    return build("amin", x, dims=(1,), keepdim=True)


def _of_the_column(build: Builder, x: int) -> int:
    """8 numbers beside 8 columns: every element gets another row's maximum."""
    return build("amax", x, dims=(1,), keepdim=False)


def _turned(build: Builder, x: int) -> int:
    highest = build("amax", x, dims=(1,), keepdim=True)
    return build("permute", highest, dims=(1, 0))


def _cut(build: Builder, x: int) -> int:
    highest = build("amax", x, dims=(1,), keepdim=True)
    first = build("slice", highest, shape=(1, 1), dim=0, start=0, step=1)
    return build("expand", first, shape=(8, 1))


def _chosen(build: Builder, x: int) -> int:
    """0 in place of some maxima that are finite."""
    highest = build("amax", x, dims=(1,), keepdim=True)
    told = build("lt", highest, build.constant(3.0))
    return build("where", told, build.constant(0.0), highest)


@pytest.mark.parametrize("taken", [_other_tensor, _minimum, _of_the_column, _turned, _cut, _chosen])
def test_what_is_not_the_maximum_of_its_row(taken: object) -> None:
    build = Builder()
    x = build.input(SHAPE)
    assert callable(taken)
    graph = softmax(build, x, taken(build, x))
    assert found(graph, "exp") == [None]
    assert found(graph, "div") == [None]


def test_a_sum_without_a_maximum_of_its_own() -> None:
    """The maximum of everything: a row's sum may be as small as numbers get."""
    build = Builder()
    x = build.input(SHAPE)
    graph = softmax(build, x, build("amax", x, dims=(0, 1), keepdim=True))
    assert found(graph, "exp") == [EXP]
    assert found(graph, "div") == [None]


def test_another_logarithm() -> None:
    build = Builder()
    x, other = build.input(SHAPE), build.input((8, 1))
    below = build("sub", x, build("amax", x, dims=(1,), keepdim=True))
    graph = build.graph(build("exp", build("sub", below, build("log", other))))
    assert found(graph, "exp") == [None]
