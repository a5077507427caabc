"""Kernels with a dynamic number of rows: one source for all sizes, and patterns without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.fusion import BadFusion, BadGraph, Builder, Graph
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Launch
from nostall.fusion.codegen.emit.size_arguments import write_with_sizes
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.graph.dynamic_size import (
    Extent,
    SizeReader,
    part_of_size,
    placeholder_prime,
    resized,
    used_sizes,
)
from tests.unit.fusion.codegen.graphs.random_graphs import RandomGraph, operator_graphs
from tests.unit.fusion.pattern_tables import DYNAMIC
from tests.unit.fusion.patterns import layer_norm

SIZE, OTHER_SIZE = 17, 23


def dynamic_schedule(graph: Graph, operators: tuple[int, ...]) -> Schedule:
    return schedule_operators(graph, operators)


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


def test_sizes_are_read_from_shapes_also_from_products_of_sizes() -> None:
    varying = SIZE * OTHER_SIZE
    read = SizeReader(varying, [(4, SIZE * OTHER_SIZE), (3 * OTHER_SIZE,)])
    assert read.is_complete and read([(4, 35), (15,)]) == (7, 5)
    hidden = SizeReader(varying, [(SIZE * OTHER_SIZE, 8)])
    assert not hidden.is_complete and hidden([(35, 8)]) is None
    assert SizeReader(SIZE, [(2 * SIZE,)])([(10,)]) == 5
    assert SizeReader(None, [(3,)])([(3,)]) is None
    assert SizeReader(varying, [(SIZE,), (SIZE * OTHER_SIZE,)])([(0,), (0,)]) == (0, 0)


def test_parts_of_a_graph_know_their_sizes_only() -> None:
    varying = SIZE * OTHER_SIZE
    numbers = [6, Extent(4 * OTHER_SIZE, 8), 2 * OTHER_SIZE**2]
    assert used_sizes(numbers, varying) == OTHER_SIZE
    assert used_sizes([6], varying) is None
    assert part_of_size((7, 5), varying, OTHER_SIZE) == 5
    assert part_of_size((7, 5), varying, varying) == (7, 5)
    assert resized(2 * SIZE * OTHER_SIZE**2, varying, (7, 5)) == 2 * 7 * 25


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


# -- sizes as arguments ----------------------------------------------------------------------------


def _column_major(build: Builder, x: int) -> int:
    return build("exp", x, strides=(1, SIZE))


def _outer_product(build: Builder, x: int) -> int:
    row_sums = build("sum", x, dims=(1,), keepdim=True)
    return build("mul", row_sums, build("permute", build("exp", row_sums), dims=(1, 0)))


def _graph(make: Callable[[Builder, int], int], *axes: int) -> Graph:
    build = Builder(varying=SIZE * OTHER_SIZE)
    return build.graph(make(build, build.input(axes)))


def test_a_row_kernel_of_a_product_of_sizes_needs_no_further_argument() -> None:
    def norm(build: Builder, x: int) -> int:
        return build("div", x, build("sum", x, dims=(2,), keepdim=True))

    graph = _graph(norm, SIZE, OTHER_SIZE, 64)
    schedule = dynamic_schedule(graph, graph.operators)
    (launch,) = emit(plan_kernel(schedule, plans(schedule).legal_plans[0])).launches
    assert launch.counts == (SIZE * OTHER_SIZE,)
    assert resized(launch.counts[0], graph.varying, (3, 5)) == 15


@pytest.mark.parametrize(
    ("make", "axes", "source"),
    [
        (_column_major, (SIZE, 6), "(c % (n0)) * 6"),
        (_outer_product, (SIZE, 6), "(c // (n0))"),
    ],
)
def test_sizes_that_the_row_count_does_not_give_are_arguments(
    make: Any, axes: tuple[int, ...], source: str
) -> None:
    graph = _graph(make, *axes)
    schedule = dynamic_schedule(graph, graph.operators[-1:])
    (plan, *_) = plans(schedule).legal_plans
    program = emit(plan_kernel(schedule, plan))
    assert source in program.source
    assert str(SIZE) not in program.source
    assert program.launches[0].counts[1:] == (SIZE,)


@pytest.mark.parametrize("shape", [(5, OTHER_SIZE), (5, SIZE, OTHER_SIZE)])
def test_softmax_over_a_dynamic_length_is_a_loop(shape: tuple[int, ...]) -> None:
    def softmax(build: Builder, x: int) -> int:
        powers = build("exp", x)
        total = build("sum", powers, dims=(len(shape) - 1,), keepdim=True)
        return build("div", powers, total)

    graph = _graph(softmax, *shape)
    schedule = dynamic_schedule(graph, graph.operators)
    found = plans(schedule)
    assert {plan.scheme for plan in found.legal_plans} == {"looped"}
    assert any("in a loop" in each.reason for each in found.illegal)
    assert str(OTHER_SIZE) not in emit(plan_kernel(schedule, found.legal_plans[0])).source


def test_a_source_whose_form_depends_on_a_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _graph(_column_major, SIZE, 6)
    schedule = dynamic_schedule(graph, graph.operators)
    kernel = plan_kernel(schedule, plans(schedule).legal_plans[0])

    def write(kernel: PlannedKernel) -> tuple[str, Launch]:
        rows = kernel.schedule.row_count
        body = "small" if rows < 1000 else "large"
        return body, Launch("f", (), (rows,), (rows, 1), 1)

    with pytest.raises(BadFusion, match="form of the source"):
        write_with_sizes(kernel, write)


# -- illegal ---------------------------------------------------------------------------------------


def test_patterns_whose_source_depends_on_the_size_are_illegal() -> None:
    def both(build: Builder, x: int) -> int:
        scaled = build("mul", x, build("sum", x, dims=(1,), keepdim=True))
        return build("sum", scaled, dims=(0,), keepdim=False)

    graph = _graph(both, SIZE, 2 * OTHER_SIZE)
    with pytest.raises(BadFusion, match="a dynamic size is reduced; leave it to PyTorch"):
        dynamic_schedule(graph, graph.operators)


def test_workspaces_grow_with_the_rows() -> None:
    graph = replace(layer_norm((SIZE, 3000), "float16"), varying=SIZE)
    schedule = dynamic_schedule(graph, graph.operators)
    split_plan = next(plan for plan in plans(schedule).legal_plans if plan.scheme == "split")
    (workspace, *_) = emit(plan_kernel(schedule, split_plan)).workspaces
    assert resized(workspace.elements, SIZE, 2 * SIZE) == 2 * workspace.elements
