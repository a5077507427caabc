"""Tuning after the first call: which launches can be tuned, and what is stored."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nostall
from nostall.attach import first_call
from nostall.core import BadInput, BadLaunch, Budget, LaunchSpec
from nostall.ptx.assemble.versions import find_assemblers
from nostall.store import Store
from nostall.tuning.assembler.job import AssemblerJob
from nostall.tuning.sources.source import load_cubin
from tests.unit.tuning.assembler.kernel import TimedDevice, make_source, run_inline
from tests.unit.tuning.fake_device import FakeDevice

ROOT = Path(__file__).resolve().parents[3]
NVCC = ROOT / "examples" / "nvcc"


class FakeTensor:
    """The used part of a torch tensor's interface: 100 elements, at offset 4 of a storage."""

    def element_size(self) -> int:
        return 4

    def storage_offset(self) -> int:
        return 4

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: 416)


def _argument(kind: Any, value: Any, **bounds: int) -> Any:
    return first_call._argument("m.kernel", "a", kind, value, bounds)


def test_tensors_become_buffers_with_the_size_of_their_storage() -> None:
    buffer = _argument("*fp32", FakeTensor())
    assert (buffer.dtype, buffer.shape, buffer.role) == ("f32", (100,), "inout")
    assert _argument("*kfp32", FakeTensor()) == buffer
    assert _argument("*i32", FakeTensor(), a=7).bound == 7
    flags = _argument("*i1", FakeTensor())
    assert (flags.dtype, flags.bound) == ("u8", 2)
    assert _argument("*fp8e5", FakeTensor()).dtype == "f8e5m2"
    assert _argument("fp32", 0.5).value == 0.5


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("*i32", FakeTensor(), r"bounds=\{'a': N\}"),
        ("*fp4e2", FakeTensor(), "element type 'fp4e2'"),
        ("*fp32", object(), "torch tensors"),
        ("tensordesc<fp16[64,64]>", object(), "launch specification"),
        (("i32", "i32"), (1, 2), "launch specification"),
        ("i32", None, "launch specification"),
    ],
)
def test_arguments_that_random_data_cannot_replace(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(BadLaunch, match=message):
        _argument(kind, value)


class EmptyTensor(FakeTensor):
    """A tensor without elements."""

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: 16)


@pytest.mark.parametrize(
    ("tensor", "grid", "reason"),
    [
        (EmptyTensor(), (1,), "sizes must be > 0"),
        (FakeTensor(), (0,), "each dimension must be >= 1"),
    ],
)
def test_a_launch_that_cannot_be_described_runs_untuned(
    tensor: FakeTensor,
    grid: tuple[int],
    reason: str,
    tmp_path: Path,
    monkeypatch: Any,
    caplog: Any,
) -> None:
    """An empty tensor, or a grid without blocks."""
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    compiled = SimpleNamespace(
        asm={"cubin": b"cubin"},
        src=SimpleNamespace(signature={"a": "*fp32"}, constants={}),
        metadata=SimpleNamespace(num_warps=4),
    )
    outer = SimpleNamespace(run=lambda *args, **options: compiled)
    function = SimpleNamespace(
        module="m", fn=lambda a: None, signature=inspect.signature(lambda a: None), arg_names=["a"]
    )
    calls = first_call.FirstCalls(outer, function, 1.0, {}, lambda _: False)
    calls.track_launches()
    monkeypatch.setattr(first_call, "tune_in_subprocess", lambda *_: pytest.fail("tuned"))
    assert outer.run(tensor, grid=grid, warmup=False) is compiled
    assert "not tuned on its first call" in caplog.text and reason in caplog.text


def _job(folder: Path) -> bytes:
    source = load_cubin(
        NVCC / "dot_product.sm_90.cubin", None, LaunchSpec.from_toml(NVCC / "dot_product.toml")
    )
    assert source.launch is not None
    job = first_call.Job(
        kernel=source.kernel,
        launch=source.launch,
        origin="m.kernel",
        provenance=dict(source.provenance),
        seconds=0.3,
        ordinal=0,
    )
    (folder / "job.json").write_text(job.model_dump_json())
    (folder / "original.cubin").write_bytes(source.cubin)
    return source.cubin


