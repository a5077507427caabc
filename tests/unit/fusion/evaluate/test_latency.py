"""What the evaluators say of a kernel: signs, sums and orders of magnitude."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.fusion import BadFusion, Builder, Graph
from nostall.fusion.evaluate import (
    H200,
    Delta,
    DeltaObjective,
    Latency,
    LatencyObjective,
)
from nostall.fusion.evaluate.legality import WIDEST_ROW, connected, mapping
from nostall.fusion.explore import PlanSpace, explore
from nostall.fusion.graph.partition import Plan, mask_of, members, reads, writes
from nostall.testing import check_objective
from tests.unit.fusion.codegen.operator_graphs import layer_norm, norm_gradient, operator_graphs


def whole(graph: Graph) -> int:
    return mask_of(graph.operators)


def test_memory_time_is_bytes_over_bandwidth() -> None:
    graph = layer_norm(8192, 1024)
    parts = Delta(graph).parts(whole(graph))
    assert parts is not None
    moved = 4 * 8192 * 1024 * 4 + 1024 * 4
    assert parts.memory == pytest.approx(moved / H200.copy_bytes_per_second, rel=1e-12)
    assert parts.calls == H200.launch_s + H200.ramp_s


def test_a_column_reduction_at_the_end_costs_a_second_stage() -> None:
    graph = norm_gradient()
    delta = Delta(graph)
    (column,) = delta.work.crossing
    one = delta.parts(whole(graph))
    without = delta.parts(whole(graph) ^ 1 << column)
    assert one is not None and without is not None
    assert one.calls == 2 * without.calls
    partial = 2 * 4 * 2 * H200.sms * graph[column].elements
    extra = (one.memory - without.memory) * H200.copy_bytes_per_second
    (product,) = graph.sources[column]  # apart from the sum it has to be written
    assert extra == pytest.approx(partial + graph[column].bytes - graph[product].bytes)


def test_rows_decide_what_one_kernel_can_compute() -> None:
    build = Builder()
    x = build.input((4096, 2048))
    row = build("sum", x, dims=(1,), keepdim=True)
    column = build("sum", x, dims=(0,), keepdim=True)
    scaled = build("mul", x, row)
    both = build("mul", scaled, column)
    delta = Delta(build.graph(both))
    assert delta.parts(mask_of([row, scaled])) is not None
    assert delta.parts(mask_of([row, column])) is not None
    assert delta.parts(mask_of([row, column, scaled])) is not None
    assert delta.parts(mask_of([row, scaled, column, both])) is None, "no rows in common"
    assert delta.parts(mask_of([row, both])) is None, "not convex"
    found = mapping(delta.work, mask_of([row, scaled]))
    assert found is not None and (found.rows, found.columns, found.levels) == (4096, 2048, 1)


def test_rows_may_lie_across_memory() -> None:
    """A softmax over channels, (batch, channel, place): rows are batch and place."""
    build = Builder()
    x = build.input((32, 150, 4096))
    largest = build("amax", x, dims=(1,), keepdim=True)
    e = build("exp", build("sub", x, largest))
    graph = build.graph(build("div", e, build("sum", e, dims=(1,), keepdim=True)))
    delta = Delta(graph)
    found = mapping(delta.work, whole(graph))
    assert found is not None and (found.rows, found.columns) == (32 * 4096, 150)
    assert found.outer and found.levels == 2
    assert explore(delta).plan.groups == (whole(graph),)
    parts = delta.parts(whole(graph))
    assert parts is not None
    assert parts.memory == pytest.approx(2 * graph[x].bytes / H200.copy_bytes_per_second)


def test_a_row_that_is_too_wide_is_not_used_again() -> None:
    for columns, legal in ((WIDEST_ROW, True), (WIDEST_ROW * 2, False)):
        build = Builder()
        x = build.input((16, columns))
        total = build("sum", x, dims=(1,), keepdim=True)
        graph = build.graph(build("div", x, total))
        assert (Delta(graph).parts(whole(graph)) is not None) == legal


def test_what_does_not_hang_together_is_packed() -> None:
    build = Builder()
    one = build("exp", build.input((64,)))
    other = build("exp", build.input((64,)))
    graph = build.graph(one, other)
    delta = Delta(graph)
    assert connected(delta.work, whole(graph)) == [1 << one, 1 << other]
    assert not delta.is_connected(whole(graph))
    gain = delta.gain(whole(graph))
    assert gain is not None and gain > 0.9 * H200.launch_s


def test_reads_and_writes_of_a_kernel() -> None:
    graph = layer_norm()
    delta = Delta(graph)
    first, *_ = graph.operators
    assert reads(graph, whole(graph)) == graph.inputs
    assert set(writes(graph, whole(graph))) == set(graph.outputs)
    assert reads(graph, 1 << first) == graph.inputs[:2]
    inside = {first}
    assert delta.written(first, inside) and writes(graph, 1 << first) == (first,)


@settings(max_examples=40, deadline=None)
@given(operator_graphs(), st.data())
def test_the_gain_is_the_sum_of_its_terms_and_adds(graph: Graph, data: Any) -> None:
    delta = Delta(graph)
    if not graph.operators:
        return
    mask = mask_of(data.draw(st.sets(st.sampled_from(graph.operators), min_size=1)))
    gain, terms, parts = delta.gain(mask), delta.terms(mask), delta.parts(mask)
    if gain is None or terms is None or parts is None:
        assert (gain, terms, parts) == (None, None, None)
        return
    memory, calls, penalty = terms
    assert gain == pytest.approx(memory + calls - penalty, abs=1e-15)
    rest = [1 << index for index in graph.operators if not mask >> index & 1]
    plan = Plan.of([mask, *rest])
    unfused = delta.cost(Plan.unfused(graph))
    assert delta.cost(plan) == pytest.approx(unfused - gain, rel=1e-12)
    assert Latency(delta).kernel(mask) >= parts.memory


@settings(max_examples=60, deadline=None)
@given(operator_graphs(), st.data())
def test_without_a_layout_no_superset_has_one(graph: Graph, data: Any) -> None:
    """The enumeration of all patterns leaves these out."""
    delta = Delta(graph)
    if graph.operators:
        some = mask_of(data.draw(st.sets(st.sampled_from(graph.operators), min_size=1)))
        more = some | mask_of(data.draw(st.sets(st.sampled_from(graph.operators))))
        more |= delta.hull(more) & delta.operators
        if mapping(delta.work, some) is None:
            assert mapping(delta.work, more) is None


def test_objectives_keep_their_contract() -> None:
    graph = layer_norm()
    delta = Delta(graph)
    fused = Plan.of([whole(graph)])
    impossible = Plan.of([whole(graph) | 1 << graph.inputs[0]])
    for objective in (DeltaObjective(delta), LatencyObjective(Latency(delta))):
        check_objective(objective, PlanSpace(delta, Plan.unfused(graph)), steps=5)
        slow, fast, never = objective.evaluate([Plan.unfused(graph), fused, impossible])
        assert fast.value < slow.value and fast.kind == "modelled"
        assert math.isinf(never.value) and never.failure


def test_plans_that_are_none_are_refused() -> None:
    graph = layer_norm()
    first, second, *rest = (1 << index for index in graph.operators)
    Plan.of([first, second, *rest]).check(graph)
    for groups in ([first, *rest], [first | second, second, *rest], [first, second, *rest, 1]):
        with pytest.raises(BadFusion):
            Plan.of(groups).check(graph)
    last = 1 << members(rest[-1])[0]
    with pytest.raises(BadFusion, match="circle"):
        Plan.of([first | last, second, *rest[:-1]]).check(graph)
