"""Parts of computed values: what is computed from slices, and that the values stay equal."""

from __future__ import annotations

import numpy as np
import pytest

from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.regions import find_regions
from nostall.fusion.recompute.partial_reads import (
    MAX_PART_COPIES,
    read_nested_parts,
    read_parts,
    views_of_parts,
)

pytest.importorskip("torch")

from tools.interpreters.reference import interpret

from nostall.fusion.codegen.generate import no_kernel_reason


def rotated_rows(rows: int = 6, columns: int = 8) -> Graph:
    """Normalised rows plus the same rows with their halves exchanged."""
    build = Builder()
    x, weight = build.input((rows, columns), "float16"), build.input((columns,))
    wide = build("cast", x, dtype="float32")
    scale = build("rsqrt", build("sum", build("square", wide), dims=(1,), keepdim=True))
    normed = build("mul", build("mul", wide, scale), weight)
    half = (rows, columns // 2)
    first, second = (
        build("slice", normed, dim=1, start=start, step=1, shape=half) for start in (0, half[1])
    )
    parts = [build("view", part, shape=(rows, 1, half[1])) for part in (second, first)]
    number = build("view", build("iota", start=0, step=1, shape=(2,)), shape=(2, 1))
    is_first = build("eq", number, build.constant(0, "int64"))
    both = build("view", build("where", is_first, *parts), shape=(rows, columns))
    return build.graph(build("add", normed, build("copy", both)))


def inputs_of(graph: Graph) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.uniform(0.5, 2.0, graph[index].shape) for index in graph.inputs]


def test_halves_of_a_normalised_value_need_no_second_kernel() -> None:
    graph = rotated_rows()
    assert no_kernel_reason(graph, graph.operators) is not None
    found = read_parts(graph)
    assert found is not None
    changed, origins = found
    assert no_kernel_reason(changed, changed.operators) is None
    inputs = inputs_of(graph)
    for old, new in zip(interpret(graph, inputs), interpret(changed, inputs), strict=True):
        np.testing.assert_array_equal(old, new)
    for node, origin in zip(changed, origins, strict=True):
        assert origin is None or graph[origin].shape == node.shape


@pytest.mark.parametrize("first_operator", ["sum", "view", "random"])
def test_a_part_stays_if_what_it_depends_on_has_no_part(first_operator: str) -> None:
    build = Builder()
    x = build.input((4, 8, 2))
    if first_operator == "sum":
        value = build("sum", x, dims=(2,), keepdim=False)
    elif first_operator == "view":
        value = build("view", build("exp", build.input((32,))), shape=(4, 8))
    else:
        value = build("random", build.input((1,), "int64"), shape=(4, 8), words=4)
    value = build("neg", value)
    part = build("slice", value, dim=1, start=2, step=1, shape=(4, 3))
    assert read_parts(build.graph(build("exp", part), value)) is None


def test_a_part_along_a_dynamic_axis_and_a_long_computation_stay() -> None:
    build = Builder(13)
    x = build.input((13, 4))
    part = build("slice", build("neg", x), dim=0, start=1, step=1, shape=(12, 4))
    assert read_parts(build.graph(build("exp", part))) is None
    build = Builder()
    value = build.input((4, 8))
    for _ in range(MAX_PART_COPIES + 1):
        value = build("neg", value)
    part = build("slice", value, dim=1, start=0, step=2, shape=(4, 4))
    assert read_parts(build.graph(build("exp", part))) is None


def test_an_operand_that_is_broadcast_along_the_axis_is_used_whole() -> None:
    build = Builder()
    x, row = build.input((4, 8)), build.input((4, 1))
    value = build("mul", build("neg", row), x)
    part = build("slice", value, dim=1, start=1, step=3, shape=(4, 3))
    graph = build.graph(build("exp", part))
    found = read_parts(graph)
    assert found is not None
    assert [node.shape for node in found[0] if node.op == "neg"] == [(4, 1)]
    inputs = inputs_of(graph)
    np.testing.assert_array_equal(interpret(graph, inputs)[0], interpret(found[0], inputs)[0])


