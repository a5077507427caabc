"""Recognition of softmax operators: patterns with the shorter templates, and similar ones."""

from __future__ import annotations

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.expressions.softmax import EXP, NORMALIZE, SUBTRACT, softmax_template
from nostall.fusion.graph.graph import Graph

SHAPE = (8, 8)


def templates(graph: Graph, op: str) -> list[str | None]:
    return [softmax_template(graph, node.index) for node in graph if node.op == op]


def softmax(build: Builder, x: int, highest: int, dims: tuple[int, ...] = (1,)) -> Graph:
    exponentials = build("exp", build("sub", x, highest))
    total = build("sum", exponentials, dims=dims, keepdim=True)
    return build.graph(build("div", exponentials, total))


def test_a_softmax() -> None:
    build = Builder()
    x = build.input(SHAPE)
    graph = softmax(build, x, build("amax", x, dims=(1,), keepdim=True))
    assert templates(graph, "sub") == [SUBTRACT]
    assert templates(graph, "exp") == [EXP]
    assert templates(graph, "div") == [NORMALIZE]


def test_a_maximum_below_views() -> None:
    build = Builder()
    x = build.input(SHAPE)
    highest = build("view", build("amax", x, dims=(1,), keepdim=False), shape=(8, 1))
    graph = softmax(build, x, build("expand", highest, shape=SHAPE))
    assert templates(graph, "exp") == [EXP]


def test_a_log_softmax_and_its_gradient() -> None:
    build = Builder()
    x = build.input(SHAPE)
    below = build("sub", x, build("amax", x, dims=(1,), keepdim=True))
    total = build("sum", build("exp", below), dims=(1,), keepdim=True)
    graph = build.graph(build("exp", build("sub", below, build("log", total))))
    assert templates(graph, "exp") == [EXP, EXP]


def test_a_maximum_with_the_infinity_guard_of_logsumexp() -> None:
    build = Builder()
    x = build.input(SHAPE)
    highest = build("amax", x, dims=(1,), keepdim=True)
    condition = build("eq", build("abs", highest), build.constant(float("inf")))
    guarded = build("where", condition, build.constant(0.0), highest)
    assert templates(softmax(build, x, guarded), "exp") == [EXP]


def _other_tensor(build: Builder, x: int) -> int:
    return build("amax", build("neg", x), dims=(1,), keepdim=True)


def _minimum(build: Builder, x: int) -> int:
    return build("amin", x, dims=(1,), keepdim=True)


def _along_columns(build: Builder, x: int) -> int:
    """8 maxima, broadcast along rows: every element gets the maximum of another row."""
    return build("amax", x, dims=(1,), keepdim=False)


def _transposed(build: Builder, x: int) -> int:
    highest = build("amax", x, dims=(1,), keepdim=True)
    return build("permute", highest, dims=(1, 0))


def _first_row_only(build: Builder, x: int) -> int:
    highest = build("amax", x, dims=(1,), keepdim=True)
    first = build("slice", highest, shape=(1, 1), dim=0, start=0, step=1)
    return build("expand", first, shape=(8, 1))


def _replaced_by_zero(build: Builder, x: int) -> int:
    """Some finite maxima are replaced by 0."""
    highest = build("amax", x, dims=(1,), keepdim=True)
    condition = build("lt", highest, build.constant(3.0))
    return build("where", condition, build.constant(0.0), highest)


@pytest.mark.parametrize(
    "make_subtrahend",
    [_other_tensor, _minimum, _along_columns, _transposed, _first_row_only, _replaced_by_zero],
)
def test_a_subtrahend_that_is_not_the_maximum_of_its_row(make_subtrahend: object) -> None:
    build = Builder()
    x = build.input(SHAPE)
    assert callable(make_subtrahend)
    graph = softmax(build, x, make_subtrahend(build, x))
    assert templates(graph, "exp") == [None]
    assert templates(graph, "div") == [None]


def test_a_sum_whose_row_may_not_have_the_maximum() -> None:
    """With the maximum of the whole tensor, the sum of a row can be arbitrarily small."""
    build = Builder()
    x = build.input(SHAPE)
    graph = softmax(build, x, build("amax", x, dims=(0, 1), keepdim=True))
    assert templates(graph, "exp") == [EXP]
    assert templates(graph, "div") == [None]


def test_a_logarithm_of_another_value() -> None:
    build = Builder()
    x, other = build.input(SHAPE), build.input((8, 1))
    below = build("sub", x, build("amax", x, dims=(1,), keepdim=True))
    graph = build.graph(build("exp", build("sub", below, build("log", other))))
    assert templates(graph, "exp") == [None]
