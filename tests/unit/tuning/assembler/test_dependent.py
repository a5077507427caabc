"""Dependent launches of a search's result: what is tried, compared, kept and stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from nostall.core import Run
from nostall.gpu import Device, Kernel, MeasurementPlan
from nostall.ptx.assemble.versions import find_assemblers
from nostall.ptx.schedule.state import PtxState
from nostall.sass.safety.dependent_launch import check_wait
from nostall.search.orders.random_orders import RandomOrders
from nostall.store import BadBundle, Store, bundle
from nostall.tuning.assembler.job import Setup, tune_assembler
from nostall.tuning.assembler.recipes.recipe import Recipe, rebuild
from nostall.tuning.job import TuningResult
from nostall.tuning.records.store_records import import_bundle, record_dependent, rejection_reason
from nostall.tuning.settings import Settings
from tests.unit.tuning.assembler import kernel as scale
from tests.unit.tuning.assembler.kernel import TimedDevice, make_source, open_inline

SETTINGS = Settings("assembler", evaluations=20, objective="gpu", rounds=8, checks=2, pdl="wait")


class Devices:
    """Opens devices; in chains, each candidate takes ``factor`` of the original's time."""

    def __init__(self, factor: float = 0.7) -> None:
        self.factor = factor
        self.opened: list[tuple[bytes, MeasurementPlan]] = []

    @contextmanager
    def __call__(self, kernel: Kernel, plan: MeasurementPlan) -> Iterator[Device]:
        self.opened.append((kernel.cubin, plan))
        device = TimedDevice(kernel.cubin)
        device.factor = lambda cubin: self.factor  # type: ignore[method-assign]
        yield device


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    monkeypatch.setattr(scale, "PTX", scale.PTX.replace("sm_80", "sm_90"))
    installed = find_assemblers()[:1]
    if not installed:
        pytest.skip("needs ptxas")
    with open_inline(make_source(installed[0]), installed, monkeypatch) as opened:
        yield opened


def tune(setup: Setup, devices: Devices, run: Run | None = None) -> TuningResult:
    device = TimedDevice(setup.source.cubin)
    return tune_assembler(setup, RandomOrders(), SETTINGS, device, run=run, open_device=devices)


def test_a_chain_gain_is_recorded_beside_the_isolated_one(setup: Setup, tmp_path: Path) -> None:
    devices = Devices()
    with Run.create(tmp_path / "run", "test", {}) as run:
        result = tune(setup, devices, run)
    found = result.dependent
    assert result.improved and found is not None and found.improved
    assert found.mode == "wait" and "dependent launch: wait" in found.levers
    assert [cubin for cubin, _ in devices.opened] == [setup.source.cubin, result.cubin]
    assert all(plan.dependent_launch for _, plan in devices.opened)
    assert check_wait(found.cubin, "scale") == "" != check_wait(result.cubin, "scale")
    folder = tmp_path / "run"
    assert (folder / "dependent.cubin").read_bytes() == found.cubin
    recipe = Recipe.from_bytes((folder / "dependent_recipe.json").read_bytes(), "recipe")
    assert PtxState.load(recipe.state).dependent_launch == "wait"
    assert rebuild(recipe, (folder / "original.ptx").read_text()) == found.cubin
    record = json.loads((folder / "run.json").read_text())["result"]
    assert record["ratio"] == result.ratio < record["dependent_launch"]["chain"]["ratio"]


def test_a_chain_that_is_not_faster_than_the_result_is_not_kept(setup: Setup) -> None:
    found = tune(setup, Devices(1.0)).dependent
    assert found is not None and not found.improved


def test_a_stored_chain_gain_is_verified_again(setup: Setup, tmp_path: Path) -> None:
    result = tune(setup, Devices())
    store = Store(tmp_path / "home")
    row = record_dependent(store, setup.source, SETTINGS, result, {"gpu": "Fake"})
    provenance = store.provenance(row)
    assert provenance.dependent_launch and "back to back" in provenance.notes[-1]
    assert rejection_reason(store, row) is None
    # The isolated result has no wait, so it must not pass for dependent launches.
    assert result.dependent is not None
    false = replace(result, dependent=replace(result.dependent, cubin=result.cubin,
                                              recipe=result.recipe))  # fmt: skip
    wrong = record_dependent(store, setup.source, SETTINGS, false, {"gpu": "Fake"})
    assert "has no ACQBULK" in (rejection_reason(store, wrong) or "")
    bundle.write(store, [wrong], tmp_path / "b.zip")
    with pytest.raises(BadBundle, match="has no ACQBULK"):
        import_bundle(Store(tmp_path / "other"), tmp_path / "b.zip")
