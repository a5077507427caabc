"""Tests of `nostall fuse`, run in this process because PyTorch is slow to import."""

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
from nostall.tuning.fusing import binaries, job
from nostall.tuning.fusing.document import Document, load_document
from nostall.tuning.fusing.job import FusionSettings, Measure, run_fuse
from nostall.tuning.fusing.region_plans import STRATEGIES, make_pass, plan_regions
from nostall.tuning.fusing.target import FusionRequest, trace_target
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source
from tests.unit.cli.printed_commands import check_printed

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
import torch
from torch.nn import functional as F

def inputs():
    return torch.randn(64, 512, dtype=torch.float16), torch.ones(512, dtype=torch.float16)

def norm(x, weight):
    return F.rms_norm(x, (512,), weight) * weight

def to_fp8(x, weight):
    return (x * weight).to(torch.float8_e4m3fn)

def around_matmul(x, weight):
    y = (x * weight).exp()
    return (y @ y.T).softmax(-1)

def only_sort(x, weight):
    return torch.sort(x).values
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a file with the functions of ``PROGRAM``."""
    path = tmp_path_factory.mktemp("fuse") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def run_fuse_command(*args: object) -> str:
    """Run ``nostall fuse`` and return its output."""
    wide = {"COLUMNS": "140"}
    done = CliRunner().invoke(app, ["fuse", *map(str, args)], env=wide, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def tuned_run(file: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of a run with tuning, and its directory."""
    folder = tmp_path_factory.mktemp("fuse") / "run"
    options = ("--tune-sass", "--evaluations", 20, "--show", "--explain", "--out", folder)
    return run_fuse_command(f"{file}:norm", *options), folder


def test_output_has_kernels_reasons_and_next_command(tuned_run: tuple[str, Path]) -> None:
    printed, folder = tuned_run
    assert "@triton.jit" in printed and "def stitched_" in printed
    (traced_pass,) = load_document(folder).passes
    assert f"inference: {traced_pass.operators} operators in 1 kernel; 0 calls outside" in printed
    assert f"{traced_pass.operators} kernels, modelled" in printed
    assert "verifier: accepts 1 of 1 kernels compiled for sm_90" in printed
    assert "the lowest modelled time of" in printed and "sass:" in printed
    *_, report, next_line = printed.splitlines()
    assert report == f"report:   {folder / 'report.html'}"
    (command,) = check_printed(next_line)
    assert shlex.split(command)[1] in ("verify", "tune")


def test_committed_document_of_the_example_is_current(tmp_path: Path) -> None:
    example = ROOT / "examples" / "fusion" / "layernorm_gelu.py"
    run_fuse_command(f"{example}:layernorm_gelu", "--out", tmp_path / "run")
    committed, written = (
        json.loads(file.read_text())["passes"]
        for file in (results("fusion") / "layernorm_gelu.json", tmp_path / "run" / "fusion.json")
    )
    assert written == committed, "copy the run's fusion.json over the committed file"


def test_run_directory_has_document_kernels_and_reports(tuned_run: tuple[str, Path]) -> None:
    _, folder = tuned_run
    document = load_document(folder)
    assert Run.open(folder).record.status == document.status == "done"
    (traced_pass,) = document.passes
    (kernel,) = traced_pass.kernels
    assert sorted(kernel.operators) == [n.index for n in traced_pass.nodes if n.kind != "input"]
    # Bytes of x read and written, and of the weight. Separate operators move several times as many.
    assert kernel.bytes_after == 2 * 64 * 512 * 2 + 512 * 2
    assert kernel.bytes_before > 3 * kernel.bytes_after
    assert 0 < traced_pass.seconds < traced_pass.seconds_unfused
    (binary,) = document.binaries
    assert validate((folder / str(binary.file)).read_bytes()).safe
    functions = re.findall(r"^def (stitched_\w+)\(", (folder / kernel.source).read_text(), re.M)
    assert functions == list(kernel.launches)
    (search,) = document.tuned
    assert search.evaluations == 20 and (folder / search.folder / "report.html").is_file()
    best = (folder / search.folder / "best.cubin").read_bytes()
    assert (best != (folder / str(binary.file)).read_bytes()) == search.improved


