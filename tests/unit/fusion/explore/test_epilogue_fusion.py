"""What follows a sum over rows in the kernel that adds it up."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.generate import generate
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.explore.epilogue_fusion import fuse_epilogues
from tests.unit.fusion.codegen.operator_graphs import norm_gradient


def weight_gradient(rows: int = 4096) -> Graph:
    """The gradients of a norm's input and weight, the weight's in its own dtype."""
    build = Builder()
    gradient, x = build.input((rows, 1024)), build.input((rows, 1024))
    both = build("mul", gradient, x)
    back = build("sub", gradient, build("mul", x, build("sum", both, dims=(1,), keepdim=True)))
    total = build("sum", both, dims=(0,), keepdim=False)
    return build.graph(back, build("cast", build("neg", total), dtype="bfloat16"))


def test_the_cast_of_a_weights_gradient_needs_no_launch() -> None:
    graph = weight_gradient()
    *most, neg, cast = graph.operators
    assert fuse_epilogues(graph, [tuple(most), (neg, cast)]) == [graph.operators]
    (kernel,) = default_partition(graph)
    assert kernel == graph.operators
    assert len(generate(graph, kernel).launches) == 2


def test_the_cast_of_a_bare_sum_needs_none_either() -> None:
    """What counts is what the sum walks over, not what it leaves."""
    build = Builder()
    total = build("sum", build.input((4096, 1024)), dims=(0,), keepdim=False)
    cast = build("cast", total, dtype="bfloat16")
    graph = build.graph(cast)
    assert fuse_epilogues(graph, [(total,), (cast,)]) == [(total, cast)]


def test_what_is_as_large_as_what_is_summed_stays() -> None:
    graph = weight_gradient(rows=8)
    *most, neg, cast = graph.operators
    groups = [tuple(most), (neg, cast)]
    assert fuse_epilogues(graph, groups) == groups


def test_what_needs_something_else_stays() -> None:
    """Another kernel's result: each would wait for the other."""
    build = Builder()
    x = build.input((4096, 256))
    total = build("sum", x, dims=(0,), keepdim=True)
    mean = build("mul", total, build.constant(1 / 4096))
    spread = build("sum", build("square", build("sub", x, mean)), dims=(0,), keepdim=True)
    kept = build("neg", mean)
    graph = build.graph(spread, kept)
    first = (total,)
    second = tuple(i for i in graph.operators if i not in (total, kept))
    found = fuse_epilogues(graph, [first, second, (kept,)])
    assert graph.is_acyclic(found)
    assert sorted(i for group in found for i in group) == list(graph.operators)
    assert total in found[0] and mean in found[1]


def test_a_kernel_without_anything_behind_it_stays() -> None:
    graph = norm_gradient()
    assert fuse_epilogues(graph, [graph.operators]) == [graph.operators]
