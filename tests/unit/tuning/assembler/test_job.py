"""The job of the assembler search: what becomes the result, its records, and its recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nostall.core import BadInput, Run
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.ptx.schedule.state import PtxState
from nostall.sass.binary.code_hash import code_sha256
from nostall.search.orders.random_orders import RandomOrders
from nostall.tuning.assembler.candidate_log import CANDIDATES_FILE, CandidateLog, read_candidates
from nostall.tuning.assembler.job import Setup, open_setup, register_budgets, tune_assembler
from nostall.tuning.assembler.objective import AssemblerObjective
from nostall.tuning.assembler.recipes.recipe import Recipe, rebuild
from nostall.tuning.job import TuningResult
from nostall.tuning.settings import Settings
from tests.unit.tuning.assembler.kernel import LAUNCH, PTX, TimedDevice, make_source, open_inline

SETTINGS = Settings("assembler", evaluations=45, objective="gpu", rounds=8, checks=2)


@pytest.fixture(scope="module")
def installed() -> list[Assembler]:
    return find_assemblers()[:1]


@pytest.fixture
def setup(installed: list[Assembler], monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    with open_inline(make_source(installed[0]), installed, monkeypatch) as opened:
        yield opened


def tune_kernel(
    setup: Setup, device: TimedDevice | None = None, run: Run | None = None, **more: bool
) -> TuningResult:
    device = device or TimedDevice(setup.source.cubin)
    return tune_assembler(setup, RandomOrders(), SETTINGS, device, run=run, **more)


def test_a_gain_is_recorded_with_a_recipe_that_makes_it_again(setup: Setup, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "test", {}) as run:
        result = tune_kernel(setup, run=run)
    assert result.improved and result.ratio > 1 and result.verdict.safe
    folder = tmp_path / "run"
    assert (folder / "best.cubin").read_bytes() == result.cubin
    recipe = Recipe.from_bytes((folder / "recipe.json").read_bytes(), "recipe.json")
    cubin = rebuild(recipe, (folder / "original.ptx").read_text())
    assert cubin == result.cubin and recipe.code == code_sha256(cubin)
    assert recipe.ptx == hashlib.sha256(PTX.encode()).hexdigest()
    record = json.loads((folder / "run.json").read_text())["result"]
    assert record["improved"] and record["fates"]["timed"] > 3
    assert record["assembler"]["reproduces"] and "winner" in record["assembler"]
    candidates = list(read_candidates(folder / CANDIDATES_FILE))
    best = [c for c in candidates if c.get("code_sha256") == recipe.assembled_code]
    assert best[0]["state"] == recipe.state and best[0]["registers"] > 0
    assert len(best[0]["ratios"]) == 5 and min(best[0]["ratios"]) > 1
    assert json.loads((folder / "provenance.json").read_text())["gain"]["kind"] == "measured"


def test_without_a_confirmed_gain_the_original_is_the_result(setup: Setup) -> None:
    device = TimedDevice(setup.source.cubin, confirms=False)
    result = tune_kernel(setup, device)
    assert not result.improved and result.cubin == setup.source.cubin
    assert result.recipe is None and result.ratio == 1.0 and len(device.compared) == 1


def test_a_kernel_whose_candidates_all_compute_other_outputs_keeps_the_original(
    setup: Setup, tmp_path: Path
) -> None:
    device = TimedDevice(setup.source.cubin, wrong_part=1.0)
    with Run.create(tmp_path / "run", "test", {}) as run:
        result = tune_kernel(setup, device, run)
    assert not result.improved and device.compared == []
    record = json.loads((tmp_path / "run" / "run.json").read_text())["result"]
    counts = record["assembler"]["counts"]
    assert counts["wrong"] > 3 and counts["timed"] <= 2


def test_a_cubin_with_hazards_never_gets_into_the_comparison(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "nostall.tuning.assembler.objective.find_hazards"
    monkeypatch.setattr(module, lambda builder, cubin: "1 findings, first: a race")
    device = TimedDevice(setup.source.cubin)
    result = tune_kernel(setup, device)
    assert not result.improved and device.compared == []


def test_states_of_the_portfolio_take_the_place_of_unsafe_members(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    accept = AssemblerObjective.safe_states

    def refuse_members(objective: AssemblerObjective, states: list[PtxState]) -> list[PtxState]:
        checked.append(len(states))
        return accept(objective, states) if len(checked) > 1 else []

    monkeypatch.setattr(AssemblerObjective, "safe_states", refuse_members)
    result = tune_kernel(setup)
    assert len(checked) == 2 and min(checked) > 0
    assert result.recipe is not None and result.improved


def test_a_run_is_resumed_with_its_population(setup: Setup, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "test", {}) as run:
        first = tune_kernel(setup, run=run)
    with Run.open(tmp_path / "run") as run:
        more = replace(SETTINGS, evaluations=50)
        device = TimedDevice(setup.source.cubin)
        result = tune_assembler(setup, RandomOrders(), more, device, run=run, resume=True)
    assert result.search.evaluations == 50 > first.search.evaluations
    assert result.ratio >= first.ratio


def test_a_recipe_with_another_ptx_or_assembler_is_refused(
    setup: Setup, installed: list[Assembler], tmp_path: Path
) -> None:
    recipe = tune_kernel(setup).recipe
    assert isinstance(recipe, Recipe)
    with pytest.raises(BadInput, match="the PTX has sha256"):
        rebuild(recipe, PTX.replace("0f41400000", "0f41400001"))
    other = tmp_path / "ptxas"
    other.write_bytes(installed[0].path.read_bytes() + b"\0")
    other.chmod(0o755)
    with pytest.raises(BadInput, match="install the ptxas"):
        rebuild(recipe, PTX, lambda version: Assembler(other, version))
    changed = recipe.model_copy(update={"assembled_code": "0" * 64})
    with pytest.raises(BadInput, match="the assembled code"):
        rebuild(changed, PTX)
    with pytest.raises(BadInput, match="is not a recipe: kernel"):
        Recipe.from_bytes(b"{}", "x.json")


def test_a_source_without_ptx_is_refused(installed: list[Assembler]) -> None:
    source = replace(make_source(installed[0]), ptx=None)
    with pytest.raises(BadInput, match="has no PTX"), open_setup(source, installed):
        pass


def test_a_log_that_was_cut_off_is_read_up_to_the_cut(setup: Setup, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "test", {}) as run:
        tune_kernel(setup, run=run)
    path = tmp_path / "run" / CANDIDATES_FILE
    whole = list(read_candidates(path))
    log = CandidateLog(path)
    log._lines = ['{"number": 1}'] * 70
    log.flush()
    assert len(list(read_candidates(path))) == len(whole) + 70
    path.write_bytes(path.read_bytes()[:-20])
    assert len(list(read_candidates(path))) >= len(whole)


def test_register_budgets_are_below_and_above_the_original() -> None:
    assert register_budgets(168, LAUNCH) == (255, 200, 192, 184, 176, 168, 160, 152, 128)
    assert register_budgets(41, None)[-7:] == (80, 72, 64, 56, 48, 33, 25)


def test_a_block_fits_on_an_sm_with_each_register_budget() -> None:
    launch = LAUNCH.model_copy(update={"block": (1024, 1, 1)})
    assert max(register_budgets(60, launch)) == 64
