"""Tests of packing: independent kernels of different shapes in one launch (nothing is run)."""

from __future__ import annotations

import pytest

from nostall.fusion import BadFusion, Graph
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import generate, no_kernel_reason, schedule_operators
from nostall.fusion.codegen.packing import independent_parts, plan_packed
from nostall.fusion.codegen.tiling.kernel_plan import PackedPlan
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore import explore
from nostall.fusion.graph.dynamic_size import resized
from tests.unit.fusion.pattern_tables import PACKED
from tests.unit.fusion.patterns import column_sum, disjoint_union, layer_norm


def packed(name: str) -> tuple[Graph, Program]:
    graph = PACKED[name]()
    return graph, generate(graph, graph.operators)


def test_parts_are_independent() -> None:
    graph, _ = packed("three")
    parts = independent_parts(graph, graph.operators)
    assert len(parts) == 3
    assert sorted(i for part in parts for i in part) == list(graph.operators)
    sources = [{s for i in part for s in (i, *graph.sources[i])} for part in parts]
    assert not sources[0] & sources[1] and not sources[1] & sources[2]


def test_each_part_has_its_own_programs() -> None:
    graph, program = packed("three")
    (launch,) = program.launches
    assert isinstance(program.plan, PackedPlan)
    assert {plan.num_warps for plan in program.plan.plans} == {launch.num_warps}
    blocks = launch.counts[1::2]
    assert launch.grid == (sum(blocks), 1)
    assert "if pid < blocks0:" in program.source
    assert "elif pid < blocks0 + blocks1:" in program.source
    assert "_part_2(pid - (blocks0 + blocks1), " in program.source
    assert set(program.outputs) == set(graph.outputs)


def test_the_grid_grows_with_dynamic_parts() -> None:
    graph, program = packed("dynamic")
    (launch,) = program.launches
    at_1, at_9999 = (resized(launch.grid[0], graph.varying, size) for size in (1, 9999))
    static = launch.counts[3]
    blocks = launch.counts[1::2]
    assert at_1 == sum(resized(count, graph.varying, 1) for count in blocks) > 2 + static
    assert at_9999 > 1000
    assert resized(static, graph.varying, 9999) == static


def test_schemes_of_several_kernels_are_not_packed() -> None:
    """The scheme ``split`` needs two launches, because partial results go through memory."""
    graph = disjoint_union(layer_norm((5, 100), "float32"), PACKED["three"]())
    parts = [schedule_operators(graph, part) for part in independent_parts(graph, graph.operators)]
    assert all(kernel.plan.scheme != "split" for kernel in plan_packed(parts))


def test_the_explorer_packs_independent_kernels() -> None:
    graph = disjoint_union(layer_norm((64, 100), "float16"), layer_norm((32, 40), "float32"))
    found = explore(DeltaEvaluator(graph))
    assert len(found.connected.groups) == 2
    assert len(found.partition.groups) == 1
    assert no_kernel_reason(graph, graph.operators) is None


def test_a_part_without_a_kernel_prevents_packing() -> None:
    graph = disjoint_union(column_sum((530, 12), "float64"), layer_norm((5, 100), "float32"))
    reason = no_kernel_reason(graph, graph.operators)
    assert reason is not None and "float64" in reason
    with pytest.raises(BadFusion, match="float64"):
        generate(graph, graph.operators)
