"""Races between plans of one kernel, with recorded times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.fusion.patterns import PATTERNS, layer_norm

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from nostall.core.errors import BadInput
from nostall.fusion.codegen.autotune import autotuner
from nostall.fusion.codegen.autotune import candidates as race
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
)
from nostall.fusion.codegen.cost import default_plan as default_plan_module
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds, sort_key
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators, stitch
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import IllegalPlan, Plans, plans
from nostall.fusion.codegen.tiling.plan_variants import with_eager_loads, with_evict_first
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.gpu.clock import RecordedClock, Run, Samples

SLOW, FAST = [2.0, 2.02, 1.98] * 5, [1.0, 1.01, 0.99] * 5


class Script(RecordedClock):
    """Times of one comparison after the other: which of the runs is fast (none: -1)."""

    def __init__(self, *fast: int) -> None:
        super().__init__({})
        self.left = list(fast)

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        fast = self.left.pop(0)
        return [FAST if at == fast else SLOW for at in range(len(runs))]


def of(name: str = "layer norm, two chunks") -> Schedule:
    graph = PATTERNS[name]()
    return schedule_operators(graph, graph.operators)


def block(rows: int, warps: int) -> KernelPlan:
    return KernelPlan("block", rows, (1024,), warps)


def neighbour_plans(kernel: PlannedKernel) -> tuple[KernelPlan, ...]:
    return tuple(neighbour.plan for neighbour in neighbours(kernel))


LOOPED = KernelPlan("looped", 1, (1024,), 4)


def test_the_best_of_every_scheme_and_the_best_of_all_take_part() -> None:
    warp, split = KernelPlan("warp", 4, (1024,), 4), KernelPlan("split", 1, (256,), 1, 4)
    times = {LOOPED: 1.4, split: 1.6, block(1, 4): 1.2, block(1, 8): 1.0, warp: 1.3}
    assert fastest_modelled(times, 1) == (block(1, 8), warp, LOOPED)
    assert fastest_modelled(times, 2) == (block(1, 8), block(1, 4), warp, LOOPED)
    # What is hopeless does not take part, however few there are.
    assert fastest_modelled(times, 9) == (block(1, 8), block(1, 4), warp, LOOPED)
    assert fastest_modelled({LOOPED: 1.0}, 4) == (LOOPED,)


def test_plans_that_differ_in_rows_or_in_warps_alone_all_take_part() -> None:
    """One row in one warp and two rows in two were one kind to the race once."""
    alike = {block(rows, rows * 2): 1.0 + rows / 100 for rows in (1, 2, 4, 8)}
    assert fastest_modelled(alike, 3) == (block(1, 2), block(2, 4), block(4, 8))
    # Plans that the model cannot tell apart: the one with the fewest rows comes first.
    assert fastest_modelled(dict.fromkeys(reversed(alike), 1.0), 4) == tuple(alike)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_candidates_are_the_models_favourites(name: str) -> None:
    kernel = of(name)
    found = [candidate.plan for candidate in candidates(kernel, 4)]
    assert found[0] == default_plan(kernel).plan
    assert len(set(found)) == len(found)
    ranked = sorted(
        plans(kernel).legal_plans,
        key=lambda plan: sort_key(PlannedKernel(kernel, plan)),
    )
    most = MAX_SLOWDOWN * modelled_seconds(PlannedKernel(kernel, ranked[0]))
    ranked = [plan for plan in ranked if modelled_seconds(PlannedKernel(kernel, plan)) <= most]
    assert {plan.scheme for plan in found} == {plan.scheme for plan in ranked}
    assert set(ranked[:4]) <= {plan for plan in found if not plan.eager_loads} <= set(ranked)
    assert len(candidates(kernel, 1)) == len({plan.scheme for plan in found})


def test_the_first_ones_race_with_what_rows_share_read_early_too() -> None:
    some = of("layer norm")
    every = candidates(some, 8)
    held = [
        kernel
        for kernel in every
        if kernel.plan.scheme in ("warp", "block") and not kernel.plan.eager_loads
    ]
    assert every[-4:] == tuple(map(with_eager_loads, held[:4]))
    assert len([kernel for kernel in candidates(some, 5) if kernel.plan.eager_loads]) == 1
    assert not [kernel for kernel in candidates(some, 4) if kernel.plan.eager_loads]


def test_a_kernel_without_plans_has_no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Plans((), (IllegalPlan(LOOPED, "too wide"),))
    for module in (race, default_plan_module):
        monkeypatch.setattr(module, "plans", lambda schedule: none)
    with pytest.raises(BadInput, match="too wide"):
        candidates(of(), 4)


def test_a_plan_has_to_be_beyond_the_null() -> None:
    between = [1.5, 1.51, 1.49] * 5
    assert fastest_measured([SLOW, between, FAST, SLOW], "measured") == 2
    assert fastest_measured([FAST, SLOW, FAST, FAST], "measured") == 0
    # The first choice beside itself is as much faster as the other one.
    assert fastest_measured([SLOW, FAST, FAST], "measured") == 0


def test_what_many_candidates_leave_open_is_looked_at_again() -> None:
    """Ten plans of a softmax's gradient shared the time; what was 0.4 % faster was not taken."""
    noisy = [1.0, 1.02, 0.98, 1.01, 0.99] * 2
    a_little = [x / 1.004 for x in reversed(noisy)]
    assert fastest_measured([noisy, noisy, a_little, noisy], "measured") == 0
    assert most_promising([noisy, SLOW[:10], a_little, noisy]) == 2
    assert most_promising([noisy, [x / 1.0005 for x in noisy], noisy]) == 0, "not worth the time"
    assert most_promising([noisy, [x / 1.01 for x in noisy], [x / 1.02 for x in noisy]]) == 0, (
        "noise"
    )


