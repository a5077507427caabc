"""``nostall tune`` of a kernel with PTX: the assembler search from the command to the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from nostall.cli import tune as command
from nostall.cli.report import report
from nostall.cli.verify import verify
from nostall.core import BadInput, Search
from nostall.ptx.assemble.versions import find_assemblers
from nostall.search.evolution.evolve import Evolve
from nostall.tuning.assembler import job, objective
from nostall.tuning.source import Source
from tests.unit.tuning.assembler.kernel import (
    LAUNCH,
    PTX,
    InlineWorkers,
    TimedDevice,
)

LAUNCH_TOML = """\
grid = [4, 1, 1]
block = [128, 1, 1]
[[args]]
name = "x"
dtype = "f32"
shape = [1024]
role = "inout"
"""


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the command on a ``.ptx`` file with a GPU whose times are given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    Path("k.ptx").write_text(PTX)
    Path("k.toml").write_text(LAUNCH_TOML)
    first = find_assemblers()[:1]
    monkeypatch.setattr("nostall.tuning.ptx_source.find_assemblers", lambda: first)
    monkeypatch.setattr(job, "find_assemblers", lambda: first)
    monkeypatch.setattr(job, "BuildPool", InlineWorkers)
    monkeypatch.setattr(objective, "find_hazards", lambda builder, cubin: "")

    @contextmanager
    def open_fake(source: Source, *_: Any) -> Iterator[tuple[Search, TimedDevice]]:
        assert source.launch == LAUNCH
        yield Evolve(), TimedDevice(source.cubin)

    monkeypatch.setattr(command, "open_search", open_fake)

    def run(**options: Any) -> Path:
        given = {"target": "k.ptx", "launch": Path("k.toml"), "objective": "gpu", "checks": 2}
        command.tune(**{**given, "evaluations": 45, "out_dir": Path("run"), **options})
        return Path("run")

    return run


def test_ptx_is_tuned_by_its_default_strategy_and_resumed(
    tune: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tune()
    text = capsys.readouterr().out
    assert "assembler, seed 0" in text and "measured gain: 1.0" in text
    for label in ("changed:", "before:", "after:", "searched:", "GPU idle:"):
        assert label in text
    assert "next:     nostall verify run" in text
    verify(folder)
    assert "safe: PTX proved equal; the same machine code" in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    assert "Lineage" in page and "Resources" in page and "measured" in page
    command.tune(resume=folder, evaluations=50)
    record = json.loads((folder / "run.json").read_text())
    assert record["result"]["evaluations"] == 50 and record["settings"]["strategy"] == "assembler"
    report(folder)


def test_the_result_as_json_has_the_winner_and_its_lineage(
    tune: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tune(format=command.Format.JSON)
    result = json.loads(capsys.readouterr().out)
    winner = result["assembler"]["winner"]
    assert winner["levers"] and winner["registers"] > 0 and winner["blocks_per_sm"] > 0
    assert winner["lineage"][-1]["state"] and result["assembler"]["original"]["spill_bytes"] == 0


def test_a_changed_cubin_or_recipe_is_not_verified(
    tune: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tune()
    (folder / "best.cubin").write_bytes((folder / "original.cubin").read_bytes())
    with pytest.raises(typer.Exit):
        verify(folder)
    assert "UNSAFE: the cubin's machine code is not that of the recipe" in capsys.readouterr().out
    (folder / "recipe.json").unlink()
    with pytest.raises(BadInput, match=r"has no recipe\.json"):
        verify(folder)


def test_options_of_ptxas_belong_to_ptx(tune: Callable[..., Path]) -> None:
    with pytest.raises(BadInput, match="--ptxas-options is for"):
        tune(target="k.cubin", ptxas_options="-O1")
    with pytest.raises(BadInput, match="has no model"):
        tune(strategy="assembler", objective="model")
    assert not Path("run").exists()
