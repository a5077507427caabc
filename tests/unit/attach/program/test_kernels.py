"""The level of a program's own Triton kernels, from launches to `apply --bundle`."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nostall.attach.program.kernels import Kernels, NativeKernels
from nostall.cli import INTERRUPTED
from nostall.store import Store
from tests.e2e.cli import ROOT, Done, error_line, nostall
from tests.unit.attach.variants import GPU

pytest.importorskip("torch")
pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("triton_program.py")
STEP = "tests.unit.attach.program.triton_step:step"
SEARCHES = "tests.unit.attach.program.triton_step"


def run(folder: Path, *words: object, search: str = "store_variant", **variables: str) -> Done:
    variables = {
        "NOSTALL_GPU": GPU, "NOSTALL_HOME": str(folder / "store"), "FASTER": str(folder / "faster"),
        "TRITON_CACHE_DIR": str(folder / "cache"), "SEARCH": f"{SEARCHES}:{search}",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip
    return nostall(*words, cwd=folder, **variables)


def optimize(folder: Path, *options: str, **variables: str) -> tuple[Done, Any]:
    done = run(
        folder, "optimize", *options, "--step", STEP, "--minutes", "0.7", "--format", "json", "--",
        sys.executable, PROGRAM, **variables,
    )  # fmt: skip
    assert done.code == 0, done.err
    return done, json.loads(done.out)


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("program")
    return folder, optimize(folder)[1]


def test_kernels_are_searched_and_kept_with_the_whole_step(optimized: tuple[Path, Any]) -> None:
    _, document = optimized
    assert document["watched"]["kernels"] == [{"kernel": "axpy", "launches": 1.0}]
    (attempt,) = document["attempts"]
    assert attempt["change"] == {"name": "native kernels", "kind": "native", "value": "store"}
    assert (attempt["outcome"], attempt["class"]) == ("kept", "bit-equal"), attempt["reason"]
    (kernel,) = attempt["kernels"]
    assert kernel["launches"] == 1 and kernel["seconds"] == 2e-2 and kernel["record"]
    assert 1.5 < document["together"]["ratio"] < 4.1  # 20 ms against 5 ms, and what both share
    assert "kernels alone: axpy" in attempt["reason"]
    assert document["lines"] == ["@nostall.optimize  # above @triton.jit of axpy"]


def apply(folder: Path, *words: object, **variables: str) -> Done:
    return run(folder, "apply", "--bundle", "optimized/bundle.json", "--", sys.executable, PROGRAM,
               *words, **variables)  # fmt: skip


def loaded(done: Done) -> str:
    assert done.code == 0, done.err
    return done.out.split()[-1]


def test_a_bundle_brings_the_kernels_to_an_empty_store(optimized: tuple[Path, Any]) -> None:
    folder, _ = optimized
    bundle = json.loads((folder / "optimized" / "bundle.json").read_text())
    assert bundle["changes"][0]["kind"] == "native" and len(bundle["kernels"]["records"]) == 1
    original = loaded(
        run(folder, "apply", "--", sys.executable, PROGRAM, "9", NOSTALL_HOME="empty")
    )
    done = apply(folder, "9", NOSTALL_HOME=str(folder / "other"))
    assert loaded(done) == (folder / "faster").read_text() != original
    assert "nostall: applied native kernels" in done.err
    assert [row.source for row in Store(folder / "other").rows()] == ["imported"]
    again = apply(folder, "9", NOSTALL_HOME=str(folder / "other"))
    assert loaded(again) == loaded(done) and "applied" in again.err


def test_a_changed_file_of_kernels_is_refused(optimized: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = optimized
    shutil.copytree(folder / "optimized", tmp_path / "optimized")
    kernels = tmp_path / "optimized" / "kernels.zip"
    kernels.write_bytes(kernels.read_bytes() + b"\0")
    assert "copy both files of one run" in error_line(apply(tmp_path, "9"))
    kernels.unlink()
    assert "it belongs to the bundle" in error_line(apply(tmp_path, "9"))
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_run_is_replayed_and_resumed(optimized: tuple[Path, Any]) -> None:
    folder, document = optimized
    done = run(folder, "optimize", "--replay", "optimized/recording.json.gz", "--format", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["attempts"] == document["attempts"]
    names = "bundle.json", "kernels.zip"
    made, again = (
        [(folder / f / n).read_bytes() for n in names] for f in ("optimized", "replayed")
    )
    assert made == again
    lacking = run(folder, "optimize", "--replay", "optimized/recording.json.gz", NOSTALL_HOME="no")
    assert lacking.code == 0 and "no bundle is written: the store at" in lacking.err
    assert not (folder / "replayed" / "bundle.json").exists()
    _, resumed = optimize(
        folder, "--resume", "optimized", "--out", "resumed", search="find_nothing"
    )
    assert resumed["kept"] == ["native kernels"] and resumed["together"]["ratio"] > 1.5
    assert (folder / "resumed" / "kernels.zip").read_bytes() == made[1]


@pytest.mark.slow
def test_what_is_faster_alone_only_does_not_stay_in_the_store(tmp_path: Path) -> None:
    _, document = optimize(tmp_path, search="store_useless")
    (attempt,) = document["attempts"]
    assert attempt["outcome"] == "dropped" and attempt["kernels"][0]["searched"]
    assert "not faster" in attempt["reason"] and "kernels alone: axpy" in attempt["reason"]
    assert any("gain in the program" in note for note in document["notes"])
    assert Store(tmp_path / "store").rows() == []


@pytest.mark.parametrize("search", ["interrupt", pytest.param("hang", marks=pytest.mark.slow)])
def test_what_was_not_tried_in_the_program_does_not_stay_in_the_store(
    search: str, tmp_path: Path
) -> None:
    done = run(
        tmp_path, "optimize", "--step", STEP, "--minutes", "1", "--format", "json", "--",
        sys.executable, PROGRAM, search=search,
    )  # fmt: skip
    assert done.code == INTERRUPTED, done.err
    document = json.loads(done.out)
    assert (tmp_path / "faster").exists() and document["attempts"] == []
    assert any("gain in the program" in note for note in document["notes"])
    assert Store(tmp_path / "store").rows() == []


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    done = run(
        tmp_path, "optimize", "--step", STEP, "--minutes", "1", "--", sys.executable, PROGRAM, 900,
        search="kill",
    )  # fmt: skip
    assert done.code == -signal.SIGKILL
    until = time.monotonic() + 60  # the program runs on, and its half cleans up
    while (rows := Store(tmp_path / "store").rows()) and time.monotonic() < until:
        time.sleep(0.5)
    assert rows == []


@pytest.mark.slow
def test_no_gain_and_no_gpu_are_told_by_name(tmp_path: Path) -> None:
    _, document = optimize(tmp_path, search="find_nothing")
    (attempt,) = document["attempts"]
    assert attempt["outcome"] == "refused"
    assert attempt["reason"] == "no kernel got faster: axpy: no gain beyond the noise"
    assert document["kept"] == [] and not (tmp_path / "optimized" / "bundle.json").exists()
    _, document = optimize(tmp_path, SEARCH="", CUDA_VISIBLE_DEVICES="")
    assert "no usable GPU" in document["attempts"][0]["reason"]


class FakeFunction:
    """A kernel's ``run`` that returns the compiled kernel, and an autotuner with trials."""

    def run(self, *args: Any, **options: Any) -> Any:
        return options["grid"]

    def _bench(self, compiled: Any) -> Any:
        return self.run(grid=compiled)


