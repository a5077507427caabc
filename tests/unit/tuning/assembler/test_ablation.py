"""Ablation of an assembler result: the loss of each change is that of the state without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nostall.core import Run
from nostall.ptx.assemble.versions import find_assemblers
from nostall.report.tune.page import write_report
from nostall.search.orders.random_orders import RandomOrders
from nostall.tuning.assembler.ablation import MAX_PAIRS, ablate
from nostall.tuning.assembler.job import tune_assembler
from nostall.tuning.assembler.objective import AssemblerObjective
from nostall.tuning.settings import Settings
from tests.unit.tuning.assembler.kernel import TimedDevice, make_source, open_inline


def test_the_loss_of_each_change_is_that_of_the_state_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = find_assemblers()[:1]
    source = make_source(installed[0])
    with open_inline(source, installed, monkeypatch) as setup:
        space = setup.space
        device = TimedDevice(source.cubin)
        objective = AssemblerObjective(setup.pool, device)
        order = space.reorder(space.start(), np.random.default_rng(3), 8.0)
        best = replace(order, max_registers=24)
        found = ablate(space, objective, best)
        assert found is not None and found.noise_percent == 0.0
        block, setting = sorted(found.effects, key=lambda e: e.block is None)
        assert setting.change == "at most 24 registers" and setting.block is None
        assert block.change.startswith("order of block 0, ") and block.block == 0

        def factor(state: object) -> float:
            return device.factor(objective.candidate(state).cubin)  # type: ignore[arg-type]

        time = factor(best)
        for effect, undone in ((setting, order), (block, replace(space.start(), max_registers=24))):
            expected = 100 * (factor(undone) - time) / time
            assert effect.loss_percent == pytest.approx(expected, abs=1e-6)
        inversions = sum(a > b for a, b in zip(best.orders[0], best.orders[0][1:], strict=False))
        assert 0 < found.num_pairs <= inversions
        assert len(found.pairs) == min(MAX_PAIRS, found.num_pairs)
        losses = [pair.loss_percent for pair in found.pairs]
        assert losses == sorted(losses, key=lambda loss: -(loss or 0.0))
        assert all(" before " in pair.change and pair.block == 0 for pair in found.pairs)


def test_without_a_time_of_the_result_there_is_no_ablation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = find_assemblers()[:1]
    source = make_source(installed[0])
    with open_inline(source, installed, monkeypatch) as setup:
        objective = AssemblerObjective(setup.pool, TimedDevice(source.cubin, wrong_part=1.0))
        best = setup.space.reorder(setup.space.start(), np.random.default_rng(3), 8.0)
        assert ablate(setup.space, objective, best) is None


def test_the_ablation_of_a_run_is_on_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = find_assemblers()[:1]
    source = make_source(installed[0])
    settings = Settings("assembler", evaluations=30, objective="gpu", rounds=8, checks=2)
    with (
        open_inline(source, installed, monkeypatch) as setup,
        Run.create(tmp_path / "run", "test", {"strategy": "assembler"}) as run,
    ):
        tune_assembler(setup, RandomOrders(), settings, TimedDevice(source.cubin), run=run)
    record = json.loads((tmp_path / "run" / "run.json").read_text())["result"]
    ablation = record["assembler"]["ablation"]
    assert ablation["effects"]
    page = write_report(tmp_path / "run").read_text()
    assert "What each change is worth" in page
    assert all(row["change"].split()[0] in page for row in ablation["effects"])
