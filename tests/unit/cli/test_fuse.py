"""`nostall fuse` from a file to a run directory, in this process: PyTorch is slow to start."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from benchmarks.harness.result_file import results

pytest.importorskip("torch")
pytest.importorskip("triton")

from typer.testing import CliRunner

from nostall.cli import app
from nostall.core import Run
from nostall.core.errors import BadInput, MissingPart
from nostall.sass import Finding, Verdict, validate
from nostall.tuning.fusing import binaries, timing
from nostall.tuning.fusing.document import Document, load_document
from nostall.tuning.fusing.job import FusionSettings, run_fuse
from nostall.tuning.fusing.region_plans import STRATEGIES, make_pass, plan_regions
from nostall.tuning.fusing.target import FusionRequest, trace_target
from nostall.tuning.fusing.timing import Measure
from nostall.tuning.job import Settings
from nostall.tuning.source import Source

ROOT = Path(__file__).resolve().parents[3]
FILE = """
import torch
from torch.nn import functional as F

def inputs():
    return torch.randn(64, 512, dtype=torch.float16), torch.ones(512, dtype=torch.float16)

def norm(x, weight):
    return F.rms_norm(x, (512,), weight) * weight

def eighth(x, weight):
    return (x * weight).to(torch.float8_e4m3fn)

def between(x, weight):
    y = (x * weight).exp()
    return (y @ y.T).softmax(-1)

def sorted_only(x, weight):
    return torch.sort(x).values
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("fuse") / "program.py"
    path.write_text(FILE)
    return str(path)


