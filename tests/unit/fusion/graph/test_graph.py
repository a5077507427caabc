"""Tests of the operator graph: validation, dependences, and which sets can be one kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.interpreters.reference import interpret

from nostall.fusion import BadGraph, Builder, Graph, Node
from nostall.fusion.graph.operations import COMPUTE, DTYPE_BYTES, OPERATIONS


def softmax(rows: int = 4, columns: int = 6) -> Graph:
    build = Builder()
    x = build.input((rows, columns))
    maximum = build("amax", x, dims=(1,), keepdim=True)
    weights = build("exp", build("sub", x, maximum))
    return build.graph(build("div", weights, build("sum", weights, dims=(1,), keepdim=True)))


def test_interpreter_computes_softmax() -> None:
    x = np.random.default_rng(0).normal(size=(4, 6))
    (result,) = interpret(softmax(), [x])
    weights = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(result, weights / weights.sum(1, keepdims=True), rtol=1e-15)


def test_key_depends_on_shapes_strides_and_outputs() -> None:
    graph = softmax()
    assert graph.key == softmax().key
    assert graph.key != softmax(columns=7).key
    transposed = replace(graph.nodes[0], strides=(1, 4))
    assert Graph((transposed, *graph.nodes[1:]), graph.outputs).key != graph.key
    assert Graph(graph.nodes, (4,)).key != graph.key


def test_views_and_constants_belong_to_no_kernel() -> None:
    build = Builder()
    x = build.input((2, 3))
    doubled = build("mul", x, build.constant(2.0))
    transposed = build("permute", build("view", doubled, shape=(3, 2)), dims=(1, 0))
    graph = build.graph(build("exp", transposed), transposed)
    assert graph.operators == (doubled, 5)
    assert graph.sources[5] == (doubled,)
    assert graph.consumers[doubled] == (5,)
    assert graph.results == {doubled, 5}


def test_set_with_a_path_that_leaves_and_returns_is_not_convex() -> None:
    build = Builder()
    x = build.input((4,))
    first = build("exp", x)
    product = build.opaque("matmul", first, shape=(4,), dtype="float32")
    last = build("add", first, product)
    side = build("neg", x)
    graph = build.graph(last, side)
    assert not graph.is_acyclic([[first, last]])
    assert graph.is_acyclic([[first, side]]) and graph.is_acyclic([[last, side]])
    assert graph.execution_order([[last], [first, side]]) == (1, 0)


def test_two_convex_kernels_can_form_a_cycle() -> None:
    build = Builder()
    x, y = build.input((4,)), build.input((4,))
    a, b = build("exp", x), build("exp", y)
    c, d = build("neg", b), build("neg", a)
    graph = build.graph(c, d)
    assert graph.is_acyclic([[a, c]]) and graph.is_acyclic([[b, d]])
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
def test_a_single_set_is_convex_exactly_if_it_is_acyclic(graph: Graph, data: st.DataObject) -> None:
    """Compare a mask rule, that no path leaves and returns, with the topological sort."""
    if graph.operators:
        operators = data.draw(st.sets(st.sampled_from(graph.operators), min_size=1))
        mask = above = below = 0
        for index in operators:
            mask |= 1 << index
            above |= graph.ancestors[index]
            below |= graph.descendants[index]
        assert graph.is_acyclic([operators]) == (not above & below & ~mask)


def test_invalid_nodes_raise_bad_graph() -> None:
    x = Node(0, "input", (), (2, 3), "float32", (3, 1))

    def make_graph(op: str, shape: tuple[int, ...], *attributes: tuple[str, object]) -> None:
        node = Node(1, op, (0,), shape, "float32", (1,) * len(shape), attributes)  # type: ignore[arg-type]
        Graph((x, node), (1,))

    make_graph("sum", (2,), ("dims", (1,)), ("keepdim", False))
    invalid = [
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
    for op, shape, *attributes in invalid:
        with pytest.raises(BadGraph):
            make_graph(op, shape, *attributes)
    for change in ({"index": 1}, {"inputs": (0,)}, {"dtype": "complex64"}, {"shape": (2**31, 1)}):
        with pytest.raises(BadGraph):
            Graph((replace(x, **change),), (0,))
    with pytest.raises(BadGraph, match="no node"):
        Graph((x,), (1,))


def test_builder_errors_name_the_problem() -> None:
    build = Builder()
    x = build.input((2, 3))
    with pytest.raises(BadGraph, match="unknown operation"):
        build("gelu", x)
    with pytest.raises(BadGraph, match="takes 2"):
        build("add", x)
    with pytest.raises(BadGraph, match="cannot take"):
        build("add", x, build.input((2, 4)))


def test_interpreter_covers_all_operations() -> None:
    """Each operator of the table runs with float32 and with int32 operands."""
    values = {"float32": np.array([[0.5, 1.5]]), "int32": np.array([[1, 2]], np.int32)}
    for row in OPERATIONS.values():
        if row.kind not in COMPUTE and row.name != "iota":
            continue
        for dtype, value in values.items():
            if row.name == "random":  # its operand is a seed: tests/unit/fusion/codegen
                continue
            if row.name.startswith("bitwise") and dtype != "int32":
                continue
            build = Builder()
            operands = [build.input((1, 2), dtype) for _ in range(row.arity or 0)]
            attributes = {"dims": (1,), "keepdim": False} if row.kind == "reduce" else {}
            attributes = {"size": 3} if row.name == "checked_index" else attributes
            if row.name == "iota":
                last = build("iota", shape=(3,), start=1, step=2)
            elif row.name == "dot":
                last = build("dot", operands[0], build("permute", operands[1], dims=(1, 0)))
            else:
                last = build(row.name, *operands, **attributes)  # type: ignore[arg-type]
            (result,) = interpret(build.graph(last), [value] * len(operands))
            assert result.shape == build.nodes[last].shape
            assert result.dtype == (
                "float64" if "float" in build.nodes[last].dtype else (build.nodes[last].dtype)
            )


def test_dtype_sizes_are_those_of_numpy() -> None:
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"):
        assert DTYPE_BYTES[name] == np.dtype(name).itemsize