def split_and_transposed(kind: str) -> tuple[Builder, int, int]:
    """Rows, viewed as heads and transposed; returns the view and half of each exponential."""
    build = Builder()
    x = build.opaque("mm", shape=(6, 16), dtype="float32") if kind == "opaque" else None
    x = build.input((6, 16)) if x is None else x
    heads = build("view", x, shape=(6, 2, 8))
    transposed = build("permute", build("exp", heads), dims=(1, 0, 2))
    part = build("slice", transposed, dim=2, start=4, step=1, shape=(2, 6, 4))
    return build, heads, build("neg", part)


def test_parts_are_read_through_permuted_values() -> None:
    build, _, result = split_and_transposed("input")
    graph = build.graph(result)
    found = read_parts(graph)
    assert found is not None
    assert [node.shape for node in found[0] if node.op == "exp"] == [(6, 2, 8), (6, 2, 4)]
    inputs = inputs_of(graph)
    np.testing.assert_array_equal(interpret(graph, inputs)[0], interpret(found[0], inputs)[0])


@pytest.mark.parametrize("kind", ["input", "opaque"])
def test_a_view_of_which_parts_are_read_is_an_input_of_its_region(kind: str) -> None:
    build, heads, result = split_and_transposed(kind)
    graph = build.graph(result)
    assert views_of_parts(graph) == {heads}
    (region,) = find_regions(graph, input_views=views_of_parts(graph))
    assert region.inputs == (heads,)
    changed, _ = read_parts(region.graph) or (region.graph, ())
    assert no_kernel_reason(changed, changed.operators) is None
    assert no_kernel_reason(graph, graph.operators) is not None


def rotary(kind: str) -> tuple[Builder, int, int]:
    """The rotary embedding of a projection: heads are views, and their halves are swapped."""
    build = Builder()
    x = build.opaque("mm", shape=(6, 16), dtype="float32") if kind == "opaque" else None
    x = build.input((6, 16)) if x is None else x
    heads = build("view", build("view", x, shape=(2, 3, 16)), shape=(2, 3, 2, 8))
    transposed = build("permute", heads, dims=(0, 2, 1, 3))
    halves = [
        build("slice", transposed, dim=3, start=start, step=1, shape=(2, 2, 3, 4))
        for start in (0, 4)
    ]
    return build, heads, build("sub", build("square", halves[0]), halves[1])


@pytest.mark.parametrize("kind", ["input", "opaque"])
def test_a_view_with_heads_of_which_halves_are_read_is_an_input_of_its_region(kind: str) -> None:
    build, heads, result = rotary(kind)
    graph = build.graph(result)
    assert views_of_parts(graph) == {heads}
    assert no_kernel_reason(graph, graph.operators) is not None
    (region,) = find_regions(graph, input_views=views_of_parts(graph))
    assert region.inputs == (heads,)
    assert no_kernel_reason(region.graph, region.graph.operators) is None


def test_a_view_is_no_input_if_the_sliced_axis_is_one_below_it() -> None:
    build = Builder()
    rows = build("view", build.input((6, 16)), shape=(2, 3, 16))
    part = build("slice", rows, dim=2, start=0, step=1, shape=(2, 3, 8))
    graph = build.graph(build("exp", part))
    assert not views_of_parts(graph)
    assert no_kernel_reason(graph, graph.operators) is None


@pytest.mark.parametrize("reader", ["result", "opaque"])
def test_a_view_is_no_input_if_no_operator_reads_its_parts(reader: str) -> None:
    """Other operators would read the tensor and the view of it as two tensors."""
    build = Builder()
    heads = build("view", build.input((6, 16)), shape=(6, 2, 8))
    part = build("slice", heads, dim=2, start=0, step=1, shape=(6, 2, 4))
    if reader == "opaque":
        part = build.opaque("bmm", part, shape=(6, 2, 2), dtype="float32")
    assert not views_of_parts(build.graph(part, build("exp", heads)))


