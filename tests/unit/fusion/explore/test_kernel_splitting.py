"""Kernels that would compute a small tensor again for every row of a large one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.cost.default_plan import first_choice, modelled_seconds
from nostall.fusion.codegen.runtime.stitched_graph import scheduled
from nostall.fusion.explore.kernel_splitting import split_kernels, unpack_kernels


def pooled(features: int) -> Graph:
    """Softmax over 200 places, and rows of so many features added up by its weights."""
    build = Builder()
    scores = build("cast", build.input((2048, 200), "float16"), dtype="float32")
    values = build("cast", build.input((2048, 200, features), "float16"), dtype="float32")
    highest = build("amax", scores, dims=(1,), keepdim=True)
    powers = build("exp", build("sub", scores, highest))
    share = build("div", powers, build("sum", powers, dims=(1,), keepdim=True))
    weights = build("view", share, shape=(2048, 200, 1))
    return build.graph(build("sum", build("mul", weights, values), dims=(1,), keepdim=False))


def seconds(graph: Graph, group: tuple[int, ...]) -> float:
    of = scheduled(graph, group)
    return modelled_seconds(of, first_choice(of))


def test_weights_are_a_kernel_of_their_own_where_many_features_share_them() -> None:
    graph = pooled(features=128)
    found = split_kernels(graph, [graph.operators])
    small, rest = found
    assert sorted((*small, *rest)) == list(graph.operators)
    assert {graph[index].op for index in small} >= {"amax", "exp", "div"}
    assert {graph[index].op for index in rest} == {"cast", "mul", "sum"}
    assert sum(seconds(graph, part) for part in found) < seconds(graph, graph.operators)
    assert graph.is_acyclic(found)


def test_what_is_shared_by_few_stays() -> None:
    graph = pooled(features=4)
    assert split_kernels(graph, [graph.operators]) == [graph.operators]


def test_light_operators_stay() -> None:
    build = Builder()
    x, bias = build.input((4096, 1024), "float32"), build.input((1024,), "float32")
    graph = build.graph(build("add", x, build("mul", bias, bias)))
    assert split_kernels(graph, [graph.operators]) == [graph.operators]


def test_what_needs_the_large_part_is_not_small() -> None:
    """A reduction's result walks over little, but comes after what is reduced."""
    build = Builder()
    x = build.input((64, 65536), "float32")
    total = build("sum", build("exp", x), dims=(1,), keepdim=True)
    graph = build.graph(build("log", total))
    assert split_kernels(graph, [graph.operators]) == [graph.operators]


def sums(rows: int) -> Graph:
    """The gradients of three biases, each of a tensor of its own."""
    build = Builder()
    given = [build.input((rows, 256), "bfloat16") for _ in range(3)]
    return build.graph(*(build("sum", x, dims=(0,), keepdim=False) for x in given))


def test_sums_over_many_rows_are_kernels_of_their_own() -> None:
    """A pack has no partial results: few programs would walk over all of it."""
    graph = sums(rows=65536)
    assert unpack_kernels(graph, [graph.operators]) == [(index,) for index in graph.operators]


def test_small_sums_share_a_launch() -> None:
    graph = sums(rows=64)
    assert unpack_kernels(graph, [graph.operators]) == [graph.operators]


def test_what_hangs_together_is_no_pack() -> None:
    graph = pooled(features=4)
    assert unpack_kernels(graph, [graph.operators]) == [graph.operators]
