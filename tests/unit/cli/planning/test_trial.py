"""``nostall launch --try``: which plans run, and which one is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.cli.planning.trial import MAX_CANDIDATES, TURNS, WARM_UPS, candidate_files, try_plans
from nostall.core.errors import BadInput
from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.run_config import RunConfig, RunResult

STEPS = 6


def files(folder: Path, *names: str) -> tuple[Path, list[tuple[str, Path]]]:
    """A plan that lists candidates, the first one slowest by the model, and their files."""
    plan = folder / "plan.json"
    listed = [
        {"planner": name, "predicted_step_s": float(len(names) - number)}
        for number, name in enumerate(names)
    ]
    plan.write_text(json.dumps({"candidates": listed}))
    return plan, candidate_files(plan, folder)


def trial(folder: Path, seconds: dict[str, float], *names: str) -> list[str]:
    """Names in the order of the trials, with the kept one first; all steps of a plan are equal."""
    plan, candidates = files(folder, *names)
    config = RunConfig(str(plan), "m.py:build", 1, "cpu", "auto", True, 1.0)
    ran: list[str] = []

    def launch(tried: RunConfig) -> RunResult:
        assert not tried.check and tried.steps == STEPS + WARM_UPS
        ran.append(Path(tried.plan).stem)
        steady = [seconds[ran[-1]] * (1 + 0.01 * (len(ran) % 2))] * STEPS
        updates = [0.0] * (WARM_UPS + STEPS)
        return RunResult("engine", seconds=[9.0] * WARM_UPS + steady, update_seconds=updates)

    trials = try_plans(config, candidates, STEPS, launch)
    assert ran == ["plan", *(name for name, _ in candidates), "plan"] * TURNS
    assert [len(own.seconds) for own in trials] == [STEPS * TURNS] * len(trials)
    return [own.name for own in trials]


def test_a_faster_candidate_is_kept(tmp_path: Path) -> None:
    times = {"plan": 1.0, "ddp": 0.5, "fsdp2": 0.8}
    assert trial(tmp_path, times, "fsdp2", "ddp") == ["ddp", "fsdp2", "the plan"]


def test_a_candidate_within_the_noise_is_not_kept(tmp_path: Path) -> None:
    times = {"plan": 1.0, "ddp": 1.0, "fsdp2": 2.0}
    assert trial(tmp_path, times, "fsdp2", "ddp") == ["the plan", "ddp", "fsdp2"]


def test_a_candidate_that_is_refused_is_left_out_and_a_refused_plan_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, candidates = files(tmp_path, "ddp", "tp")
    config = RunConfig(str(plan), "m.py:build", 1, "cpu", "auto", True, 1.0)
    ran: list[str] = []

    def launch(tried: RunConfig, refused: str = "tp") -> RunResult:
        ran.append(Path(tried.plan).stem)
        if ran[-1] == refused:
            raise BadPlan("tensor parallelism changes what the module computes")
        times = [1.0] * (STEPS + WARM_UPS)
        return RunResult("engine", seconds=times, update_seconds=times)

    trials = try_plans(config, candidates, STEPS, launch)
    assert [own.name for own in trials] == ["the plan", "ddp"]
    assert ran == ["plan", "tp", "ddp", "plan", *["plan", "ddp", "plan"] * (TURNS - 1)]
    said = " ".join(capsys.readouterr().err.split())
    assert "leaves tp out: tensor parallelism changes what the module computes" in said
    with pytest.raises(BadPlan, match="changes what the module computes"):
        try_plans(config, candidates, STEPS, lambda tried: launch(tried, "plan"))


def test_the_fastest_by_the_model_are_tried(tmp_path: Path) -> None:
    _, found = files(tmp_path, "a", "b", "c", "d")
    assert [name for name, _ in found] == ["d", "c", "b"] and len(found) == MAX_CANDIDATES


def test_a_plan_without_candidates_is_refused(tmp_path: Path) -> None:
    for text in ("{}", '{"candidates": []}', "no json"):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(BadInput, match="lists no candidates to try; leave --try out"):
            candidate_files(tmp_path / "plan.json", tmp_path)
