"""Kernels for a number of rows that is known at run time only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.fusion import BadFusion, BadGraph, Builder, Graph
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.loops.dynamic_rows import check_dynamic_size
from nostall.fusion.codegen.loops.mapping import map_pattern
from nostall.fusion.codegen.loops.schedule import Schedule, build_schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.dynamic_size import Extent, placeholder_prime, resized
from tests.unit.fusion.codegen.random_graphs import RandomGraph, operator_graphs
from tests.unit.fusion.patterns import DYNAMIC, layer_norm

ONE, OTHER = 17, 23


def scheduled(graph: Graph, operators: tuple[int, ...]) -> Schedule:
    schedule = build_schedule(map_pattern(graph, operators))
    check_dynamic_size(schedule)
    return schedule


def at(graph: Graph, size: int) -> Graph:
    """The same with another number of rows, which is the one that varies there."""
    return Graph(tuple(n.resized(graph.varying, size) for n in graph), graph.outputs, size)


# -- numbers ---------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(0, 500), st.sets(st.integers(0, 10_000), max_size=8))
def test_a_stand_in_divides_nothing_else(near: int, others: set[int]) -> None:
    found = placeholder_prime(near, others)
    assert found >= near and found > 2
    assert all(found % divisor for divisor in range(2, found))
    assert not any(other % found == 0 for other in others if other)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 7), st.integers(1, 3000))
def test_rounded_numbers_are_rounded_again(factor: int, step: int, unit: int, size: int) -> None:
    extent = Extent(factor * ONE, step, unit)
    assert resized(extent, ONE, size) == Extent(factor * size, step, unit)
    assert resized(factor * ONE, ONE, size) == factor * size
    assert resized(16, ONE, size) == 16


def test_only_a_prime_can_stand_for_a_size() -> None:
    with pytest.raises(BadGraph, match="odd prime"):
        Builder(varying=8).graph()


# -- source ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DYNAMIC)
def test_the_source_of_every_plan_is_the_same_for_all_numbers_of_rows(name: str) -> None:
    graph = DYNAMIC[name]()
    other = at(graph, 1009)
    one, two = scheduled(graph, graph.operators), scheduled(other, other.operators)
    for plan in plans(one).legal_plans[::3]:
        here, there = emit(plan_kernel(one, plan)), emit(plan_kernel(two, plan))
        assert here.source == there.source
        for launch, elsewhere in zip(here.launches, there.launches, strict=True):
            moved = [resized(n, graph.varying, 1009) for n in (*launch.counts, *launch.grid)]
            assert moved == [*elsewhere.counts, *elsewhere.grid]


@settings(max_examples=30)
@given(operator_graphs(varying=ONE))
def test_what_is_not_refused_does_not_depend_on_the_number(made: RandomGraph) -> None:
    graph, other = made.graph, at(made.graph, OTHER)
    for operators in {graph.operators, *((index,) for index in graph.operators)} - {()}:
        try:
            one, two = scheduled(graph, operators), scheduled(other, operators)
        except BadFusion:
            continue
        for plan in plans(one).legal_plans[:: max(1, len(plans(one).legal_plans) // 5)]:
            assert emit(plan_kernel(one, plan)).source == emit(plan_kernel(two, plan)).source


def test_masks_of_flat_kernels_end_at_multiples_of_the_row() -> None:
    """Otherwise Triton loads element by element."""
    graph = DYNAMIC["bias and gelu"]()
    schedule = scheduled(graph, graph.operators)
    program = emit(plan_kernel(schedule, KernelPlan("thread", 1, (128,), 1)))
    assert "inside = c < count * 48" in program.source
    assert 'do_not_specialize=["count"]' in program.source
    build = Builder(varying=ONE)
    flat = build.graph(build("exp", build.input((ONE,))))
    program = emit(plan_kernel(scheduled(flat, flat.operators), KernelPlan("thread", 1, (128,), 1)))
    assert "@triton.jit\ndef" in program.source  # one kernel for multiples of 16, one for others


# -- refusals --------------------------------------------------------------------------------------


def _reduced(build: Builder, x: int) -> int:
    return build("sum", x, dims=(0,), keepdim=False)


def _turned(build: Builder, x: int) -> int:
    return build("exp", x, strides=(1, ONE))


def _squared(build: Builder, x: int) -> int:
    first = build("sum", x, dims=(1,), keepdim=True)
    return build("mul", first, build("permute", build("exp", first), dims=(1, 0)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [(_reduced, "dynamic size is reduced"), (_turned, "not the slowest"), (_squared, "several")],
)
def test_what_depends_on_the_number_is_refused(make: object, reason: str) -> None:
    build = Builder(varying=ONE)
    x = build.input((ONE, 6))
    graph = build.graph(make(build, x))  # type: ignore[operator]
    last = (graph.operators[-1],)
    with pytest.raises(BadFusion, match=reason):
        scheduled(graph, last)


def test_workspaces_grow_with_the_rows() -> None:
    graph = replace(layer_norm((ONE, 3000), "float16"), varying=ONE)
    schedule = scheduled(graph, graph.operators)
    split = next(plan for plan in plans(schedule).legal_plans if plan.scheme == "split")
    (first, *_) = emit(plan_kernel(schedule, split)).workspaces
    assert resized(first.elements, ONE, 2 * ONE) == 2 * first.elements
