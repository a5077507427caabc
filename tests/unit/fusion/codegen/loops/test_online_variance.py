"""Online variance: one loop for the mean and the sum of squared differences from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.cost.default_plan import loop_row_reads
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.online_reductions import online_variances
from nostall.fusion.codegen.loops.reduction_levels import passes
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.interpreted.online_rows import reduce_row
from tests.unit.fusion.codegen.interpreted.variance_rows import (
    LOOPED_DAMAGES,
    SPLIT_DAMAGES,
    layer_norm,
    norm_of_softmax,
    two_norms,
)
from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytest.importorskip("triton")
pytest.importorskip("torch")

WIDE = (64, 151936)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kernels")
    return run_interpreted("tests.unit.fusion.codegen.interpreted.variance_rows", folder, 1)


@pytest.mark.slow
def test_variances_are_right_in_rows_with_infinities_and_nan(interpreted: Any) -> None:
    assert interpreted["wrong"] == []


@pytest.mark.slow
def test_rows_far_from_zero_keep_their_variance(interpreted: Any) -> None:
    looped, split, sums_of_squares = interpreted["far from zero"]
    assert looped < 1e-3 and split < 1e-3
    assert sums_of_squares > 1


@pytest.mark.slow
def test_damaged_kernels_give_wrong_results(interpreted: Any) -> None:
    assert interpreted["damaged"].keys() == {*LOOPED_DAMAGES, *SPLIT_DAMAGES}
    assert [name for name, wrong in interpreted["damaged"].items() if not wrong] == []


def _schedule(graph: Graph) -> Schedule:
    return schedule_operators(graph, graph.operators)


def _column_loops(schedule: Schedule) -> int:
    return sum(column_pass.has_columns for column_pass in passes(schedule))


@pytest.mark.parametrize(("make", "loops"), [(layer_norm, 2), (two_norms, 3), (norm_of_softmax, 3)])
def test_a_variance_takes_one_loop(make: Any, loops: int) -> None:
    schedule = _schedule(make(WIDE))
    assert online_variances(schedule)
    assert _column_loops(schedule) == loop_row_reads(schedule) == loops
    two_loops = replace(schedule, allow_online_variance=False)
    assert _column_loops(two_loops) == loops + len(online_variances(schedule))


def test_another_mean_takes_two_loops() -> None:
    build = Builder()
    x = build.input(WIDE, "float32")
    half = build("mul", reduce_row(build, "sum", x), build.constant(0.5 / WIDE[1]))
    squares = reduce_row(build, "sum", build("square", build("sub", x, half)))
    assert not online_variances(_schedule(build.graph(squares)))


def test_the_mean_of_another_value_takes_two_loops() -> None:
    build = Builder()
    x, y = build.input(WIDE, "float32"), build.input(WIDE, "float32")
    mean = build("mul", reduce_row(build, "sum", y), build.constant(1 / WIDE[1]))
    squares = reduce_row(build, "sum", build("square", build("sub", x, mean)))
    assert not online_variances(_schedule(build.graph(squares)))
