"""Merging of kernels: one kernel instead of two where the schedule's cost model says so."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.fusion.chains.generated import GENERATED
from benchmarks.fusion.chains.stitched import chain_graph

from nostall.fusion.codegen.generate import no_kernel_reason
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore.default_partition import default_partition, merge_kernels
from nostall.fusion.explore.explorer import explore
from nostall.fusion.graph.partition import members


@pytest.mark.parametrize(
    "name",
    [
        "rms norm 1x1048576",
        "residual + rms norm 1x1048576",
        "softmax backward 8x151936",
        "masked softmax 1x1048576",
        "residual + rms norm 4096x50304",
    ],
)
def test_a_row_that_is_split_over_programs_is_finished_by_the_same_kernel(name: str) -> None:
    graph = chain_graph(GENERATED[name])
    explored = [members(group) for group in explore(DeltaEvaluator(graph)).partition.groups]
    assert len(explored) > 1, "the explorer merges these already; find chains that need merging"
    assert default_partition(graph) == [tuple(graph.operators)]


def test_kernels_that_are_faster_alone_stay_alone() -> None:
    # The gradient of the weight is a sum over rows of what the gradient of x is computed from.
    graph = chain_graph(GENERATED["rms norm backward 32x3000"])
    groups = default_partition(graph)
    assert len(groups) == 2 and no_kernel_reason(graph, graph.operators) is None
    assert sorted(merge_kernels(graph, groups)) == sorted(groups)


def test_merging_keeps_the_operators_and_creates_no_cycle() -> None:
    graph = chain_graph(GENERATED["rms norm backward 8x151936"])
    singles = [(index,) for index in graph.operators]
    groups = merge_kernels(graph, singles)
    assert len(groups) < len(singles)
    assert sorted(index for group in groups for index in group) == sorted(graph.operators)
    assert graph.is_acyclic(groups)
