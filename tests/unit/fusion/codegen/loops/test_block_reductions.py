"""Tests of reductions over blocks of columns: which there are, and what they cost."""

from __future__ import annotations

import pytest

from nostall.fusion.codegen.cost.kernel import kernel_costs
from nostall.fusion.codegen.generate import no_kernel_reason, schedule_operators
from nostall.fusion.codegen.loops.reduction_levels import passes
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.patterns import head_norms, quantised_gradient, quantised_norm


def schedule(graph: Graph) -> Schedule:
    return schedule_operators(graph, graph.operators)


def test_a_block_is_reduced_in_the_kernel_that_reduces_its_row() -> None:
    graph = quantised_norm((8, 640), "float16", 64)
    found = schedule(graph)
    (block,) = found.block_reductions
    assert graph[block].op == "amax"
    assert (found.row_count, found.column_count, found.block_columns) == (8, 640, 64)
    assert found.has_columns(block) and not found.removes_columns(block)
    assert found.is_uniform_in_blocks(block)


def test_block_reductions_add_no_pass_over_the_columns() -> None:
    plain, in_heads = (
        schedule(quantised_norm((8, 640), "float16", 64)),
        schedule(head_norms((8, 640), "float16", 10)),
    )
    assert len(in_heads.block_reductions) == 4
    # The sum, the sum of squares (in the same loop if that saves one), and the results.
    for found in (plain, in_heads):
        reducing = [part for part in passes(found) if part.reductions]
        assert all(map(found.removes_columns, (i for part in reducing for i in part.reductions)))
        assert len(passes(found)) <= 3


def test_a_sum_over_rows_may_follow() -> None:
    found = schedule(quantised_gradient((64, 320), "float16", 32))
    assert found.kind == "dual" and len(found.block_reductions) == 1
    assert not set(found.row_reductions) & set(found.block_reductions)


@pytest.mark.parametrize("columns", [96, 2048])
def test_blocks_that_no_chunk_has_as_a_whole_have_no_common_kernel(columns: int) -> None:
    graph = quantised_norm((8, 3 * 2048), "float16", columns)
    assert no_kernel_reason(graph, graph.operators) is not None


def test_a_reduction_over_every_nth_column_has_no_common_kernel() -> None:
    """The blocks' axis is reduced, not the axis inside of the blocks."""
    build = Builder()
    x = build.input((8, 256))
    total = build("sub", x, build("sum", x, dims=(1,), keepdim=True))
    blocks = build("view", total, shape=(8, 4, 64))
    across = build("div", blocks, build("amax", blocks, dims=(1,), keepdim=True))
    graph = build.graph(across)
    assert no_kernel_reason(graph, graph.operators) is not None


def test_chunks_have_whole_blocks() -> None:
    found = schedule(quantised_norm((8, 640), "float16", 128))
    assert illegal_reason(found, KernelPlan("block", 1, (128,) * 5, 4)) is None
    reason = illegal_reason(found, KernelPlan("warp", 1, (64,) * 10, 1))
    assert reason is not None and "blocks of 128" in reason


def test_more_lanes_of_a_block_cost_more_shuffles() -> None:
    costs = [
        kernel_costs(PlannedKernel(schedule(graph), KernelPlan("block", 1, (4096,), 8)))[0]
        for graph in (quantised_norm((64, 4096), "float16", block) for block in (16, 64, 1024))
    ]
    instructions = [cost.instructions for cost in costs]
    assert instructions == sorted(instructions) and instructions[0] < instructions[1]
    assert costs[2].barriers > costs[1].barriers, "several warps share a block of 1,024"