def command(*args: object) -> str:
    done = CliRunner().invoke(app, ["fuse", *map(str, args)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def tuned(file: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a whole run prints, and its directory."""
    place = tmp_path_factory.mktemp("fuse") / "run"
    options = ("--tune-sass", "--evaluations", 20, "--show", "--explain", "--out", place)
    return command(f"{file}:norm", *options), place


def test_a_run_prints_kernels_reasons_and_a_line_to_paste(tuned: tuple[str, Path]) -> None:
    printed, place = tuned
    assert "@triton.jit" in printed and "def stitched_" in printed
    (found,) = load_document(place).passes
    assert f"inference: {found.operators} operators in 1 kernel; 0 calls outside" in printed
    assert f"{found.operators} launches, modelled" in printed
    assert "verifier: accepts 1 of 1 kernels compiled for sm_90" in printed
    assert "the lowest modelled time of" in printed and "sass:" in printed
    *_, report, following = printed.splitlines()
    assert report == f"report:   {place / 'report.html'}"
    words = shlex.split(following)
    assert words[:2] == ["next:", "nostall"]
    if words[2] == "verify":
        assert all(Path(word).is_file() for word in words[3:])
    else:
        assert words[2] == "tune" and Path(words[3].partition(":")[0]).is_file()


def test_the_page_shows_what_its_example_prints(tmp_path: Path) -> None:
    example = ROOT / "examples" / "fusion" / "layernorm_gelu.py"
    printed = command(f"{example}:layernorm_gelu", "--explain", "--out", tmp_path / "run")
    # What is modelled and why; the tables, and what ptxas makes of it, are not the same everywhere.
    beginnings = ("  ", "inference: ", "stitched_")
    lines = [line for line in printed.splitlines() if line.startswith(beginnings)]
    page = (ROOT / "docs" / "how-to" / "fuse-a-function.md").read_text().splitlines()
    assert len(lines) >= 14 and [line for line in lines if line not in page] == []


def test_the_file_of_the_example_is_what_it_writes(tmp_path: Path) -> None:
    example = ROOT / "examples" / "fusion" / "layernorm_gelu.py"
    command(f"{example}:layernorm_gelu", "--out", tmp_path / "run")
    committed, found = (
        json.loads(file.read_text())["passes"]
        for file in (results("fusion") / "layernorm_gelu.json", tmp_path / "run" / "fusion.json")
    )
    assert found == committed, "copy the run's fusion.json over the committed file"


def test_a_run_directory_holds_all_of_it(tuned: tuple[str, Path]) -> None:
    _, place = tuned
    document = load_document(place)
    assert Run.open(place).record.status == document.status == "done"
    (found,) = document.passes
    (kernel,) = found.kernels
    assert sorted(kernel.operators) == [n.index for n in found.nodes if n.kind != "input"]
    # x in, x out, weight: what the operators read and write one by one is a multiple.
    assert kernel.bytes_after == 2 * 64 * 512 * 2 + 512 * 2
    assert kernel.bytes_before > 3 * kernel.bytes_after
    assert 0 < found.seconds < found.seconds_unfused
    (binary,) = document.binaries
    assert validate((place / str(binary.file)).read_bytes()).safe
    made = re.findall(r"^def (stitched_\w+)\(", (place / kernel.source).read_text(), re.M)
    assert made == list(kernel.launches)
    (search,) = document.tuned
    assert search.evaluations == 20 and (place / search.folder / "report.html").is_file()
    best = (place / search.folder / "best.cubin").read_bytes()
    assert (best != (place / str(binary.file)).read_bytes()) == search.improved


def test_the_report_is_made_again_from_the_run(tuned: tuple[str, Path]) -> None:
    _, place = tuned
    page = (place / "report.html").read_text()
    (place / "report.html").unlink()
    done = CliRunner().invoke(app, ["report", str(place)], catch_exceptions=False)
    assert done.exit_code == 0 and (place / "report.html").read_text() == page


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, measure: Measure) -> None:
    monkeypatch.setattr(timing, "check_gpu", lambda: None)
    monkeypatch.setattr(timing, "measure_on_this_gpu", measure)


def test_measured_times_stand_beside_the_modelled_ones(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run"
    asked: list[str] = []

    def measure(source: Source) -> tuple[float, str]:
        assert source.cubin == (place / "kernels" / f"{source.kernel}.cubin").read_bytes()
        assert source.launch is not None
        asked.append(source.kernel)
        return 5e-6, "a GPU"

    on_a_gpu(monkeypatch, measure)
    printed = command(f"{file}:norm", "--measure", "--out", place)
    assert "measured: each kernel alone, on a GPU" in printed
    document = load_document(place)
    (kernel,) = document.passes[0].kernels
    assert asked == list(kernel.launches) and document.measured_on == "a GPU"
    assert document.measured(kernel) == pytest.approx(5e-6 * len(asked))
    assert "measured 5" in (place / "report.html").read_text()


def test_a_kernel_that_fails_on_the_gpu_has_no_time(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, lambda source: (None, "fault: an illegal address"))
    printed = command(f"{file}:norm", "--measure", "--out", tmp_path / "run")
    assert re.search(r"not measured: stitched_\w+: fault: an illegal address", printed)
    assert load_document(tmp_path / "run").measured_on == ""


def test_measuring_needs_a_gpu(file: str, tmp_path: Path) -> None:
    options = ["--measure", "--out", f"{tmp_path}/run"]
    done = CliRunner().invoke(app, ["fuse", f"{file}:norm", *options])
    assert isinstance(done.exception, MissingPart)
    assert "PyTorch sees none here" in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_a_kernel_that_does_not_compile_is_no_failure(file: str, tmp_path: Path) -> None:
    """fp8 needs sm_89."""
    options = ("--arch", "sm_80", "--format", "json", "--out", tmp_path / "run")
    said = command(f"{file}:eighth", *options)
    found = json.loads(said)
    assert found["run"] == str(tmp_path / "run")
    assert found["result"]["passes"]["inference"]["launches"] == 1
    assert (found["result"]["binaries"], found["result"]["failed"]) == (1, 1)
    (binary,) = found["binaries"]
    assert binary["file"] is None and "fp8e4nv" in binary["failure"]
    assert (tmp_path / "run" / found["passes"][0]["kernels"][0]["source"]).is_file()


def test_nothing_to_fuse_is_an_answer(file: str, tmp_path: Path) -> None:
    printed = command(f"{file}:sorted_only", "--explain", "--out", tmp_path / "run")
    assert "there is nothing to fuse; --explain prints the reasons" in printed
    assert "1 x aten.sort.default: unsupported operator" in printed
    assert printed.splitlines()[-1] == f"next:     nostall report {tmp_path / 'run'}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "f17"], "--dtype is 'f17'; allowed are f64, f32, f16, bf16"),
        (["--arch", "hopper"], "architecture 'hopper' is unknown; write it as sm_80"),
        (["--arch", "sm_999"], "kernels cannot be tuned for sm_999; supported are sm_75"),
        (["--strategy", "best"], "--strategy is 'best'; allowed are explore, refined, "),
    ],
)
def test_bad_options_are_said_before_anything_is_made(
    file: str, tmp_path: Path, options: list[str], said: str
) -> None:
    done = CliRunner().invoke(app, ["fuse", f"{file}:norm", *options, "--out", f"{tmp_path}/run"])
    assert isinstance(done.exception, BadInput) and said in str(done.exception)
    assert not (tmp_path / "run").exists()


def interrupted_at(text: str, file: str, place: Path) -> Document:
    asked = FusionRequest(f"{file}:between")

    def progress(part: float, what: str) -> None:
        assert 0 <= part <= 1
        if what.startswith(text):
            raise KeyboardInterrupt

    with Run.create(place, "nostall fuse", {}) as run:
        return run_fuse(asked, trace_target(asked), FusionSettings(), run, progress)


def test_ctrl_c_keeps_the_regions_that_were_planned(file: str, tmp_path: Path) -> None:
    document = interrupted_at("planning inference: region 1", file, tmp_path / "run")
    (found,) = document.passes
    assert document.status == "interrupted" and load_document(tmp_path / "run") == document
    planned_ones = {index for kernel in found.kernels for index in kernel.operators}
    assert planned_ones and found.alone
    assert planned_ones | set(found.alone) == {
        node.index for node in found.nodes if node.kind not in ("input", "opaque")
    }
    assert f"interrupted: {len(found.alone)} operators were not planned" in found.notes
    assert not document.binaries


def test_ctrl_c_keeps_the_kernels_that_were_compiled(file: str, tmp_path: Path) -> None:
    document = interrupted_at("compiling 2", file, tmp_path / "run")
    (binary,) = document.binaries
    assert document.status == "interrupted" and (tmp_path / "run" / str(binary.file)).is_file()
    assert Run.open(tmp_path / "run").record.status == "interrupted"


def test_what_the_rules_do_not_know_is_said_and_not_tuned(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding("latency", "stitched", 16, "IADD3", "a pair that no table has", "hazards")
    monkeypatch.setattr(binaries, "validate", lambda data: Verdict((finding,), 7))
    asked = FusionRequest(f"{file}:norm")
    with Run.create(tmp_path / "run", "nostall fuse", {}) as run:
        how = FusionSettings(tuning=Settings(evaluations=5))
        document = run_fuse(asked, trace_target(asked), how, run, lambda part, what: None)
    (binary,) = document.unknown
    assert (binary.instructions, binary.findings) == (7, 1)
    assert "a pair that no table has" in binary.first_finding
    assert document.tuned[0].note == "nostall's rules do not know 1 places of it"
    assert document.status == "done" and not document.tuned[0].folder


def test_every_strategy_covers_the_operators_once(file: str, tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    captured = trace_target(FusionRequest(f"{file}:between")).passes["inference"]
    seconds: dict[str, float] = {}
    for name in STRATEGIES:
        found = make_pass("inference", captured, list(plan_regions(captured, name, tmp_path)))
        covered = [index for kernel in found.kernels for index in kernel.operators]
        assert sorted([*covered, *found.alone]) == sorted(captured.graph.operators)
        assert not found.notes
        seconds[name] = found.seconds
    assert seconds["optimum"] <= min(seconds.values()) * (1 + 1e-9)


def test_an_optimum_that_is_not_known_is_said(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.setattr("nostall.tuning.fusing.region_plans.MAX_COLUMNS", 1)
    captured = trace_target(FusionRequest(f"{file}:norm")).passes["inference"]
    found = make_pass("inference", captured, list(plan_regions(captured, "optimum", tmp_path)))
    assert found.notes == (
        "the optimum is not known (too many patterns); the plan is that of explore",
    )
