"""Loops of the scheme ``looped``: every second pass runs backwards over the same columns."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.chains.generated import KINDS
from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.stitched import chain_graph

from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel

_LOOP = re.compile(
    r"for (first|at) in (?:tl\.)?range\((\d+), (\d+), (\d+)[^)]*\):(?:\n\s+first = (.*))?"
)


def loops_of(source: str) -> list[list[int]]:
    """The first columns of the iterations of each pass, in the order of the kernel."""
    passes = []
    for text in source.split("# pass ")[1:]:
        firsts = []
        for variable, begin, end, width, first in _LOOP.findall(text):
            for at in range(int(begin), int(end), int(width)):
                firsts.append(at if variable == "first" else int(eval(first, {"at": at})))
        passes.append(firsts)
    return passes


@pytest.mark.parametrize("columns", [4096, 5000, 12288, 100])
@pytest.mark.parametrize("async_copies", [False, True])
def test_every_second_pass_visits_the_same_columns_backwards(
    columns: int, async_copies: bool
) -> None:
    function, inputs = KINDS["layer norm + silu"]
    graph = chain_graph(Chain("", function, inputs(8, columns)))  # type: ignore[arg-type]
    plan = KernelPlan("looped", 1, (1024,), 4, async_copies=async_copies)
    schedule = replace(schedule_operators(graph, graph.operators), allow_online_variance=False)
    source = emit(plan_kernel(schedule, plan)).source
    forward, backward, last = loops_of(source)
    assert forward == list(range(0, columns, 1024)) == last
    assert backward == forward[::-1]
