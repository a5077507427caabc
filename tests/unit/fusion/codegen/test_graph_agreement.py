"""Tests that code generation has a kernel for all groups of operators that explorers choose."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, islice

import pytest
from hypothesis import given, settings

from nostall.core import BadInput
from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.generate import generate, no_kernel_reason
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore import explore, greedy_partition, refine
from nostall.fusion.graph.partition import Mask, members, to_mask
from nostall.fusion.graph.regions import find_regions
from tests.unit.fusion.codegen.graphs import operator_graphs, random_graphs
from tests.unit.fusion.codegen.graphs.random_graphs import RandomGraph
from tests.unit.fusion.patterns import attention, attention_backward, pooling, projected_attention


def explored_kernels(graph: Graph, *, annealed: bool = True) -> set[Mask]:
    """The groups of several operators in the partitions of all explorers."""
    delta = DeltaEvaluator(graph)
    found = explore(delta)
    plans = [found.partition, found.connected, found.from_beam, greedy_partition(delta)]
    if annealed:
        plans.append(refine(delta, found.connected, evaluations=10).partition)
    return {mask for plan in plans for mask in plan.groups if mask & (mask - 1)}


def generation_errors(graph: Graph, kernels: Iterable[Mask]) -> list[str]:
    """The errors of code generation for groups of operators; empty if all have a kernel."""
    return [why for mask in kernels if (why := generation_error(graph, mask)) is not None]


def generation_error(graph: Graph, mask: Mask) -> str | None:
    try:
        return None if generate(graph, members(mask)).source else "no source"
    except BadInput as error:
        return str(error)


@settings(max_examples=10)
@given(random_graphs.operator_graphs())
def test_partitions_of_random_graphs_can_be_generated(made: RandomGraph) -> None:
    assert not generation_errors(made.graph, explored_kernels(made.graph))


@settings(max_examples=8)
@given(operator_graphs.operator_graphs())
def test_partitions_of_large_random_graphs_can_be_generated(graph: Graph) -> None:
    for part in find_regions(graph):
        assert not generation_errors(part.graph, explored_kernels(part.graph))


@settings(max_examples=8)
@given(random_graphs.operator_graphs(varying=17))
def test_partitions_with_dynamic_sizes_can_be_generated(made: RandomGraph) -> None:
    assert not generation_errors(made.graph, explored_kernels(made.graph))


DOTS = {
    "attention": lambda: attention((8, 12, 48, 64), "float16"),
    "projected attention": lambda: projected_attention((8, 4, 20, 32), "float32"),
    "attention backward": lambda: attention_backward((8, 12, 64, 64), "bfloat16"),
    "attention pooling": lambda: pooling((256, 100, 64), "float32"),
}


@pytest.mark.parametrize("name", DOTS)
def test_explorers_fuse_attention_into_one_kernel(name: str) -> None:
    graph = DOTS[name]()
    (kernel,) = explore(DeltaEvaluator(graph)).partition.groups
    assert members(kernel) == graph.operators
    assert not generation_errors(graph, [kernel])


def test_tensor_cores_take_fewer_modelled_instructions() -> None:
    wide, narrow = (attention((8, 4, 32, 64), dtype) for dtype in ("float32", "float16"))
    (one, *_), (other, *_) = (
        [DeltaEvaluator(g).work.instructions[i] for i in g.operators if g[i].kind == "dot"]
        for g in (wide, narrow)
    )
    assert one == 8 * 4 * 32 * 32 * 64 == 32 * other


@settings(max_examples=15)
@given(operator_graphs.operator_graphs())
def test_fusion_decisions_do_not_depend_on_the_position_in_the_graph(graph: Graph) -> None:
    """The evaluator caches decisions by pattern, without the surrounding graph."""
    delta = DeltaEvaluator(graph)
    pairs = (1 << i | 1 << j for i in graph.operators for j in graph.consumers[i])
    wider = (one | other for one, other in combinations(explore(delta).partition.groups, 2))
    for mask in islice((m for m in (*pairs, *wider) if delta.kernel_time(m) is not None), 30):
        assert delta.can_fuse(mask) == (no_kernel_reason(graph, members(mask)) is None)


@pytest.mark.parametrize("name", ["cross-entropy", "quantised-norm"])
def test_partitions_of_models_can_be_generated(name: str) -> None:
    pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")
    from benchmarks.fusion.graphs import capture_passes

    kernels = 0
    for found in capture_passes(name, small=True).values():
        for part in find_regions(found.graph):
            masks = explored_kernels(part.graph, annealed=False)
            assert not generation_errors(part.graph, masks)
            kernels += len(masks)
    assert kernels


def test_fusions_without_a_kernel_are_rejected() -> None:
    """A value plus its transpose has a modelled time, but no kernel can loop over both layouts."""
    build = Builder()
    made = build("exp", build.input((64, 64)))
    graph = build.graph(build("add", made, build("permute", made, dims=(1, 0))))
    delta, both = DeltaEvaluator(graph), to_mask(graph.operators)
    assert delta.kernel_time(both) is not None
    assert not delta.can_fuse(both)
    assert len(explore(delta).partition.groups) == 2


def test_operators_without_a_kernel_cannot_be_fused() -> None:
    build = Builder()
    x = build.input((8, 16), "float64")
    graph = build.graph(build("exp", build("neg", x)))
    assert DeltaEvaluator(graph).kernel_time(to_mask(graph.operators)) is None
