"""Tests of the delta- and latency-evaluators: terms, legality and objectives."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.fusion import BadFusion, Builder, Graph
from nostall.fusion.evaluate.delta import DeltaEvaluator, DeltaObjective
from nostall.fusion.evaluate.latency import LatencyEvaluator
from nostall.fusion.evaluate.legality import MAX_COLUMNS, connected_parts, row_layout
from nostall.fusion.explore import PartitionSpace, explore
from nostall.fusion.graph.partition import (
    Partition,
    kernel_inputs,
    kernel_outputs,
    members,
    to_mask,
)
from nostall.fusion.hardware import H200
from nostall.testing import check_objective
from tests.unit.fusion.codegen.graphs.operator_graphs import (
    layer_norm,
    norm_gradient,
    operator_graphs,
)


def all_operators(graph: Graph) -> int:
    return to_mask(graph.operators)


def test_memory_time_is_bytes_over_bandwidth() -> None:
    graph = layer_norm(8192, 1024)
    parts = DeltaEvaluator(graph).kernel_time(all_operators(graph))
    assert parts is not None
    moved = 4 * 8192 * 1024 * 4 + 1024 * 4
    assert parts.memory == pytest.approx(moved / H200.copy_bytes_per_second, rel=1e-12)
    assert parts.calls == H200.launch_s + H200.ramp_s


def test_column_reduction_at_the_end_costs_a_second_stage() -> None:
    graph = norm_gradient()
    delta = DeltaEvaluator(graph)
    (column,) = delta.work.cross_block_reductions
    fused = delta.kernel_time(all_operators(graph))
    without = delta.kernel_time(all_operators(graph) ^ 1 << column)
    assert fused is not None and without is not None
    assert fused.calls == 2 * without.calls
    partial = 2 * 4 * 2 * H200.sms * graph[column].elements
    extra = (fused.memory - without.memory) * H200.copy_bytes_per_second
    (product,) = graph.sources[column]  # the kernel without the sum must write it
    assert extra == pytest.approx(partial + graph[column].bytes - graph[product].bytes)


def test_kernels_must_be_aligned_in_rows() -> None:
    build = Builder()
    x = build.input((4096, 2048))
    row = build("sum", x, dims=(1,), keepdim=True)
    column = build("sum", x, dims=(0,), keepdim=True)
    scaled = build("mul", x, row)
    both = build("mul", scaled, column)
    delta = DeltaEvaluator(build.graph(both))
    assert delta.kernel_time(to_mask([row, scaled])) is not None
    assert delta.kernel_time(to_mask([row, column])) is not None
    assert delta.kernel_time(to_mask([row, column, scaled])) is not None
    assert delta.kernel_time(to_mask([row, scaled, column, both])) is None, "no common rows"
    assert delta.kernel_time(to_mask([row, both])) is None, "not convex"
    layout = row_layout(delta.work, to_mask([row, scaled]))
    assert layout is not None and (layout.rows, layout.columns, layout.levels) == (4096, 2048, 1)


def test_rows_may_run_across_memory() -> None:
    """Softmax over the channels of (batch, channel, position): rows are batch and position."""
    build = Builder()
    x = build.input((32, 150, 4096))
    largest = build("amax", x, dims=(1,), keepdim=True)
    e = build("exp", build("sub", x, largest))
    graph = build.graph(build("div", e, build("sum", e, dims=(1,), keepdim=True)))
    delta = DeltaEvaluator(graph)
    layout = row_layout(delta.work, all_operators(graph))
    assert layout is not None and (layout.rows, layout.columns) == (32 * 4096, 150)
    assert layout.outer and layout.levels == 2
    assert explore(delta).partition.groups == (all_operators(graph),)
    parts = delta.kernel_time(all_operators(graph))
    assert parts is not None
    assert parts.memory == pytest.approx(2 * graph[x].bytes / H200.copy_bytes_per_second)


def test_reductions_of_too_wide_rows_are_not_used_in_the_kernel() -> None:
    for columns, is_legal in ((MAX_COLUMNS, True), (MAX_COLUMNS * 2, False)):
        build = Builder()
        x = build.input((16, columns))
        total = build("sum", x, dims=(1,), keepdim=True)
        graph = build.graph(build("div", x, total))
        assert (DeltaEvaluator(graph).kernel_time(all_operators(graph)) is not None) == is_legal


def test_independent_operators_are_packed() -> None:
    build = Builder()
    first = build("exp", build.input((64,)))
    second = build("exp", build.input((64,)))
    graph = build.graph(first, second)
    delta = DeltaEvaluator(graph)
    assert connected_parts(delta.work, all_operators(graph)) == [1 << first, 1 << second]
    assert not delta.is_connected(all_operators(graph))
    gain = delta.gain(all_operators(graph))
    assert gain is not None and gain > 0.9 * H200.launch_s


def test_inputs_and_outputs_of_a_kernel() -> None:
    graph = layer_norm()
    delta = DeltaEvaluator(graph)
    first, *_ = graph.operators
    assert kernel_inputs(graph, all_operators(graph)) == graph.inputs
    assert set(kernel_outputs(graph, all_operators(graph))) == set(graph.outputs)
    assert kernel_inputs(graph, 1 << first) == graph.inputs[:2]
    inside = {first}
    assert delta.is_output(first, inside) and kernel_outputs(graph, 1 << first) == (first,)


@settings(max_examples=40, deadline=None)
@given(operator_graphs(), st.data())
def test_gains_add(graph: Graph, data: Any) -> None:
    delta = DeltaEvaluator(graph)
    if not graph.operators:
        return
    mask = to_mask(data.draw(st.sets(st.sampled_from(graph.operators), min_size=1)))
    gain, parts = delta.gain(mask), delta.kernel_time(mask)
    if gain is None or parts is None:
        assert (gain, parts) == (None, None)
        return
    rest = [1 << index for index in graph.operators if not mask >> index & 1]
    partition = Partition.from_groups([mask, *rest])
    unfused = delta.cost(Partition.unfused(graph))
    assert delta.cost(partition) == pytest.approx(unfused - gain, rel=1e-12)
    assert LatencyEvaluator(delta).kernel_seconds(mask) >= parts.memory


@settings(max_examples=60, deadline=None)
@given(operator_graphs(), st.data())
def test_supersets_of_sets_without_layout_have_none(graph: Graph, data: Any) -> None:
    """The enumeration of columns relies on it and does not extend sets without a layout."""
    delta = DeltaEvaluator(graph)
    if graph.operators:
        subset = to_mask(data.draw(st.sets(st.sampled_from(graph.operators), min_size=1)))
        superset = subset | to_mask(data.draw(st.sets(st.sampled_from(graph.operators))))
        superset |= delta.convex_hull(superset) & delta.operators
        if row_layout(delta.work, subset) is None:
            assert row_layout(delta.work, superset) is None


def test_objectives_follow_the_interface() -> None:
    graph = layer_norm()
    delta = DeltaEvaluator(graph)
    fused = Partition.from_groups([all_operators(graph)])
    impossible = Partition.from_groups([all_operators(graph) | 1 << graph.inputs[0]])
    objective = DeltaObjective(delta)
    check_objective(objective, PartitionSpace(delta, Partition.unfused(graph)), steps=5)
    slow, fast, illegal = objective.evaluate([Partition.unfused(graph), fused, impossible])
    assert fast.value < slow.value and fast.kind == "modelled"
    assert math.isinf(illegal.value) and illegal.failure
    by_latency = LatencyEvaluator(delta)
    seconds = map(by_latency.cost, (fused, Partition.unfused(graph), impossible))
    assert sorted(costs := list(seconds)) == costs and costs[2] == math.inf


def test_invalid_partitions_are_rejected() -> None:
    graph = layer_norm()
    first, second, *rest = (1 << index for index in graph.operators)
    Partition.from_groups([first, second, *rest]).check(graph)
    for groups in ([first, *rest], [first | second, second, *rest], [first, second, *rest, 1]):
        with pytest.raises(BadFusion):
            Partition.from_groups(groups).check(graph)
    last = 1 << members(rest[-1])[0]
    with pytest.raises(BadFusion, match="cycle"):
        Partition.from_groups([first | last, second, *rest[:-1]]).check(graph)
