"""``nostall tune`` of a kernel with PTX: the assembler search from the command to the report."""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import typer

from nostall.cli.report import report
from nostall.cli.terminal.console import Format
from nostall.cli.tuning import tune as command
from nostall.cli.verify import verify
from nostall.core import BadInput, BadRun, LaunchSpec, Search
from nostall.gpu import Kernel, MeasurementPlan
from nostall.ptx.assemble.versions import find_assemblers
from nostall.report.units import Scale
from nostall.search.orders.random_orders import RandomOrders
from nostall.store import Store
from nostall.tuning.assembler import job, objective, shortlist
from nostall.tuning.assembler.recipes import reverify
from nostall.tuning.assembler.recipes.recording import Recording
from nostall.tuning.sources.source import Source
from tests.unit.tuning.assembler.kernel import LAUNCH, PTX, InlineWorkers, TimedDevice

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
    monkeypatch.setattr("nostall.tuning.sources.ptx_source.find_assemblers", lambda: first)
    monkeypatch.setattr(job, "find_assemblers", lambda: first)
    monkeypatch.setattr(job, "BuildPool", InlineWorkers)
    for module in (objective, shortlist):
        monkeypatch.setattr(module, "find_hazards", lambda builder, cubin: "")

    @contextmanager
    def open_fake(source: Source, *_: Any) -> Iterator[tuple[Search, TimedDevice]]:
        assert source.launch == LAUNCH
        yield RandomOrders(), TimedDevice(source.cubin)

    monkeypatch.setattr(command, "open_search", open_fake)

    def run(**options: Any) -> Path:
        given = {"target": "k.ptx", "launch": Path("k.toml"), "objective": "gpu", "checks": 2}
        command.tune(**{**given, "evaluations": 45, "out_dir": Path("run"), **options})
        return Path("run")

    return run


_recording: list[bytes] = []
"""The recording of one measured search, which several tests replay."""


