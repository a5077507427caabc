"""Which region an operator belongs to, where several would do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

pytest.importorskip("triton")

from nostall.fusion import Builder, Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.placement import levels
from nostall.fusion.graph.regions import Region, regions
from tests.unit.fusion.codegen import operator_graphs


def product(build: Builder, x: int) -> int:
    """What a library multiplies."""
    node = build.nodes[x]
    return build.opaque("mm", x, shape=node.shape, dtype=node.dtype)


def ops(region: Region) -> list[str]:
    return [region.graph[index].op for index in region.graph.operators]


def moved(graph: Graph) -> int:
    """Bytes that regions read and write."""
    return sum(graph[i].bytes for part in regions(graph) for i in (*part.reads, *part.gives))


def backward(saved: str = "bfloat16") -> Graph:
    """The gradient of an activation: its derivative needs nothing but what was saved."""
    build = Builder()
    x, before = build.input((512, 64), saved), build.input((512, 64), "bfloat16")
    slope = build("sub", build.constant(1.0), build("square", build("cast", x, dtype="float32")))
    return build.graph(build("mul", slope, product(build, before)))


def test_a_derivative_is_computed_beside_what_it_scales() -> None:
    graph = backward()
    (only,) = regions(graph)
    assert ops(only) == ["cast", "square", "sub", "mul"]
    x, made = graph[0], graph[graph.outputs[0]]
    assert moved(graph) == 2 * x.bytes + made.bytes


def test_a_small_sum_of_a_large_tensor_stays_where_that_is_read() -> None:
    build = Builder()
    x = build.input((512, 64))
    total = build("sum", x, dims=(1,), keepdim=True)
    graph = build.graph(build("mul", product(build, build("exp", x)), total))
    first, second = regions(graph)
    assert sorted(ops(first)) == ["exp", "sum"]
    assert ops(second) == ["mul"]


def test_a_result_sinks_where_what_it_needs_is_read_all_the_same() -> None:
    """It is written there instead, and not read again."""
    build = Builder()
    x, numbers = build.input((512, 64)), build.input((512, 64))
    kept = build("gt", numbers, build.constant(0.1))
    y = build("mul", product(build, x), kept)
    (only,) = regions(build.graph(y, kept))
    assert sorted(ops(only)) == ["gt", "mul"]


def norm(build: Builder, x: int) -> int:
    wide = build("cast", x, dtype="float32")
    total = build("sum", wide, dims=(1,), keepdim=True)
    return build("cast", build("sub", wide, total), dtype="bfloat16")


def test_a_norm_is_not_torn_apart() -> None:
    """Its sums stay where the tensor is read for others, so the rest has what it needs there."""
    build = Builder()
    x = build.input((512, 64), "bfloat16")
    graph = build.graph(build("add", product(build, build("exp", x)), norm(build, x)))
    first, second = regions(graph)
    assert sorted(ops(first)) == ["cast", "cast", "exp", "sub", "sum"]
    assert ops(second) == ["add"]


def test_a_norm_sinks_as_a_whole() -> None:
    build = Builder()
    x, y = build.input((512, 64), "bfloat16"), build.input((512, 64), "bfloat16")
    (only,) = regions(build.graph(build("add", product(build, y), norm(build, x))))
    assert ops(only) == ["cast", "sum", "sub", "cast", "add"]


def test_operators_of_one_call_stay_together() -> None:
    build = Builder()
    x = build.input((512, 64), "bfloat16")
    total = build("sum", x, dims=(1,), keepdim=True)
    wide = build("cast", x, dtype="float32")
    graph = build.graph(build("mul", product(build, x), wide), total)
    apart, call = levels(graph, {}), {total: "both", wide: "both"}
    assert apart[total] < apart[wide]
    together = levels(graph, call)
    assert together[total] == together[wide]


def test_what_leads_to_nothing_is_in_no_region() -> None:
    build = Builder()
    x = build.input((512, 64))
    build("log", build("exp", x))
    (only,) = regions(build.graph(build("neg", x)))
    assert ops(only) == ["neg"]


def test_views_that_are_given_are_inputs() -> None:
    build = Builder()
    x = build.input((8, 64))
    some = build("slice", x, shape=(2, 64), dim=0, start=4, step=1)
    graph = build.graph(build("exp", build("slice", some, shape=(1, 64), dim=0, start=1, step=1)))
    (alone,), (other,) = regions(graph), regions(graph, given={some})
    assert alone.reads == (x,)
    assert other.reads == (some,)
    assert other.graph[other.graph.inputs[0]].shape == (2, 64)


@settings(max_examples=40)
@given(operator_graphs.operator_graphs())
def test_no_region_waits_for_a_later_one(graph: Graph) -> None:
    level, lowest = levels(graph, {}), [0] * len(graph)
    for node in graph:
        above = (lowest[i] + (graph[i].kind == "opaque") for i in graph.sources[node.index])
        lowest[node.index] = max(above, default=0)
    for index in (*graph.operators, *(n.index for n in graph if n.kind == "opaque")):
        assert level[index] >= lowest[index]
        for source in graph.sources[index]:
            kind = graph[source].kind
            if kind in COMPUTE or kind == "opaque":
                assert level[source] + (kind == "opaque") <= level[index]
    parts = regions(graph)
    held = [[part.origins[i] for i in part.graph.operators] for part in parts]
    assert sorted(i for group in held for i in group) == list(graph.operators)
    assert graph.is_acyclic(held)