def test_a_likely_winner_that_is_not_confirmed_does_not_run(tmp_path: Path) -> None:
    racer = Autotuner(Script(1, -1), folder=tmp_path)
    every = candidates(of(), MAX_CANDIDATES)
    assert racer.fastest_of(every) == every[0]
    (record,) = racer.records
    assert record.winner == 0 and len(record.confirmation) == 3


def test_the_winner_is_confirmed_kept_and_not_measured_again(tmp_path: Path) -> None:
    clock = Script(1, 1)
    plan = Autotuner(clock, folder=tmp_path)(of()).plan
    assert plan == candidates(of(), MAX_CANDIDATES)[1].plan
    assert clock.left == []
    later = Autotuner(Script(), folder=tmp_path)
    assert later(of()).plan == plan
    (record,) = later.records
    assert record.winner == 1
    assert record.confirmation == (tuple(SLOW), tuple(FAST), tuple(SLOW))


def test_neighbours_differ_in_one_respect_and_are_legal() -> None:
    some = of("layer norm")
    every = plans(some).legal_plans
    plan = next(p for p in every if p.scheme == "block" and p.rows == 2 and p.num_warps == 4)
    found = neighbour_plans(PlannedKernel(some, plan))
    eager = with_eager_loads(PlannedKernel(some, plan))
    assert eager is not None
    assert plan not in found and set(found) - set(every) == {eager.plan}
    same = {(p.rows, p.num_warps) for p in found if p.chunks == plan.chunks and not p.eager_loads}
    assert same == {(1, 4), (4, 4), (2, 2), (2, 8)}
    assert {(p.rows, p.num_warps) for p in found if p.chunks != plan.chunks} <= {(2, 4)}
    # Who is a neighbour's neighbour is known to it.
    assert all(plan in neighbour_plans(PlannedKernel(some, other)) for other in found)


def test_a_row_in_chunks_meets_itself_in_one_early_and_not() -> None:
    """It may be worth something only where it is early: no thread waits for a second load."""
    graph = layer_norm((64, 3000), "float16")
    some = schedule_operators(graph, graph.operators)
    near = neighbour_plans(PlannedKernel(some, KernelPlan("block", 1, (1024,) * 3, 4)))
    wides = (KernelPlan("block", 1, (4096,), warps) for warps in (16, 8))
    every = [replace(wide, eager_loads=early) for wide in wides for early in (False, True)]
    assert [plan for plan in near if 4096 in plan.chunks] == every
    twin = neighbour_plans(
        PlannedKernel(some, KernelPlan("block", 1, (1024,) * 3, 4, eager_loads=True))
    )
    assert [plan for plan in twin if 4096 in plan.chunks] == every


