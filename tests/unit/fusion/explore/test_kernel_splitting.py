"""Tests of splitting and unpacking kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.explore.kernel_splitting import split_kernels, unpack_kernels


def attention_pooling(features: int) -> Graph:
    """Softmax over 200 positions, and the weighted sum of their features."""
    build = Builder()
    scores = build("cast", build.input((2048, 200), "float16"), dtype="float32")
    values = build("cast", build.input((2048, 200, features), "float16"), dtype="float32")
    maximum = build("amax", scores, dims=(1,), keepdim=True)
    powers = build("exp", build("sub", scores, maximum))
    softmax = build("div", powers, build("sum", powers, dims=(1,), keepdim=True))
    weights = build("view", softmax, shape=(2048, 200, 1))
    return build.graph(build("sum", build("mul", weights, values), dims=(1,), keepdim=False))


def seconds(graph: Graph, group: tuple[int, ...]) -> float:
    schedule = schedule_operators(graph, group)
    return modelled_seconds(default_plan(schedule))


def test_weights_of_many_features_become_a_kernel() -> None:
    graph = attention_pooling(features=128)
    kernels = split_kernels(graph, [graph.operators])
    small, rest = kernels
    assert sorted((*small, *rest)) == list(graph.operators)
    assert {graph[index].op for index in small} >= {"amax", "exp", "div"}
    assert {graph[index].op for index in rest} == {"cast", "mul", "sum"}
    assert sum(seconds(graph, kernel) for kernel in kernels) < seconds(graph, graph.operators)
    assert graph.is_acyclic(kernels)


def test_weights_of_few_features_are_not_split_off() -> None:
    graph = attention_pooling(features=4)
    assert split_kernels(graph, [graph.operators]) == [graph.operators]


def test_light_operators_are_not_split_off() -> None:
    build = Builder()
    x, bias = build.input((4096, 1024), "float32"), build.input((1024,), "float32")
    graph = build.graph(build("add", x, build("mul", bias, bias)))
    assert split_kernels(graph, [graph.operators]) == [graph.operators]


def test_operators_after_the_large_part_are_not_split_off() -> None:
    """A reduction's result is small, but it depends on the large operators."""
    build = Builder()
    x = build.input((64, 65536), "float32")
    total = build("sum", build("exp", x), dims=(1,), keepdim=True)
    graph = build.graph(build("log", total))
    assert split_kernels(graph, [graph.operators]) == [graph.operators]


def mean_loss(rows: int, columns: int) -> Graph:
    """Log-sum-exp of each row, summed over the rows."""
    build = Builder()
    x = build("cast", build.input((rows, columns), "bfloat16"), dtype="float32")
    maximum = build("amax", x, dims=(1,), keepdim=True)
    total = build("sum", build("exp", build("sub", x, maximum)), dims=(1,), keepdim=True)
    each = build("add", build("log", total), maximum)
    return build.graph(build("sum", each, dims=(0, 1), keepdim=False))


def test_the_mean_of_a_loss_over_many_rows_becomes_a_kernel() -> None:
    """With it the kernel of the rows would keep partial results in few, long programs."""
    graph = mean_loss(131072, 255)
    kernels = split_kernels(graph, [graph.operators])
    assert [graph[index].op for index in kernels[0]] == ["log", "add", "sum"]
    assert len(kernels) == 2 and graph.is_acyclic(kernels)
    assert 2 * sum(seconds(graph, x) for x in kernels) < seconds(graph, graph.operators)


def test_the_mean_of_a_loss_over_few_rows_stays_in_its_kernel() -> None:
    graph = mean_loss(64, 4096)
    assert split_kernels(graph, [graph.operators]) == [graph.operators]


def sums(rows: int) -> Graph:
    """Three independent bias gradients: sums over the rows of three tensors."""
    build = Builder()
    inputs = [build.input((rows, 256), "bfloat16") for _ in range(3)]
    return build.graph(*(build("sum", x, dims=(0,), keepdim=False) for x in inputs))


def test_sums_over_many_rows_are_unpacked() -> None:
    """A packed kernel has no partial results, so a few blocks would read all rows."""
    graph = sums(rows=65536)
    assert unpack_kernels(graph, [graph.operators]) == [(index,) for index in graph.operators]


def test_sums_over_few_rows_stay_packed() -> None:
    graph = sums(rows=64)
    assert unpack_kernels(graph, [graph.operators]) == [graph.operators]


def test_connected_kernels_are_not_unpacked() -> None:
    graph = attention_pooling(features=4)
    assert unpack_kernels(graph, [graph.operators]) == [graph.operators]
