"""Tests of epilogue fusion: operators after a sum over rows join the kernel of the sum."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.generate import generate
from nostall.fusion.explore.default_partition import default_partition, fuse_epilogues
from tests.unit.fusion.codegen.graphs.operator_graphs import norm_gradient


def weight_gradient(rows: int = 4096) -> Graph:
    """Gradients of a norm with respect to its input and its bf16 weight."""
    build = Builder()
    gradient, x = build.input((rows, 1024)), build.input((rows, 1024))
    product = build("mul", gradient, x)
    dx = build("sub", gradient, build("mul", x, build("sum", product, dims=(1,), keepdim=True)))
    total = build("sum", product, dims=(0,), keepdim=False)
    return build.graph(dx, build("cast", build("neg", total), dtype="bfloat16"))


def test_cast_of_a_weight_gradient_joins_the_sum() -> None:
    graph = weight_gradient()
    *most, neg, cast = graph.operators
    assert fuse_epilogues(graph, [tuple(most), (neg, cast)]) == [graph.operators]
    (kernel,) = default_partition(graph)
    assert kernel == graph.operators
    assert len(generate(graph, kernel).launches) == 2


def test_cast_of_a_sum_alone_joins_it() -> None:
    """The size of a reduction is that of its operand, not of its result."""
    build = Builder()
    total = build("sum", build.input((4096, 1024)), dims=(0,), keepdim=False)
    cast = build("cast", total, dtype="bfloat16")
    graph = build.graph(cast)
    assert fuse_epilogues(graph, [(total,), (cast,)]) == [(total, cast)]


def test_large_epilogues_are_not_moved() -> None:
    graph = weight_gradient(rows=8)
    *most, neg, cast = graph.operators
    groups = [tuple(most), (neg, cast)]
    assert fuse_epilogues(graph, groups) == groups


def test_operators_read_by_another_kernel_are_not_moved_into_a_cycle() -> None:
    """The second kernel reads the mean, and its sum depends on the first kernel."""
    build = Builder()
    x = build.input((4096, 256))
    total = build("sum", x, dims=(0,), keepdim=True)
    mean = build("mul", total, build.constant(1 / 4096))
    spread = build("sum", build("square", build("sub", x, mean)), dims=(0,), keepdim=True)
    negated = build("neg", mean)
    graph = build.graph(spread, negated)
    first = (total,)
    second = tuple(i for i in graph.operators if i not in (total, negated))
    kernels = fuse_epilogues(graph, [first, second, (negated,)])
    assert graph.is_acyclic(kernels)
    assert sorted(i for kernel in kernels for i in kernel) == list(graph.operators)
    assert total in kernels[0] and mean in kernels[1]


def test_small_operators_behind_a_large_one_are_not_moved_into_a_cycle() -> None:
    """Two columns of what another kernel computes of the sums are no epilogue of the sums."""
    build = Builder()
    total = build("sum", build.input((8, 256)), dims=(0,), keepdim=True)
    large = build("exp", total)
    columns = build("slice", large, dim=1, start=0, step=1, shape=(1, 2))
    small = build("neg", columns)
    graph = build.graph(large, small)
    kernels = fuse_epilogues(graph, [(total,), (large,), (small,)])
    assert graph.is_acyclic(kernels)
    assert kernels == [(total,), (large,), (small,)]


def test_kernels_without_epilogue_do_not_change() -> None:
    graph = norm_gradient()
    assert fuse_epilogues(graph, [graph.operators]) == [graph.operators]
