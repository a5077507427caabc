"""Tests of the placement of operators into regions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

pytest.importorskip("triton")

from nostall.fusion import Builder, Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.regions import Region, find_regions, region_levels
from tests.unit.fusion.codegen.graphs import operator_graphs


def product(build: Builder, x: int) -> int:
    """Add a matrix product, which is opaque."""
    node = build.nodes[x]
    return build.opaque("mm", x, shape=node.shape, dtype=node.dtype)


def ops(region: Region) -> list[str]:
    return [region.graph[index].op for index in region.graph.operators]


def moved_bytes(graph: Graph) -> int:
    """Bytes that all regions read and write."""
    return sum(graph[i].bytes for r in find_regions(graph) for i in (*r.inputs, *r.outputs))


def backward(saved: str = "bfloat16") -> Graph:
    """The gradient of tanh: the derivative needs only the saved output of tanh."""
    build = Builder()
    x, gradient = build.input((512, 64), saved), build.input((512, 64), "bfloat16")
    slope = build("sub", build.constant(1.0), build("square", build("cast", x, dtype="float32")))
    return build.graph(build("mul", slope, product(build, gradient)))


def test_derivative_is_in_the_region_of_the_product_it_scales() -> None:
    graph = backward()
    (region,) = find_regions(graph)
    assert ops(region) == ["cast", "square", "sub", "mul"]
    x, result = graph[0], graph[graph.outputs[0]]
    assert moved_bytes(graph) == 2 * x.bytes + result.bytes


def test_small_sum_stays_in_the_region_that_reads_the_large_tensor() -> None:
    build = Builder()
    x = build.input((512, 64))
    total = build("sum", x, dims=(1,), keepdim=True)
    graph = build.graph(build("mul", product(build, build("exp", x)), total))
    first, second = find_regions(graph)
    assert sorted(ops(first)) == ["exp", "sum"]
    assert ops(second) == ["mul"]


def test_graph_result_sinks_to_its_reader() -> None:
    """A dropout mask that the graph returns is written in the later region and not read back."""
    build = Builder()
    x, numbers = build.input((512, 64)), build.input((512, 64))
    mask = build("gt", numbers, build.constant(0.1))
    y = build("mul", product(build, x), mask)
    (region,) = find_regions(build.graph(y, mask))
    assert sorted(ops(region)) == ["gt", "mul"]


def norm(build: Builder, x: int) -> int:
    wide = build("cast", x, dtype="float32")
    total = build("sum", wide, dims=(1,), keepdim=True)
    return build("cast", build("sub", wide, total), dtype="bfloat16")


def test_norm_stays_whole_in_the_region_that_reads_its_input() -> None:
    """Its sum stays in the first region, which reads the input anyway; so the rest stays, too."""
    build = Builder()
    x = build.input((512, 64), "bfloat16")
    graph = build.graph(build("add", product(build, build("exp", x)), norm(build, x)))
    first, second = find_regions(graph)
    assert sorted(ops(first)) == ["cast", "cast", "exp", "sub", "sum"]
    assert ops(second) == ["add"]


def test_norm_sinks_as_a_whole() -> None:
    build = Builder()
    x, y = build.input((512, 64), "bfloat16"), build.input((512, 64), "bfloat16")
    (region,) = find_regions(build.graph(build("add", product(build, y), norm(build, x))))
    assert ops(region) == ["cast", "sum", "sub", "cast", "add"]


def test_operators_of_one_call_stay_together() -> None:
    build = Builder()
    x = build.input((512, 64), "bfloat16")
    total = build("sum", x, dims=(1,), keepdim=True)
    wide = build("cast", x, dtype="float32")
    graph = build.graph(build("mul", product(build, x), wide), total)
    levels, calls = region_levels(graph, {}), {total: "both", wide: "both"}
    assert levels[total] < levels[wide]
    levels_of_calls = region_levels(graph, calls)
    assert levels_of_calls[total] == levels_of_calls[wide]


def test_dead_operators_are_in_no_region() -> None:
    build = Builder()
    x = build.input((512, 64))
    build("log", build("exp", x))
    (region,) = find_regions(build.graph(build("neg", x)))
    assert ops(region) == ["neg"]


def test_input_views_become_inputs_of_regions() -> None:
    build = Builder()
    x = build.input((8, 64))
    view = build("slice", x, shape=(2, 64), dim=0, start=4, step=1)
    graph = build.graph(build("exp", build("slice", view, shape=(1, 64), dim=0, start=1, step=1)))
    (default,), (region,) = find_regions(graph), find_regions(graph, input_views={view})
    assert default.inputs == (x,)
    assert region.inputs == (view,)
    assert region.graph[region.graph.inputs[0]].shape == (2, 64)


@settings(max_examples=40)
@given(operator_graphs.operator_graphs())
def test_regions_can_run_in_order(graph: Graph) -> None:
    levels, lowest = region_levels(graph, {}), [0] * len(graph)
    for node in graph:
        above = (lowest[i] + (graph[i].kind == "opaque") for i in graph.sources[node.index])
        lowest[node.index] = max(above, default=0)
    for index in (*graph.operators, *(n.index for n in graph if n.kind == "opaque")):
        assert levels[index] >= lowest[index]
        for source in graph.sources[index]:
            kind = graph[source].kind
            if kind in COMPUTE or kind == "opaque":
                assert levels[source] + (kind == "opaque") <= levels[index]
    groups = [[r.origins[i] for i in r.graph.operators] for r in find_regions(graph)]
    assert sorted(i for group in groups for i in group) == list(graph.operators)
    assert graph.is_acyclic(groups)


def test_readers_of_an_input_view_are_above_the_value_that_it_views() -> None:
    build = Builder()
    x = build.input((8, 16))
    other = build("exp", x)
    value = build("neg", x)
    heads = build("view", value, shape=(8, 2, 8))
    reader = build("square", heads)
    whole = build("mul", value, other)
    graph = build.graph(build("add", build("view", reader, shape=(8, 16)), whole))
    assert len(find_regions(graph)) == 1
    levels = region_levels(graph, {}, [heads])
    assert levels[reader] == levels[value] + 1
    first, second = find_regions(graph, input_views=[heads])
    assert "neg" in ops(first) and "square" in ops(second)
    assert heads in second.inputs and first.outputs
    assert levels[other] == levels[whole]