class FakeGpu(FakeDevice):
    info: Mapping[str, str] = {"gpu": "A GPU of the tests", "driver_version": "1"}

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_gain_is_stored_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    original = _job(tmp_path)
    row = first_call.tune_folder(tmp_path, lambda kernel, *_: FakeGpu(0.9, 0.8, kernel.cubin))
    loaded = nostall.load(original, to="bytes", gpu="A GPU of the tests")
    assert row is not None
    assert (row.kind, row.gpu, row.ratio) == ("measured", "A GPU of the tests", 1.25)
    assert loaded == Store().artefacts.get(row.optimised, "cubin") != original


class OpenTimedDevice(TimedDevice):
    def __enter__(self) -> OpenTimedDevice:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_with_ptx_the_input_of_the_assembler_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    run_inline(monkeypatch)
    budget = Budget(evaluations=30)  # equal on slow machines
    monkeypatch.setattr(AssemblerJob, "_search_budget", lambda self: budget)
    source = make_source(find_assemblers()[0])
    assert source.launch is not None and source.ptx is not None
    job = first_call.Job(
        kernel=source.kernel,
        launch=source.launch,
        origin="m.kernel",
        provenance=dict(source.provenance),
        seconds=0.1,
        ordinal=0,
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    (tmp_path / "original.cubin").write_bytes(source.cubin)
    (tmp_path / "original.ptx").write_text(source.ptx)
    row = first_call.tune_folder(tmp_path, lambda kernel, *_: OpenTimedDevice(kernel.cubin))
    assert row is not None
    assert Store().provenance(row).recipe is not None
    loaded = nostall.load(source.cubin, to="bytes", gpu="Fake")
    assert loaded == Store().artefacts.get(row.optimised, "cubin") != source.cubin


def test_a_failing_search_does_not_stop_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real tuning process, which finds no GPU."""
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "platform.py").write_text("raise SystemExit('a file of the user')")
    launch = LaunchSpec.from_toml(NVCC / "transpose.toml")
    source = load_cubin(NVCC / "transpose.sm_90.cubin", None, launch)
    first_call.tune_in_subprocess(source, 0.2, 0)
    assert "no usable GPU" in capfd.readouterr().err
    assert Store().rows() == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (subprocess.CalledProcessError(-11, ["python", "-P"]), "its search ended with code -11"),
        (subprocess.TimeoutExpired(["python", "-P"], 305.0), "its search had no end after 305 s"),
    ],
)
def test_a_search_without_an_answer_is_told_in_words(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(first_call.subprocess, "run", fail)
    launch = LaunchSpec.from_toml(NVCC / "transpose.toml")
    source = load_cubin(NVCC / "transpose.sm_90.cubin", None, launch)
    assert first_call.tune_in_subprocess(source, 5.0, 0)["reason"] == reason


def test_an_error_of_the_search_is_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(first_call, "tune_folder", fail)
    monkeypatch.setattr(sys, "argv", ["first_call", str(tmp_path)])
    with pytest.raises(RuntimeError):
        first_call.main()
    answer = first_call._read_answer(tmp_path)
    assert answer is not None and "the device is lost" in answer["reason"]


def test_the_decorator_rejects_invalid_arguments() -> None:
    with pytest.raises(BadInput, match=r"put it above @triton\.jit"):
        nostall.optimize(print)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(BadInput, match="how many seconds"):
            nostall.optimize(tune_seconds=seconds)


def test_interpreted_kernels_are_not_changed() -> None:
    program = (
        "import triton, nostall\n"
        "def f(x): pass\n"
        "kernel = triton.jit(f)\n"
        "assert nostall.optimize(kernel) is kernel\n"
        "print(type(kernel).__name__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "InterpretedFunction\n"