@pytest.fixture
def recorded(tune: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Path:
    """A recording file of the kernel."""
    path = Path("k.json")
    if not _recording:
        tune(out_dir=Path("measured"), record=path)
        _recording.append(path.read_bytes())
        capsys.readouterr()
    path.write_bytes(_recording[0])
    return path


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
    assert (
        "How the search came to the result" in page and "Resources" in page and "measured" in page
    )
    before = json.loads((folder / "run.json").read_text())["result"]["evaluations"]
    command.tune(resume=folder, evaluations=5)  # five more
    record = json.loads((folder / "run.json").read_text())
    assert (
        record["result"]["evaluations"] == before + 5
        and record["settings"]["strategy"] == "assembler"
    )
    report(folder)


def test_a_run_of_the_evolution_is_not_resumed_by_random_orders(tune: Callable[..., Path]) -> None:
    folder = tune()
    saved = json.loads((folder / "checkpoint.json").read_text())
    assert saved["strategy"] == "random orders"
    (folder / "checkpoint.json").write_text(json.dumps(saved | {"strategy": "evolve"}))
    result = json.loads((folder / "run.json").read_text())["result"]
    with pytest.raises(BadRun, match=r"of strategy 'evolve' .* this search is 'random orders'"):
        command.tune(resume=folder, evaluations=5)
    assert json.loads((folder / "run.json").read_text())["result"] == result


def test_the_result_as_json_has_the_winner_and_its_lineage(
    tune: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tune(format=Format.JSON)
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


def test_dependent_launches_are_tried_after_the_search(
    tune: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("k.ptx").write_text(PTX.replace("sm_80", "sm_90"))

    @contextmanager
    def open_chain(kernel: Kernel, plan: MeasurementPlan) -> Iterator[TimedDevice]:
        assert plan.dependent_launch
        device = TimedDevice(kernel.cubin)
        device.factor = lambda cubin: 0.5  # type: ignore[method-assign]
        yield device

    monkeypatch.setattr(command, "LocalGpu", open_chain)
    folder = tune(pdl="wait")
    text = capsys.readouterr().out
    assert "chains:   2.0000x [2.0000, 2.0000]" in text
    assert "launches back to back as dependent launches (wait), 2.0000x" in text
    result = json.loads((folder / "run.json").read_text())["result"]
    assert result["dependent_launch"]["improved"] and result["ratio"] < 2
    kinds = [Store().provenance(row).dependent_launch for row in Store().rows()]
    assert sorted(kinds) == [False, True]
    page = (folder / "report.html").read_text()
    assert "Launches back to back" in page and "2.0000 to 2.0000" in page
    capsys.readouterr()
    verify(folder)
    assert "dependent.cubin: safe: PTX proved equal" in capsys.readouterr().out
    # A result without a wait.
    (folder / "dependent.cubin").write_bytes((folder / "best.cubin").read_bytes())
    (folder / "dependent_recipe.json").write_bytes((folder / "recipe.json").read_bytes())
    with pytest.raises(typer.Exit):
        verify(folder)
    assert "dependent.cubin: UNSAFE: scale has no ACQBULK" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pdl": "early"}, "--pdl is 'early'; allowed are: wait, trigger"),
        ({"pdl": "wait"}, "below sm_90"),
        ({"pdl": "wait", "strategy": "anneal"}, "has strategy anneal"),
        ({"pdl": "wait", "timing": "events"}, "--timing graph"),
        ({"native": "assembler"}, "moves no native instructions"),
        ({"native": "sip", "strategy": "anneal"}, "but the strategy is anneal"),
        ({"native": "sups"}, "'sups'"),
    ],
)
def test_stages_after_the_search_that_cannot_run_are_refused(
    tune: Callable[..., Path], options: dict[str, str], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        tune(**options)
    assert not Path("run").exists()


def test_a_recorded_search_is_replayed_and_verified_without_a_gpu(
    tune: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tune(record=Path("k.recording.json"))
    measured = json.loads(Path("run/run.json").read_text())["result"]
    capsys.readouterr()
    for folder in ("first", "second"):
        tune(objective=None, recording=Path("k.recording.json"), out_dir=Path(folder))
    text = capsys.readouterr().out
    assert "gain measured on Fake, 20" in text and ", replayed: 1.0" in text
    assert "verifier: safe, on this machine (PTX proved equal; the same machine code" in text
    assert "modelled" not in text
    result = json.loads(Path("second/run.json").read_text())["result"]
    for field in ("ratio", "best", "evaluations", "improved", "kind"):
        assert result[field] == measured[field]
    for field in ("low", "high", "null_low", "null_high"):
        assert result["comparison"][field] == measured["comparison"][field]
    assert Path("second/best.cubin").read_bytes() == Path("run/best.cubin").read_bytes()
    page = Path("second/report.html").read_text()
    assert "measured on Fake" in page
    lead = re.search(r'class="lead">The result takes ([\d.]+) % less time \(measured on Fake', page)
    assert lead is not None and float(lead[1]) > 0
    samples = result["comparison"]["samples"]
    assert result["original"] == median(samples["original"])
    assert result["best"] == median(samples["candidate"])
    assert f"{result['best'] * 1e6:.3f} us in the final comparison" in text
    times = re.findall(r"<strong>([\d.]+ .s)</strong>", page)
    scale = Scale("s", result["original"])
    assert times == [scale(result["original"]), scale(result["best"])]
    verify(Path("second"))
    trials = Path("second/trials.csv").read_text().splitlines()
    assert len(trials) > 40


def test_a_replay_without_the_ptxas_verifies_the_recorded_cubin(
    tune: Callable[..., Path],
    recorded: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reverify, "find_assemblers", list)
    tune(objective=None, recording=recorded, out_dir=Path("other"), format=Format.JSON)
    result = json.loads(capsys.readouterr().out)
    assert result["improved"] and result["replayed"]["rebuilt"] is False
    assert any("this machine has (none)" in note for note in result["notes"])


def test_a_recording_of_another_kernel_or_with_changed_code_is_refused(
    tune: Callable[..., Path], recorded: Path
) -> None:
    Path("k.ptx").write_text(PTX.replace("0f41400000", "0f41500000"))
    with pytest.raises(BadInput, match=r"k\.json is a recording of k\.ptx"):
        tune(objective=None, recording=Path("k.json"), out_dir=Path("other"))
    Path("k.ptx").write_text(PTX)
    recording = Recording.read(Path("k.json"))
    changed = recording.model_copy(update={"winner": recording.original})
    changed.write(Path("changed.json"))
    with pytest.raises(BadInput, match="recorded winner of 'scale' is refused"):
        tune(objective=None, recording=Path("changed.json"), out_dir=Path("third"))
    Path("k.json").write_text("{}")
    with pytest.raises(BadInput, match=r"k\.json is not a recording: kernel"):
        tune(objective=None, recording=Path("k.json"), out_dir=Path("fourth"))


def test_a_recording_beside_the_file_is_found(
    tune: Callable[..., Path], recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recordings").mkdir()
    recorded.rename("recordings/k.json")
    tune(objective=None, out_dir=Path("other"))
    assert "gain measured on Fake" in capsys.readouterr().out


def test_a_kernel_without_a_recording_gets_verified_candidates_and_a_bundle(
    tune: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tune(objective=None, evaluations=20)
    text = capsys.readouterr().out
    assert "has no recording of this kernel" in text and "nothing was measured" in text
    assert "gain" not in text and "x [" not in text
    result = json.loads((folder / "run.json").read_text())["result"]
    assert sum(result["shortlist"].values()) == 20 and result["shortlist"]["verified"] > 1
    assert not result["improved"] and "ratio" not in result
    page = (folder / "report.html").read_text()
    assert "nothing was measured" in page and "1.0000" not in page
    assert 'class="lead">No candidate was measured, so there is no result to use.<' in page
    with zipfile.ZipFile(folder / "measure.zip") as archive:
        archive.extractall("there")
    words = shlex.split(Path("there/measure.sh").read_text())
    assert LaunchSpec.from_toml(Path("there/launch.toml")) == LAUNCH
    assert Path("there/kernel.ptx").read_text() == PTX
    assert words[words.index("tune") :][:2] == ["tune", "kernel.ptx"] and "--record" in words


def test_options_of_recordings_need_their_objective(tune: Callable[..., Path]) -> None:
    with pytest.raises(BadInput, match="--record needs a measured search"):
        tune(objective=None, record=Path("k.json"))
    with pytest.raises(BadInput, match="--recording is read with"):
        tune(recording=Path("k.json"))
    assert not Path("run").exists()


def test_options_of_ptxas_belong_to_ptx(tune: Callable[..., Path]) -> None:
    with pytest.raises(BadInput, match="--ptxas-options is for"):
        tune(target="k.cubin", ptxas_options="-O1")
    with pytest.raises(BadInput, match="has no model"):
        tune(strategy="assembler", objective="model")
    assert not Path("run").exists()
