"""Tests that ptxas compiles the kernels of benchmark programs and random graphs for sm_90.

Without a GPU no other test would find kernels that do not compile.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.stitched import chain_graph
from benchmarks.fusion.correctness.random_graphs import FLOATS, draw_graphs, draw_plan

from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.generate import PlanChooser
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.runtime.stitched_graph import stitch
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.graph import Graph
from nostall.tuning.sources.triton_source import compile_triton
from tests.unit.fusion.codegen.graphs.random_graphs import RandomGraph

pytestmark = pytest.mark.slow

SHARES, GRAPHS, DRAWN = 5, 20, 300
"""Test cases that share the random graphs, graphs to compile, and graphs to generate."""


@cache
def graphs() -> list[RandomGraph]:
    """The first of the graphs that are also interpreted and run on a GPU."""
    generated: list[RandomGraph] = []
    draw_graphs(DRAWN, 0, FLOATS, generated.append)
    return generated[:GRAPHS]


def count_compiled_kernels(graph: Graph, choice: PlanChooser, folder: Path) -> int:
    """Compile all kernels of the explorer's partition for sm_90 and return their number."""
    stitched = stitch(graph, default_partition(graph), choice=choice, folder=folder)
    programs = [step.program for step in stitched.steps if not isinstance(step, int)]
    count = 0
    for program in {program.key: program for program in programs}.values():
        path = folder / f"{program.key}.py"
        path.write_text(program.source)
        for name, launch in launch_specs(program).items():
            assert compile_triton(path, name, launch, "sm_90").cubin
            count += 1
    return count


@pytest.mark.parametrize("name", CHAINS)
def test_kernels_of_benchmark_programs_compile(name: str, tmp_path: Path) -> None:
    assert count_compiled_kernels(chain_graph(CHAINS[name]), default_plan, tmp_path) >= 1


@pytest.mark.parametrize("share", range(SHARES))
def test_kernels_of_random_graphs_compile_in_all_dtypes(share: int, tmp_path: Path) -> None:
    kernels = 0
    for made in graphs()[share::SHARES]:
        for one in (made, made.as_bfloat16):
            if one is not None and one.graph.operators:
                draw = random.Random(one.seed)
                kernels += count_compiled_kernels(
                    one.graph, lambda schedule, d=draw: draw_plan(schedule, d), tmp_path
                )
    assert kernels > 2