def test_a_slice_of_an_axis_that_a_broadcast_adds_is_no_part_of_the_view_below() -> None:
    build = Builder()
    heads = build("view", build.input((6, 16)), shape=(6, 2, 8))
    wide = build("expand", build("permute", heads, dims=(2, 0, 1)), shape=(3, 8, 6, 2))
    part = build("slice", wide, dim=0, start=0, step=1, shape=(2, 8, 6, 2))
    assert not views_of_parts(build.graph(build("exp", part)))


def computed_heads(*, is_halved: bool) -> Graph:
    """Heads of a scaled projection: a product of their halves, or of the gates of a GLU."""
    build = Builder()
    x = build.opaque("mm", shape=(6, 16), dtype="float32")
    value = build("mul", x, build.input((16,)))
    heads = build("view", value, shape=(6, 2, 8))
    dim, shape = (2, (6, 2, 4)) if is_halved else (1, (6, 1, 8))
    first, second = (
        build("slice", heads, dim=dim, start=start, step=1, shape=shape)
        for start in (0, shape[dim])
    )
    return build.graph(build("add", build("exp", first), second))


def test_heads_of_a_computed_value_are_read_by_another_region() -> None:
    graph = computed_heads(is_halved=True)
    assert no_kernel_reason(graph, graph.operators[1:]) is not None
    views = views_of_parts(graph)
    assert [graph[view].shape for view in views] == [(6, 2, 8)]
    scaled, halves = find_regions(graph, input_views=views)
    assert [scaled.graph[index].op for index in scaled.graph.operators] == ["mul"]
    assert set(halves.inputs) == views
    for region in (scaled, halves):
        assert no_kernel_reason(region.graph, region.graph.operators) is None


def test_parts_of_a_computed_value_with_a_constant_step_need_no_region() -> None:
    graph = computed_heads(is_halved=False)
    assert not views_of_parts(graph)
    assert len(find_regions(graph)) == 1


def test_heads_of_values_computed_from_a_view_are_read_by_another_region() -> None:
    build = Builder()
    x = build.input((6, 16), "float16")
    heads = build("view", build("neg", x), shape=(6, 2, 8))
    wide = build("cast", heads, dtype="float32")
    halves = [build("slice", wide, dim=2, start=start, step=1, shape=(6, 2, 4)) for start in (0, 4)]
    graph = build.graph(build("mul", *halves))
    assert views_of_parts(graph) == {heads}
    _, region = find_regions(graph, input_views=views_of_parts(graph))
    changed, _ = read_parts(region.graph) or (region.graph, ())
    assert no_kernel_reason(changed, changed.operators) is None


@pytest.mark.parametrize("is_sliced", [False, True])
def test_the_view_that_splits_the_axis_is_found_below_views_that_keep_it(is_sliced: bool) -> None:
    build = Builder()
    rows = build("view", build.opaque("mm", shape=(8, 16), dtype="float32"), shape=(2, 4, 16))
    read = build("view", rows, shape=(2, 4, 2, 8))
    if is_sliced:
        read = build("slice", read, dim=1, start=1, step=1, shape=(2, 3, 2, 8))
    shape = (2, 2, 2, 8)
    first, second = (
        build("slice", read, dim=1, start=start, step=1, shape=shape) for start in (0, 1)
    )
    graph = build.graph(build("sub", build("exp", first), second))
    assert views_of_parts(graph) == {rows}
    (region,) = find_regions(graph, input_views=views_of_parts(graph))
    assert region.inputs == (rows,)
    assert no_kernel_reason(graph, graph.operators) is not None
    assert no_kernel_reason(region.graph, region.graph.operators) is None


def test_parts_of_values_that_are_computed_from_parts_are_computed_from_memory() -> None:
    build = Builder()
    value = build.input((4, 9))
    for width in (8, 7):
        left, right = (
            build("slice", value, dim=1, start=start, step=1, shape=(4, width)) for start in (0, 1)
        )
        value = build("maximum", build("neg", left), right)
    found = read_nested_parts(build.graph(value))
    assert found is not None
    graph, origins = found
    assert all(
        graph[graph.base(i)].kind == "input" for n in graph if n.op == "slice" for i in n.inputs
    )
    assert origins[graph.outputs[0]] == value
