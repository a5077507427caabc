"""``nostall regress``: exit codes, text, JSON, and clear errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from nostall.cli.terminal.console import Format
from nostall.cli.tuning.regress import regress
from nostall.core import BadInput
from nostall.core.errors import MissingPart
from nostall.gpu import Kernel, MeasurementPlan
from nostall.ptx.assemble.versions import find_assemblers, version_numbers
from nostall.search.orders.random_orders import RandomOrders
from nostall.store import Store
from nostall.tuning.assembler.job import tune_assembler
from nostall.tuning.assembler.recipes.recipe import Recipe
from nostall.tuning.records.store_records import record_result
from nostall.tuning.regress import recover
from nostall.tuning.settings import Settings
from tests.unit.tuning.assembler.kernel import (
    InlineWorkers,
    TimedDevice,
    make_source,
    open_inline,
    run_inline,
)
from tests.unit.tuning.regress.pressure import LIMITED, PTX, assemble

NEWEST = max(find_assemblers(), key=lambda a: version_numbers(a.version))
NVCC = Path(__file__).resolve().parents[4] / "examples" / "nvcc"
LAUNCH_TOML = """\
grid = [4, 1, 1]
block = [128, 1, 1]
[[args]]
name = "x"
dtype = "f32"
shape = [262144]
[[args]]
name = "y"
dtype = "f32"
shape = [262144]
role = "out"
"""
CUBIN = str(NVCC / "transpose.sm_90.cubin")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose compiler makes it spill, and its older binary."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(recover, "BuildPool", InlineWorkers)
    Path("k.ptx").write_text(PTX)
    Path("old.cubin").write_bytes(assemble(NEWEST))


def run(**options: Any) -> int:
    """The exit code of the command."""
    try:
        regress(**{"ptxas_options": LIMITED, "ptxas": NEWEST.version, "evaluations": 6, **options})
    except typer.Exit as error:
        return int(error.exit_code)
    return 0


def test_a_loss_is_found_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(target="k.ptx", baseline="old.cubin", out_dir=Path("out")) == 1
    text = capsys.readouterr().out
    first = text.splitlines()[0]
    assert re.match(
        rf"pressure: .*{NEWEST.version}.* lost: local memory accesses 0 → [1-9]\d*", first
    ), first
    assert re.search(
        r"; recovered by another input of the same ptxas: local memory accesses \d+", first
    ), first
    assert first.endswith(" (not measured)")
    for label in (
        "registers",
        "cause:",
        "searched:",
        "changed:",
        "recovered: 100%",
        "not measured",
    ):
        assert label in text
    recipe = Recipe.from_bytes(Path("out/recipe.json").read_bytes(), "recipe")
    assert recipe.kernel == "pressure" and Path("out/best.ptx").read_text() != PTX
    assert Path("out/best.cubin").read_bytes()[:4] == b"\x7fELF"


def test_a_comparison_alone_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(target="k.ptx", baseline="old.cubin", search=False, format=Format.JSON) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["answer"] == "not searched" and document["search"] is None
    assert document["losses"][0]["name"] == "local memory accesses" and document["causes"]


def test_the_same_compiler_lost_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(target="k.ptx", baseline=NEWEST.version) == 0
    assert capsys.readouterr().out == "pressure: the same machine code\n"
    assert run(target=CUBIN, baseline=CUBIN, ptxas=None, ptxas_options="") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "k.ptx", "baseline": "missing.cubin"}, "cannot read missing.cubin"),
        ({"target": "k.ptx", "baseline": CUBIN}, "is for sm_90, and k.ptx for sm_80"),
        ({"target": "k.ptx", "baseline": "store"}, "has no record of 'pressure' for sm_80"),
        ({"target": "k.ptx", "objective": "model"}, "--objective is 'model'; give static or gpu"),
        ({"target": "k.ptx", "seed": -1}, "--seed is -1"),
        ({"target": "k.ptx", "evaluations": 0}, "--evaluations is 0"),
        ({"target": "k.ptx", "objective": "gpu", "out_dir": Path("o")}, "--out is for the static"),
        ({"target": "k.ptx", "baseline": "old.cubin", "objective": "gpu"}, "needs the launch"),
        ({"target": CUBIN, "baseline": NEWEST.version}, "has no PTX to assemble with ptxas"),
        ({"baseline": "13.2"}, "--baseline 13.2 is for one kernel"),
        ({"out_dir": Path("o")}, "--out is for one kernel"),
        ({}, "the store has no kernel to compare"),
    ],
)
def test_bad_input_ends_with_a_remedy(options: dict[str, Any], message: str) -> None:
    is_cubin = options.get("target") == CUBIN
    given = {"ptxas": None, "ptxas_options": ""} if is_cubin else {}
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        run(**given, **options)


def test_a_version_that_is_not_installed() -> None:
    with pytest.raises(MissingPart, match=r"no ptxas 1\.2 is installed; .*path of a ptxas"):
        run(target="k.ptx", baseline="1.2")


def test_all_kernels_of_the_store_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_source(NEWEST)
    settings = Settings("assembler", evaluations=30, objective="gpu", rounds=8, checks=2)
    with open_inline(source, [NEWEST], monkeypatch) as setup:
        result = tune_assembler(setup, RandomOrders(), settings, TimedDevice(source.cubin))
    record_result(Store(), source, settings, result, {"gpu": "Fake"})
    assert run(ptxas_options="", format=Format.JSON) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert document["kernel"] == "scale" and document["answer"] == "same code"
    assert document["older"]["label"].endswith("as compiled")
    Path("scale.ptx").write_text(source.ptx or "")
    assert run(target="scale.ptx", ptxas_options="") == 0
    assert "scale: the same machine code" in capsys.readouterr().out


def test_measured_times_are_shown_beside_static_losses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older = Path("old.cubin").read_bytes()

    class Device(TimedDevice):
        def factor(self, cubin: bytes) -> float:
            return 0.8 if cubin == older else 1.0

    @contextmanager
    def open_fake(kernel: Kernel, plan: MeasurementPlan) -> Iterator[Device]:
        yield Device(kernel.cubin)

    monkeypatch.setattr("nostall.gpu.LocalGpu", open_fake)
    run_inline(monkeypatch)
    Path("k.toml").write_text(LAUNCH_TOML)
    options = {"launch": Path("k.toml"), "objective": "gpu", "target": "k.ptx"}
    assert run(baseline="old.cubin", **options) == 1
    text = capsys.readouterr().out
    assert "pressure: static loss (local memory accesses 0 → " in text
    assert "measured:  time newer / older 1.2500 [1.2500, 1.2500]; recovered 0% of the loss" in text
    assert run(baseline=NEWEST.version, format=Format.JSON, **options) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["recovered"] is None