def test_report_command_reproduces_the_page(tuned_run: tuple[str, Path]) -> None:
    _, folder = tuned_run
    page = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    done = CliRunner().invoke(app, ["report", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0 and (folder / "report.html").read_text() == page


def fake_gpu(monkeypatch: pytest.MonkeyPatch, measure: Measure) -> None:
    """Replace the measurement on a GPU by ``measure``."""
    monkeypatch.setattr(job, "check_gpu", lambda: None)
    monkeypatch.setattr(job, "measure_on_this_gpu", measure)


def test_measured_times_are_shown_beside_modelled_times(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    measured_kernels: list[str] = []

    def measure(source: Source) -> tuple[float, str]:
        assert source.cubin == (folder / "kernels" / f"{source.kernel}.cubin").read_bytes()
        assert source.launch is not None
        measured_kernels.append(source.kernel)
        return 5e-6, "a GPU"

    fake_gpu(monkeypatch, measure)
    printed = run_fuse_command(f"{file}:norm", "--measure", "--out", folder)
    assert "measured: each kernel alone, on a GPU" in printed
    document = load_document(folder)
    (kernel,) = document.passes[0].kernels
    assert measured_kernels == list(kernel.launches) and document.measured_on == "a GPU"
    assert document.measured(kernel) == pytest.approx(5e-6 * len(measured_kernels))
    assert "measured 5" in (folder / "report.html").read_text()


def test_kernel_that_faults_has_no_measured_time(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch, lambda source: (None, "fault: an illegal address"))
    printed = run_fuse_command(f"{file}:norm", "--measure", "--out", tmp_path / "run")
    assert re.search(r"not measured: stitched_\w+: fault: an illegal address", printed)
    assert load_document(tmp_path / "run").measured_on == ""


def test_measuring_needs_a_gpu(file: str, tmp_path: Path) -> None:
    options = ["--measure", "--out", f"{tmp_path}/run"]
    done = CliRunner().invoke(app, ["fuse", f"{file}:norm", *options])
    assert isinstance(done.exception, MissingPart)
    assert "PyTorch sees none" in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_kernel_that_does_not_compile_is_recorded(file: str, tmp_path: Path) -> None:
    """Triton compiles fp8 for sm_89 and later, not for sm_80."""
    options = ("--arch", "sm_80", "--format", "json", "--out", tmp_path / "run")
    output = run_fuse_command(f"{file}:to_fp8", *options)
    record = json.loads(output)
    assert record["run"] == str(tmp_path / "run")
    assert record["result"]["passes"]["inference"]["launches"] == 1
    assert (record["result"]["binaries"], record["result"]["failed"]) == (1, 1)
    (binary,) = record["binaries"]
    assert binary["file"] is None and "fp8e4nv" in binary["failure"]
    assert (tmp_path / "run" / record["passes"][0]["kernels"][0]["source"]).is_file()


def test_function_without_fusible_operators(file: str, tmp_path: Path) -> None:
    printed = run_fuse_command(f"{file}:only_sort", "--explain", "--out", tmp_path / "run")
    assert "there is nothing to fuse; --explain prints the reasons" in printed
    assert "1 x aten.sort.default: sorting" in printed
    assert printed.splitlines()[-1] == f"next:     nostall report {tmp_path / 'run'}"
    assert len(check_printed(printed)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "f17"], "--dtype 'f17' is unknown; allowed are f64, f32, f16, bf16"),
        (["--arch", "hopper"], "architecture 'hopper' is unknown; allowed are sm_75"),
        (["--arch", "sm_999"], "kernels cannot be tuned for sm_999; supported are sm_75"),
        (["--evaluations", "5"], "--evaluations is an option of the search over instructions"),
        (["--strategy", "best"], "--strategy 'best' is unknown; allowed are explore, refined, "),
    ],
)
def test_invalid_options_are_rejected_before_a_run_is_created(
    file: str, tmp_path: Path, options: list[str], message: str
) -> None:
    done = CliRunner().invoke(app, ["fuse", f"{file}:norm", *options, "--out", f"{tmp_path}/run"])
    assert isinstance(done.exception, BadInput) and message in str(done.exception)
    assert not (tmp_path / "run").exists()