def test_large_outputs_meet_themselves_streamed() -> None:
    graph = layer_norm((16384, 2048), "float16")
    some = schedule_operators(graph, graph.operators)
    plan = KernelPlan("block", 1, (2048,), 4)
    streamed = with_evict_first(PlannedKernel(some, plan))
    assert streamed is not None
    assert [p for p in neighbour_plans(PlannedKernel(some, plan)) if p.evict_first] == [
        streamed.plan
    ]
    back = neighbour_plans(PlannedKernel(some, replace(plan, evict_first=True)))
    assert [p for p in back if not p.evict_first] == [plan]
    assert not [k for k in candidates(some, MAX_CANDIDATES) if k.plan.evict_first]


def test_parts_turns_and_copies_ahead_have_neighbours_too() -> None:
    graph = layer_norm((64, 12288), "float16")
    wide, sums = schedule_operators(graph, graph.operators), of("norm backward")
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


def test_a_winner_meets_its_neighbours_until_none_is_faster(tmp_path: Path) -> None:
    some = of("layer norm")
    first = candidates(some, 4)
    winner = first[1]
    near = [kernel for kernel in neighbours(winner) if kernel not in first]
    # The second candidate wins, then its last neighbour, which nobody beats.
    clock = Script(1, 1, len(near), 1, -1)
    racer = Autotuner(clock, max_candidates=4, folder=tmp_path)
    assert racer(some) == near[-1]
    heats = [record.plans for record in racer.records]
    assert heats[0] == tuple(map(str, first))
    assert heats[1] == tuple(map(str, (winner, *near)))
    assert len(heats) <= MAX_ROUNDS and heats[-1][0] == str(near[-1])
    again = Autotuner(Script(), max_candidates=4, folder=tmp_path)
    assert again(some) == near[-1]


@pytest.mark.parametrize("clock", [Script(-1), Script(1, -1)])
def test_without_a_gain_that_lasts_the_modelled_choice_runs(clock: Script, tmp_path: Path) -> None:
    racer = Autotuner(clock, folder=tmp_path)
    assert racer(of()).plan == default_plan(of()).plan
    assert racer.records[0].winner == 0
    assert clock.left == []


def test_other_kernels_and_other_gpus_are_other_races(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Script(1, 1, *[-1] * 9)
    left = [len(clock.left)]
    for kernel in (of(), of("masked softmax"), of()):
        Autotuner(clock, folder=tmp_path)(kernel)
        left.append(len(clock.left))
    assert left[0] > left[1] > left[2] == left[3]
    monkeypatch.setattr(autotuner, "_device_name", lambda: "another")
    assert Autotuner(clock, folder=tmp_path)(of()).plan == default_plan(of()).plan
    assert len(clock.left) < left[3]


def test_a_failing_race_leaves_the_modelled_choice_and_says_why(tmp_path: Path) -> None:
    racer = Autotuner(RecordedClock({"*": [SLOW]}), folder=tmp_path)
    assert racer(of()).plan == default_plan(of()).plan
    assert racer.records[0].failure is not None
    assert "no samples" in racer.records[0].failure


def test_a_damaged_record_is_measured_again(tmp_path: Path) -> None:
    Autotuner(Script(1, 1), folder=tmp_path)(of())
    (file,) = (tmp_path / "races").iterdir()
    assert TuningRecord.model_validate_json(file.read_bytes()).winner == 1
    file.write_text(file.read_text()[:40])
    assert Autotuner(Script(-1), folder=tmp_path)(of()).plan == default_plan(of()).plan


def test_a_race_is_a_choice_of_plans_and_draws_nothing(tmp_path: Path) -> None:
    graph = PATTERNS["masked softmax"]()
    state = torch.get_rng_state()
    whole = stitch(graph, choice=Autotuner(Script(1, 1), folder=tmp_path), folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    (step,) = whole.steps
    assert not isinstance(step, int)
    assert step.program.plan == candidates(of("masked softmax"), MAX_CANDIDATES)[1].plan
