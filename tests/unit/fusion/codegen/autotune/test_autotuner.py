"""Tests of the autotuner of plans, with recorded times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.fusion.pattern_tables import PATTERNS
from tests.unit.fusion.patterns import layer_norm

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from nostall.core.errors import BadInput
from nostall.fusion.codegen.autotune import autotuner
from nostall.fusion.codegen.autotune import candidates as candidates_module
from nostall.fusion.codegen.autotune.autotuner import (
    MAX_CANDIDATES,
    MAX_ROUNDS,
    Autotuner,
    TuningRecord,
)
from nostall.fusion.codegen.autotune.candidates import (
    MAX_SLOWDOWN,
    candidates,
    fastest_measured,
    fastest_modelled,
    most_promising,
    neighbours,
    with_eager_loads,
    with_evict_first,
)
from nostall.fusion.codegen.cost import default_plan as default_plan_module
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds, sort_key
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import stitch
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import IllegalPlan, Plans, plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.gpu.clock import RecordedClock, Run, Samples

SLOW, FAST = [2.0, 2.02, 1.98] * 5, [1.0, 1.01, 0.99] * 5


class ScriptedClock(RecordedClock):
    """A clock that replays comparisons; each number says which run is fast (-1: none)."""

    def __init__(self, *fast: int) -> None:
        super().__init__({})
        self.remaining = list(fast)

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        fast = self.remaining.pop(0)
        return [FAST if at == fast else SLOW for at in range(len(runs))]


def pattern_schedule(name: str = "layer norm, two chunks") -> Schedule:
    graph = PATTERNS[name]()
    return schedule_operators(graph, graph.operators)


def block(rows: int, warps: int) -> KernelPlan:
    return KernelPlan("block", rows, (1024,), warps)


def neighbour_plans(kernel: PlannedKernel) -> tuple[KernelPlan, ...]:
    return tuple(neighbour.plan for neighbour in neighbours(kernel))


LOOPED = KernelPlan("looped", 1, (1024,), 4)


def test_candidates_are_the_fastest_of_each_scheme_and_of_all() -> None:
    warp, split = KernelPlan("warp", 4, (1024,), 4), KernelPlan("split", 1, (256,), 1, 4)
    times = {LOOPED: 1.4, split: 1.6, block(1, 4): 1.2, block(1, 8): 1.0, warp: 1.3}
    assert fastest_modelled(times, 1) == (block(1, 8), warp, LOOPED)
    assert fastest_modelled(times, 2) == (block(1, 8), block(1, 4), warp, LOOPED)
    # Plans that are much slower than the fastest are no candidates, however few there are.
    assert fastest_modelled(times, 9) == (block(1, 8), block(1, 4), warp, LOOPED)
    assert fastest_modelled({LOOPED: 1.0}, 4) == (LOOPED,)


def test_plans_with_other_rows_and_warps_are_separate_candidates() -> None:
    """Plans with the same number of rows for each warp are different plans."""
    alike = {block(rows, rows * 2): 1.0 + rows / 100 for rows in (1, 2, 4, 8)}
    assert fastest_modelled(alike, 3) == (block(1, 2), block(2, 4), block(4, 8))
    # Among plans of equal modelled time, the plan with the fewest rows comes first.
    assert fastest_modelled(dict.fromkeys(reversed(alike), 1.0), 4) == tuple(alike)


@pytest.mark.parametrize("name", PATTERNS)
def test_candidates_are_the_fastest_modelled_plans(name: str) -> None:
    schedule = pattern_schedule(name)
    chosen = [candidate.plan for candidate in candidates(schedule, 4)]
    assert chosen[0] == default_plan(schedule).plan
    assert len(set(chosen)) == len(chosen)
    ranked = sorted(
        plans(schedule).legal_plans,
        key=lambda plan: sort_key(PlannedKernel(schedule, plan)),
    )
    most = MAX_SLOWDOWN * modelled_seconds(PlannedKernel(schedule, ranked[0]))
    ranked = [plan for plan in ranked if modelled_seconds(PlannedKernel(schedule, plan)) <= most]
    assert {plan.scheme for plan in chosen} == {plan.scheme for plan in ranked}
    assert set(ranked[:4]) <= {plan for plan in chosen if not plan.eager_loads} <= set(ranked)
    assert len(candidates(schedule, 1)) == len({plan.scheme for plan in chosen})


def test_the_first_candidates_include_eager_loads() -> None:
    schedule = pattern_schedule("layer norm")
    kernels = candidates(schedule, 8)
    in_registers = [
        kernel
        for kernel in kernels
        if kernel.plan.scheme in ("warp", "block") and not kernel.plan.eager_loads
    ]
    assert kernels[-4:] == tuple(map(with_eager_loads, in_registers[:4]))
    assert len([kernel for kernel in candidates(schedule, 5) if kernel.plan.eager_loads]) == 1
    assert not [kernel for kernel in candidates(schedule, 4) if kernel.plan.eager_loads]


def test_kernels_without_legal_plans_have_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Plans((), (IllegalPlan(LOOPED, "too wide"),))
    default_plan_module.default_plan.cache_clear()
    for module in (candidates_module, default_plan_module):
        monkeypatch.setattr(module, "plans", lambda schedule: none)
    with pytest.raises(BadInput, match="too wide"):
        candidates(pattern_schedule(), 4)


def test_a_winner_must_exceed_the_null_distribution() -> None:
    between = [1.5, 1.51, 1.49] * 5
    assert fastest_measured([SLOW, between, FAST, SLOW], "measured") == 2
    assert fastest_measured([FAST, SLOW, FAST, FAST], "measured") == 0
    # The default plan, measured a second time, is as much faster as the candidate.
    assert fastest_measured([SLOW, FAST, FAST], "measured") == 0


def test_the_most_promising_candidate_is_selected_for_confirmation() -> None:
    """With many candidates each has few samples, and a gain of 0.4 % needs a confirmation."""
    noisy = [1.0, 1.02, 0.98, 1.01, 0.99] * 2
    a_little = [x / 1.004 for x in reversed(noisy)]
    assert fastest_measured([noisy, noisy, a_little, noisy], "measured") == 0
    assert most_promising([noisy, SLOW[:10], a_little, noisy]) == 2
    assert most_promising([noisy, [x / 1.0005 for x in noisy], noisy]) == 0, "not worth the time"
    assert most_promising([noisy, [x / 1.01 for x in noisy], [x / 1.02 for x in noisy]]) == 0, (
        "noise"
    )


def test_an_unconfirmed_winner_is_not_chosen(tmp_path: Path) -> None:
    tuner = Autotuner(ScriptedClock(1, -1), folder=tmp_path)
    kernels = candidates(pattern_schedule(), MAX_CANDIDATES)
    assert tuner.fastest_of(kernels) == kernels[0]
    (record,) = tuner.records
    assert record.winner == 0 and len(record.confirmation) == 3


def test_a_confirmed_winner_is_stored_and_not_measured_again(tmp_path: Path) -> None:
    clock = ScriptedClock(1, 1)
    plan = Autotuner(clock, folder=tmp_path)(pattern_schedule()).plan
    assert plan == candidates(pattern_schedule(), MAX_CANDIDATES)[1].plan
    assert clock.remaining == []
    later = Autotuner(ScriptedClock(), folder=tmp_path)
    assert later(pattern_schedule()).plan == plan
    record, *of_neighbours = later.records
    assert record.winner == 1 and all(each.winner == 0 for each in of_neighbours)
    assert record.confirmation == (tuple(SLOW), tuple(FAST), tuple(SLOW))


def test_neighbours_are_legal_and_differ_in_one_respect() -> None:
    schedule = pattern_schedule("layer norm")
    legal_plans = plans(schedule).legal_plans
    plan = next(p for p in legal_plans if p.scheme == "block" and p.rows == 2 and p.num_warps == 4)
    neighbouring = neighbour_plans(PlannedKernel(schedule, plan))
    eager = with_eager_loads(PlannedKernel(schedule, plan))
    assert eager is not None
    assert plan not in neighbouring and set(neighbouring) - set(legal_plans) == {eager.plan}
    same = {
        (p.rows, p.num_warps) for p in neighbouring if p.chunks == plan.chunks and not p.eager_loads
    }
    assert same == {(1, 4), (4, 4), (2, 2), (2, 8)}
    assert {(p.rows, p.num_warps) for p in neighbouring if p.chunks != plan.chunks} <= {(2, 4)}
    # The relation is symmetric.
    assert all(plan in neighbour_plans(PlannedKernel(schedule, other)) for other in neighbouring)


def test_single_chunk_plans_are_neighbours_with_and_without_eager_loads() -> None:
    """A single chunk may only pay off together with eager loads."""
    graph = layer_norm((64, 3000), "float16")
    schedule = schedule_operators(graph, graph.operators)
    near = neighbour_plans(PlannedKernel(schedule, KernelPlan("block", 1, (1024,) * 3, 4)))
    single_chunks = (KernelPlan("block", 1, (4096,), warps) for warps in (16, 8))
    expected = [
        replace(wide, eager_loads=eager) for wide in single_chunks for eager in (False, True)
    ]
    assert [plan for plan in near if 4096 in plan.chunks] == expected
    of_eager_plan = neighbour_plans(
        PlannedKernel(schedule, KernelPlan("block", 1, (1024,) * 3, 4, eager_loads=True))
    )
    assert [plan for plan in of_eager_plan if 4096 in plan.chunks] == expected


def test_evict_first_plans_are_neighbours_for_large_outputs() -> None:
    graph = layer_norm((16384, 2048), "float16")
    schedule = schedule_operators(graph, graph.operators)
    plan = KernelPlan("block", 1, (2048,), 4)
    streamed = with_evict_first(PlannedKernel(schedule, plan))
    assert streamed is not None
    assert [p for p in neighbour_plans(PlannedKernel(schedule, plan)) if p.evict_first] == [
        streamed.plan
    ]
    back = neighbour_plans(PlannedKernel(schedule, replace(plan, evict_first=True)))
    assert [p for p in back if not p.evict_first] == [plan]
    assert not [k for k in candidates(schedule, MAX_CANDIDATES) if k.plan.evict_first]


def test_neighbours_of_splits_async_copies_and_row_reductions() -> None:
    graph = layer_norm((64, 12288), "float16")
    wide, sums = schedule_operators(graph, graph.operators), pattern_schedule("norm backward")
    long = layer_norm((8, 65536), "float16")
    rows = schedule_operators(long, long.operators)
    (split,) = [p for p in plans(rows).legal_plans if str(p) == "split 1x1024, 4 warps, 16 parts"]
    assert {p.splits for p in neighbour_plans(PlannedKernel(rows, split))} == {4, 16, 64}
    (shared,) = [p for p in plans(wide).legal_plans if str(p) == "shared 1x2048, 8 warps"]
    near = set(map(str, neighbour_plans(PlannedKernel(wide, shared))))
    assert {"shared 1x2048, 8 warps, copied ahead", "shared 1x2048, 4 warps"} <= near
    assert not any("demoted" in plan or "split" in plan for plan in near)
    for plan in plans(sums).legal_plans:
        assert all(other.scheme == "column" for other in neighbour_plans(PlannedKernel(sums, plan)))


def test_tuning_continues_with_neighbours_until_none_is_faster(tmp_path: Path) -> None:
    schedule = pattern_schedule("layer norm")
    first = candidates(schedule, 4)
    winner = first[1]
    near = [kernel for kernel in neighbours(winner) if kernel not in first]
    # The second candidate wins, then its last neighbour, which no other plan beats.
    clock = ScriptedClock(1, 1, len(near), 1, -1)
    tuner = Autotuner(clock, max_candidates=4, folder=tmp_path)
    assert tuner(schedule) == near[-1]
    rounds = [record.plans for record in tuner.records]
    assert rounds[0] == tuple(map(str, first))
    assert rounds[1] == tuple(map(str, (winner, *near)))
    assert len(rounds) <= MAX_ROUNDS and rounds[-1][0] == str(near[-1])
    again = Autotuner(ScriptedClock(), max_candidates=4, folder=tmp_path)
    assert again(schedule) == near[-1]


@pytest.mark.parametrize("clock", [ScriptedClock(-1), ScriptedClock(1, -1)])
def test_the_default_plan_runs_without_a_confirmed_gain(
    clock: ScriptedClock, tmp_path: Path
) -> None:
    tuner = Autotuner(clock, folder=tmp_path)
    assert tuner(pattern_schedule()).plan == default_plan(pattern_schedule()).plan
    assert tuner.records[0].winner == 0
    assert clock.remaining == []


def test_records_are_separate_for_kernels_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ScriptedClock(1, 1, *[-1] * 9)
    left = [len(clock.remaining)]
    for schedule in (pattern_schedule(), pattern_schedule("masked softmax"), pattern_schedule()):
        Autotuner(clock, folder=tmp_path)(schedule)
        left.append(len(clock.remaining))
    assert left[0] > left[1] > left[2] == left[3]
    monkeypatch.setattr(autotuner, "_device_name", lambda: "another")
    assert (
        Autotuner(clock, folder=tmp_path)(pattern_schedule()).plan
        == default_plan(pattern_schedule()).plan
    )
    assert len(clock.remaining) < left[3]


def test_failed_tuning_keeps_the_default_plan_and_records_the_reason(tmp_path: Path) -> None:
    tuner = Autotuner(RecordedClock({"*": [SLOW]}), folder=tmp_path)
    assert tuner(pattern_schedule()).plan == default_plan(pattern_schedule()).plan
    assert tuner.records[0].failure is not None
    assert "no samples" in tuner.records[0].failure


def test_a_damaged_record_is_measured_again(tmp_path: Path) -> None:
    Autotuner(ScriptedClock(1, 1), folder=tmp_path)(pattern_schedule())
    files = (tmp_path / "races").iterdir()
    records = {file: TuningRecord.model_validate_json(file.read_bytes()) for file in files}
    (file,) = (file for file, record in records.items() if record.winner == 1)
    file.write_text(file.read_text()[:40])
    assert (
        Autotuner(ScriptedClock(-1), folder=tmp_path)(pattern_schedule()).plan
        == default_plan(pattern_schedule()).plan
    )


def test_tuning_chooses_plans_for_stitching_and_uses_no_random_numbers(tmp_path: Path) -> None:
    graph = PATTERNS["masked softmax"]()
    state = torch.get_rng_state()
    stitched = stitch(
        graph, choice=Autotuner(ScriptedClock(1, 1), folder=tmp_path), folder=tmp_path
    )
    assert torch.equal(torch.get_rng_state(), state)
    (step,) = stitched.steps
    assert not isinstance(step, int)
    assert (
        step.program.plan == candidates(pattern_schedule("masked softmax"), MAX_CANDIDATES)[1].plan
    )
