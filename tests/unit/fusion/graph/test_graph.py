"""The operator graph: what fits, what depends on what, and which sets can be one kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.fusion import BadGraph, Builder, Graph, Node
from nostall.fusion.graph.operations import COMPUTE, DTYPE_BYTES, OPERATIONS
from nostall.fusion.testing.reference import interpret


def softmax(rows: int = 4, columns: int = 6) -> Graph:
    build = Builder()
    x = build.input((rows, columns))
    top = build("amax", x, dims=(1,), keepdim=True)
    away = build("exp", build("sub", x, top))
    return build.graph(build("div", away, build("sum", away, dims=(1,), keepdim=True)))


def test_softmax_is_computed() -> None:
    x = np.random.default_rng(0).normal(size=(4, 6))
    (found,) = interpret(softmax(), [x])
    away = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(found, away / away.sum(1, keepdims=True), rtol=1e-15)


def test_the_key_is_of_the_content() -> None:
    graph = softmax()
    assert graph.key == softmax().key
    assert graph.key != softmax(columns=7).key
    turned = replace(graph.nodes[0], strides=(1, 4))
    assert Graph((turned, *graph.nodes[1:]), graph.outputs).key != graph.key
    assert Graph(graph.nodes, (4,)).key != graph.key


def test_views_and_constants_belong_to_no_kernel() -> None:
    build = Builder()
    x = build.input((2, 3))
    doubled = build("mul", x, build.constant(2.0))
    turned = build("permute", build("view", doubled, shape=(3, 2)), dims=(1, 0))
    graph = build.graph(build("exp", turned), turned)
    assert graph.operators == (doubled, 5)
    assert graph.sources[5] == (doubled,)
    assert graph.consumers[doubled] == (5,)
    assert graph.results == {doubled, 5}


def test_a_set_that_waits_for_itself_is_not_convex() -> None:
    build = Builder()
    x = build.input((4,))
    first = build("exp", x)
    wall = build.opaque("matmul", first, shape=(4,), dtype="float32")
    last = build("add", first, wall)
    side = build("neg", x)
    graph = build.graph(last, side)
    assert not graph.is_convex([first, last])
    assert graph.is_convex([first, side]) and graph.is_convex([last, side])
    assert not graph.is_acyclic([[first, last]])
    assert graph.order([[last], [first, side]]) == (1, 0)


def test_two_convex_kernels_can_wait_for_each_other() -> None:
    build = Builder()
    x, y = build.input((4,)), build.input((4,))
    a, b = build("exp", x), build("exp", y)
    c, d = build("neg", b), build("neg", a)
    graph = build.graph(c, d)
    assert graph.is_convex([a, c]) and graph.is_convex([b, d])
    assert not graph.is_acyclic([[a, c], [b, d]])
    assert graph.is_acyclic([[a, d], [b, c]])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Small graphs of elementwise operators and opaque nodes."""
    build = Builder()
    last = build.input((2,))
    for _ in range(draw(st.integers(1, 9))):
        one, two = (draw(st.integers(0, last)) for _ in range(2))
        if draw(st.integers(0, 4)):
            last = build("add", one, two)
        else:
            last = build.opaque("matmul", one, shape=(2,), dtype="float32")
    return build.graph(last)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_convex_is_contractible(graph: Graph, data: st.DataObject) -> None:
    """For one set alone both say the same: the mask rule against a topological sort."""
    if graph.operators:
        chosen = data.draw(st.sets(st.sampled_from(graph.operators), min_size=1))
        assert graph.is_convex(chosen) == graph.is_acyclic([chosen])


def test_what_does_not_fit_is_refused() -> None:
    x = Node(0, "input", (), (2, 3), "float32", (3, 1))

    def second(op: str, shape: tuple[int, ...], *attributes: tuple[str, object]) -> None:
        node = Node(1, op, (0,), shape, "float32", (1,) * len(shape), attributes)  # type: ignore[arg-type]
        Graph((x, node), (1,))

    second("sum", (2,), ("dims", (1,)), ("keepdim", False))
    refused = [
        ("nonsense", (2, 3)),
        ("exp", (3, 2)),
        ("add", (2, 3)),
        ("sum", (2,)),
        ("sum", (2,), ("dims", (2,)), ("keepdim", False)),
        ("sum", (2,), ("dims", (0,)), ("keepdim", False)),
        ("isnan", (2, 3)),
        ("permute", (3, 2), ("dims", (0, 0))),
        ("slice", (2, 2), ("dim", 1), ("start", 2), ("step", 1)),
        ("view", (7,)),
    ]
    for op, shape, *attributes in refused:
        with pytest.raises(BadGraph):
            second(op, shape, *attributes)
    for changed in ({"index": 1}, {"inputs": (0,)}, {"dtype": "complex64"}, {"shape": (2**31, 1)}):
        with pytest.raises(BadGraph):
            Graph((replace(x, **changed),), (0,))
    with pytest.raises(BadGraph, match="no node"):
        Graph((x,), (1,))


def test_the_builder_says_what_does_not_fit() -> None:
    build = Builder()
    x = build.input((2, 3))
    with pytest.raises(BadGraph, match="unknown operation"):
        build("gelu", x)
    with pytest.raises(BadGraph, match="takes 2"):
        build("add", x)
    with pytest.raises(BadGraph, match="cannot take"):
        build("add", x, build.input((2, 4)))


def test_every_operation_has_an_interpretation() -> None:
    """One operand of each dtype family goes through every operator of the table."""
    values = {"float32": np.array([[0.5, 1.5]]), "int32": np.array([[1, 2]], np.int32)}
    for row in OPERATIONS.values():
        if row.kind not in COMPUTE and row.name != "iota":
            continue
        for dtype, value in values.items():
            integer = dtype == "int32"
            if row.name == "random":  # from a seed: test_fusion_random
                continue
            if row.name.startswith("bitwise") and not integer:
                continue
            build = Builder()
            given = [build.input((1, 2), dtype) for _ in range(row.arity or 0)]
            attributes = {"dims": (1,), "keepdim": False} if row.kind == "reduce" else {}
            if row.name == "iota":
                last = build("iota", shape=(3,), start=1, step=2)
            elif row.name == "dot":
                last = build("dot", given[0], build("permute", given[1], dims=(1, 0)))
            else:
                last = build(row.name, *given, **attributes)  # type: ignore[arg-type]
            (found,) = interpret(build.graph(last), [value] * len(given))
            assert found.shape == build.nodes[last].shape
            assert found.dtype == (
                "float64" if "float" in build.nodes[last].dtype else (build.nodes[last].dtype)
            )


def test_sizes_of_dtypes() -> None:
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"):
        assert DTYPE_BYTES[name] == np.dtype(name).itemsize