def interrupt_at(stage: str, file: str, folder: Path) -> Document:
    """The document of a run that Ctrl-C ends at the first progress text starting with ``stage``."""
    request = FusionRequest(f"{file}:around_matmul")

    def progress(share: float, text: str) -> None:
        assert 0 <= share <= 1
        if text.startswith(stage):
            raise KeyboardInterrupt

    with Run.create(folder, "nostall fuse", {}) as run:
        return run_fuse(request, trace_target(request), FusionSettings(), run, progress)


def test_ctrl_c_keeps_the_regions_that_were_planned(file: str, tmp_path: Path) -> None:
    document = interrupt_at("planning inference: region 1", file, tmp_path / "run")
    (traced_pass,) = document.passes
    assert document.status == "interrupted" and load_document(tmp_path / "run") == document
    planned = {index for kernel in traced_pass.kernels for index in kernel.operators}
    assert planned and traced_pass.alone
    assert planned | set(traced_pass.alone) == {
        node.index for node in traced_pass.nodes if node.kind not in ("input", "opaque")
    }
    assert f"interrupted: {len(traced_pass.alone)} operators were not planned" in traced_pass.notes
    assert not document.binaries


def test_ctrl_c_keeps_the_kernels_that_were_compiled(file: str, tmp_path: Path) -> None:
    document = interrupt_at("compiling 2", file, tmp_path / "run")
    (binary,) = document.binaries
    assert document.status == "interrupted" and (tmp_path / "run" / str(binary.file)).is_file()
    assert Run.open(tmp_path / "run").record.status == "interrupted"


def test_kernel_with_findings_is_reported_and_not_tuned(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding("latency", "stitched", 16, "IADD3", "a pair that no table has", "hazards")
    monkeypatch.setattr(binaries, "validate", lambda data: Verdict((finding,), 7))
    request = FusionRequest(f"{file}:norm")
    with Run.create(tmp_path / "run", "nostall fuse", {}) as run:
        settings = FusionSettings(tuning=Settings(evaluations=5))
        document = run_fuse(request, trace_target(request), settings, run, lambda share, text: None)
    (binary,) = document.unknown
    assert (binary.instructions, binary.findings) == (7, 1)
    assert "a pair that no table has" in binary.first_finding
    assert document.tuned[0].note == "the verifier reports 1 finding in the compiler's own order"
    assert document.status == "done" and not document.tuned[0].folder


def test_each_strategy_covers_all_operators_once(file: str, tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    captured = trace_target(FusionRequest(f"{file}:around_matmul")).passes["inference"]
    seconds: dict[str, float] = {}
    for name in STRATEGIES:
        planned_pass = make_pass(
            "inference", captured, list(plan_regions(captured, name, tmp_path))
        )
        covered = [index for kernel in planned_pass.kernels for index in kernel.operators]
        assert sorted([*covered, *planned_pass.alone]) == sorted(captured.graph.operators)
        assert not planned_pass.notes
        seconds[name] = planned_pass.seconds
    assert seconds["optimum"] <= min(seconds.values()) * (1 + 1e-9)


def test_optimum_beyond_the_column_limit_falls_back_to_explore(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.setattr("nostall.tuning.fusing.region_plans.MAX_COLUMNS", 1)
    captured = trace_target(FusionRequest(f"{file}:norm")).passes["inference"]
    planned_pass = make_pass(
        "inference", captured, list(plan_regions(captured, "optimum", tmp_path))
    )
    assert planned_pass.notes == (
        "the optimum is not known (too many patterns); the plan is that of explore",
    )