def test_launches_are_counted_without_trials_and_only_while_noted() -> None:
    kernels = Kernels()
    kernel_class = type("JITFunction", (FakeFunction,), {"run": FakeFunction.run})
    tuner_class = type("Autotuner", (kernel_class,), {"_bench": FakeFunction._bench})
    run = kernel_class.run
    kernels.install(SimpleNamespace(JITFunction=kernel_class))  # type: ignore[arg-type]
    kernels.skip_trials(SimpleNamespace(Autotuner=tuner_class))  # type: ignore[arg-type]
    one, other = (
        SimpleNamespace(metadata=SimpleNamespace(name=name), asm={"cubin": b""}) for name in "ab"
    )
    tuner = tuner_class()
    tuner._bench(other)
    for compiled in (one, other, one):
        tuner.run(grid=compiled)
    tuner.run(grid=other, warmup=True)
    assert kernels.facts(2) == [
        {"kernel": "a", "launches": 1.0},
        {"kernel": "b", "launches": 0.5},
    ]
    kernels.remove()
    assert kernel_class.run is run
    kernels.describe(5.0)
    tuner.run(grid=other)
    (described,) = kernels.take()
    assert (described.name, described.launches, described.seconds) == ("b", 1, None)
    assert isinstance(described.source, str)  # a fake kernel has no signature
    assert kernel_class.run is run


def test_kernels_in_compiled_graphs_are_refused_before_a_search() -> None:
    kernels = Kernels()
    kernels.describe(5.0)
    finding = NativeKernels(kernels).check({})
    assert finding.refusal == (
        "none of its kernels is launched: compiled or captured graphs have them"
    )


def test_kernels_that_are_not_searched_are_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.9.0"))
    kernels = Kernels()
    kernel_class = type("JITFunction", (FakeFunction,), {"run": FakeFunction.run})
    kernels.install(SimpleNamespace(JITFunction=kernel_class))  # type: ignore[arg-type]
    one = SimpleNamespace(metadata=SimpleNamespace(name="a"), asm={})
    kernels.describe(5.0)
    kernel_class().run(grid=one)
    change = NativeKernels(kernels)
    finding = change.check({})
    assert finding.refusal == "no kernel got faster: a: it is not for an NVIDIA GPU"
    (answer,) = change.answers
    assert answer["launches"] == 1 and answer["record"] is None and not answer["searched"]
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="2.0.0"))
    kernels.describe(5.0)
    kernel_class().run(grid=one)
    assert "Triton 2.0.0 is not supported" in change.check({}).refusal
