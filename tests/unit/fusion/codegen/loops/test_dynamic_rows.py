"""Kernels with a dynamic number of rows: one source for all sizes, and patterns without one."""

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
from tests.unit.fusion.codegen.graphs.random_graphs import RandomGraph, operator_graphs
from tests.unit.fusion.pattern_tables import DYNAMIC
from tests.unit.fusion.patterns import layer_norm

SIZE, OTHER_SIZE = 17, 23


def dynamic_schedule(graph: Graph, operators: tuple[int, ...]) -> Schedule:
    schedule = build_schedule(map_pattern(graph, operators))
    check_dynamic_size(schedule)
    return schedule


def with_size(graph: Graph, size: int) -> Graph:
    """A copy of a graph with another value of the dynamic size."""
    return Graph(tuple(n.resized(graph.varying, size) for n in graph), graph.outputs, size)


# -- sizes -----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(0, 500), st.sets(st.integers(0, 10_000), max_size=8))
def test_a_placeholder_is_a_prime_that_divides_no_static_size(
    minimum: int, static_sizes: set[int]
) -> None:
    prime = placeholder_prime(minimum, static_sizes)
    assert prime >= minimum and prime > 2
    assert all(prime % divisor for divisor in range(2, prime))
    assert not any(size % prime == 0 for size in static_sizes if size)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 7), st.integers(1, 3000))
def test_an_extent_is_resized_before_it_is_rounded(
    factor: int, step: int, unit: int, size: int
) -> None:
    extent = Extent(factor * SIZE, step, unit)
    assert resized(extent, SIZE, size) == Extent(factor * size, step, unit)
    assert resized(factor * SIZE, SIZE, size) == factor * size
    assert resized(16, SIZE, size) == 16


def test_the_placeholder_of_a_size_has_to_be_an_odd_prime() -> None:
    with pytest.raises(BadGraph, match="odd prime"):
        Builder(varying=8).graph()


# -- source ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DYNAMIC)
def test_the_source_of_every_plan_is_the_same_for_all_sizes(name: str) -> None:
    graph = DYNAMIC[name]()
    larger = with_size(graph, 1009)
    schedule = dynamic_schedule(graph, graph.operators)
    larger_schedule = dynamic_schedule(larger, larger.operators)
    for plan in plans(schedule).legal_plans[::3]:
        program, larger_program = (
            emit(plan_kernel(schedule, plan)),
            emit(plan_kernel(larger_schedule, plan)),
        )
        assert program.source == larger_program.source
        for launch, larger_launch in zip(program.launches, larger_program.launches, strict=True):
            counts = [resized(n, graph.varying, 1009) for n in (*launch.counts, *launch.grid)]
            assert counts == [*larger_launch.counts, *larger_launch.grid]


@settings(max_examples=30)
@given(operator_graphs(varying=SIZE))
def test_sources_of_legal_patterns_do_not_depend_on_the_size(made: RandomGraph) -> None:
    graph, resized_graph = made.graph, with_size(made.graph, OTHER_SIZE)
    for operators in {graph.operators, *((index,) for index in graph.operators)} - {()}:
        try:
            schedule = dynamic_schedule(graph, operators)
            resized_schedule = dynamic_schedule(resized_graph, operators)
        except BadFusion:
            continue
        legal = plans(schedule).legal_plans
        for plan in legal[:: max(1, len(legal) // 5)]:
            assert (
                emit(plan_kernel(schedule, plan)).source
                == emit(plan_kernel(resized_schedule, plan)).source
            )


def test_masks_of_flat_kernels_end_at_multiples_of_the_row() -> None:
    """Triton would load element by element if a mask could end within a vector."""
    graph = DYNAMIC["bias and gelu"]()
    schedule = dynamic_schedule(graph, graph.operators)
    program = emit(plan_kernel(schedule, KernelPlan("thread", 1, (128,), 1)))
    assert "inside = c < count * 48" in program.source
    assert 'do_not_specialize=["count"]' in program.source
    build = Builder(varying=SIZE)
    flat = build.graph(build("exp", build.input((SIZE,))))
    program = emit(
        plan_kernel(dynamic_schedule(flat, flat.operators), KernelPlan("thread", 1, (128,), 1))
    )
    # Triton specializes the count: one binary for multiples of 16, one for other counts.
    assert "@triton.jit\ndef" in program.source


# -- illegal ---------------------------------------------------------------------------------------


def _reduced(build: Builder, x: int) -> int:
    return build("sum", x, dims=(0,), keepdim=False)


def _column_major(build: Builder, x: int) -> int:
    return build("exp", x, strides=(1, SIZE))


def _outer_product(build: Builder, x: int) -> int:
    row_sums = build("sum", x, dims=(1,), keepdim=True)
    return build("mul", row_sums, build("permute", build("exp", row_sums), dims=(1, 0)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_reduced, "dynamic size is reduced"),
        (_column_major, "not the slowest"),
        (_outer_product, "several"),
    ],
)
def test_patterns_whose_source_depends_on_the_size_are_illegal(make: object, reason: str) -> None:
    build = Builder(varying=SIZE)
    x = build.input((SIZE, 6))
    graph = build.graph(make(build, x))  # type: ignore[operator]
    last = (graph.operators[-1],)
    with pytest.raises(BadFusion, match=reason):
        dynamic_schedule(graph, last)


def test_workspaces_grow_with_the_rows() -> None:
    graph = replace(layer_norm((SIZE, 3000), "float16"), varying=SIZE)
    schedule = dynamic_schedule(graph, graph.operators)
    split_plan = next(plan for plan in plans(schedule).legal_plans if plan.scheme == "split")
    (workspace, *_) = emit(plan_kernel(schedule, split_plan)).workspaces
    assert resized(workspace.elements, SIZE, 2 * SIZE) == 2 * workspace.elements
