"""What explorers put into one kernel is what code generation can write."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, islice

import pytest
from hypothesis import given, settings

from nostall.core import BadInput
from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.generate import generate, no_kernel_reason
from nostall.fusion.evaluate import DeltaEvaluator
from nostall.fusion.explore import explore, greedy_partition, refine
from nostall.fusion.graph.partition import Mask, members, to_mask
from nostall.fusion.graph.regions import find_regions
from tests.unit.fusion.codegen import operator_graphs, random_graphs
from tests.unit.fusion.codegen.random_graphs import RandomGraph
from tests.unit.fusion.patterns import (
    attention,
    attention_backward,
    pooling,
    projected_attention,
)


def planned(graph: Graph, *, annealed: bool = True) -> set[Mask]:
    """Kernels of several operators in the plans of all explorers."""
    delta = DeltaEvaluator(graph)
    found = explore(delta)
    plans = [found.partition, found.connected, found.from_beam, greedy_partition(delta)]
    if annealed:
        plans.append(refine(delta, found.connected, evaluations=10).partition)
    return {mask for plan in plans for mask in plan.groups if mask & (mask - 1)}


def unwritten(graph: Graph, kernels: Iterable[Mask]) -> list[str]:
    """Why code generation has no kernel for some of them."""
    return [why for mask in kernels if (why := not_generated(graph, mask)) is not None]


def not_generated(graph: Graph, mask: Mask) -> str | None:
    try:
        return None if generate(graph, members(mask)).source else "no source"
    except BadInput as error:
        return str(error)


@settings(max_examples=10)
@given(random_graphs.operator_graphs())
def test_plans_of_random_graphs_can_be_written(made: RandomGraph) -> None:
    assert not unwritten(made.graph, planned(made.graph))


@settings(max_examples=8)
@given(operator_graphs.operator_graphs())
def test_plans_of_large_random_graphs_can_be_written(graph: Graph) -> None:
    for part in find_regions(graph):
        assert not unwritten(part.graph, planned(part.graph))


@settings(max_examples=8)
@given(random_graphs.operator_graphs(varying=17))
def test_plans_for_dynamic_sizes_can_be_written(made: RandomGraph) -> None:
    assert not unwritten(made.graph, planned(made.graph))


DOTS = {
    "attention": lambda: attention((8, 12, 48, 64), "float16"),
    "projected attention": lambda: projected_attention((8, 4, 20, 32), "float32"),
    "attention backward": lambda: attention_backward((8, 12, 64, 64), "bfloat16"),
    "attention pooling": lambda: pooling((256, 100, 64), "float32"),
}


@pytest.mark.parametrize("name", DOTS)
def test_explorers_put_attention_into_one_kernel(name: str) -> None:
    graph = DOTS[name]()
    (kernel,) = explore(DeltaEvaluator(graph)).partition.groups
    assert members(kernel) == graph.operators
    assert not unwritten(graph, [kernel])


def test_tensor_cores_count_fewer_instructions() -> None:
    wide, narrow = (attention((8, 4, 32, 64), dtype) for dtype in ("float32", "float16"))
    (one, *_), (other, *_) = (
        [DeltaEvaluator(g).work.instructions[i] for i in g.operators if g[i].kind == "dot"]
        for g in (wide, narrow)
    )
    assert one == 8 * 4 * 32 * 32 * 64 == 32 * other


@settings(max_examples=15)
@given(operator_graphs.operator_graphs())
def test_a_pattern_is_judged_alike_wherever_it_stands(graph: Graph) -> None:
    """Answers are kept by pattern, cut out of its graph."""
    delta = DeltaEvaluator(graph)
    pairs = (1 << i | 1 << j for i in graph.operators for j in graph.consumers[i])
    wider = (one | other for one, other in combinations(explore(delta).partition.groups, 2))
    for mask in islice((m for m in (*pairs, *wider) if delta.kernel_time(m) is not None), 30):
        assert delta.can_fuse(mask) == (no_kernel_reason(graph, members(mask)) is None)


@pytest.mark.parametrize("name", ["cross-entropy", "quantised-norm"])
def test_plans_of_models_can_be_written(name: str) -> None:
    pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")
    from benchmarks.fusion.graphs import captured

    kernels = 0
    for found in captured(name, small=True).values():
        for part in find_regions(found.graph):
            masks = planned(part.graph, annealed=False)
            assert not unwritten(part.graph, masks)
            kernels += len(masks)
    assert kernels


def test_what_the_cost_model_alone_would_join_is_not_joined() -> None:
    """A value and its transpose: legal by bytes and rows, but no kernel walks both ways."""
    build = Builder()
    made = build("exp", build.input((64, 64)))
    graph = build.graph(build("add", made, build("permute", made, dims=(1, 0))))
    delta, both = DeltaEvaluator(graph), to_mask(graph.operators)
    assert delta.kernel_time(both) is not None
    assert not delta.can_fuse(both)
    assert len(explore(delta).partition.groups) == 2


def test_what_has_no_kernel_alone_has_none_with_others() -> None:
    build = Builder()
    x = build.input((8, 16), "float64")
    graph = build.graph(build("exp", build("neg", x)))
    assert DeltaEvaluator(graph).kernel_time(to_mask(graph.operators)) is None
