"""Tuning after a first call: what can be tuned, and what comes of it."""

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
from nostall.attach import first_call, live
from nostall.core import BadInput, BadLaunch, LaunchSpec
from nostall.store import Store
from nostall.tuning.source import load_cubin
from tests.unit.tuning.test_gpu_objective import Pretended

ROOT = Path(__file__).resolve().parents[3]
NVCC = ROOT / "examples" / "nvcc"


class Tensor:
    """As much of a torch tensor as is looked at: 100 elements, 4 into a storage."""

    def element_size(self) -> int:
        return 4

    def storage_offset(self) -> int:
        return 4

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: 416)


def _argument(kind: Any, value: Any, **bounds: int) -> Any:
    return live._argument("m.kernel", "a", kind, value, bounds)


def test_tensors_become_buffers_of_all_that_their_storage_holds() -> None:
    buffer = _argument("*fp32", Tensor())
    assert (buffer.dtype, buffer.shape, buffer.role) == ("f32", (100,), "inout")
    assert _argument("*kfp32", Tensor()) == buffer
    assert _argument("*i32", Tensor(), a=7).bound == 7
    flags = _argument("*i1", Tensor())
    assert (flags.dtype, flags.bound) == ("u8", 2)
    assert _argument("*fp8e5", Tensor()).dtype == "f8e5m2"
    assert _argument("fp32", 0.5).value == 0.5


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("*i32", Tensor(), r"bounds=\{'a': N\}"),
        ("*fp4e2", Tensor(), "element type 'fp4e2'"),
        ("*fp32", object(), "torch tensors"),
        ("tensordesc<fp16[64,64]>", object(), "launch specification"),
        (("i32", "i32"), (1, 2), "launch specification"),
        ("i32", None, "launch specification"),
    ],
)
def test_what_random_data_cannot_stand_in_for(kind: Any, value: Any, text: str) -> None:
    with pytest.raises(BadLaunch, match=text):
        _argument(kind, value)


class Empty(Tensor):
    """A tensor that holds nothing."""

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: 16)


@pytest.mark.parametrize(
    ("tensor", "grid", "why"),
    [(Empty(), (1,), "sizes must be > 0"), (Tensor(), (0,), "each dimension must be >= 1")],
)
def test_a_launch_that_cannot_be_described_goes_on(
    tensor: Tensor, grid: tuple[int], why: str, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """An empty tensor, or no blocks at all: nothing to tune, nothing to stop for."""
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
    calls.follow()
    monkeypatch.setattr(first_call, "tune_apart", lambda *_: pytest.fail("tuned"))
    assert outer.run(tensor, grid=grid, warmup=False) is compiled
    assert "not tuned on its first call" in caplog.text and why in caplog.text


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


class OnGpu(Pretended):
    about: Mapping[str, str] = {"gpu": "A GPU of the tests", "driver_version": "1"}

    def __enter__(self) -> OnGpu:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_gain_is_kept_and_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    original = _job(tmp_path)
    row = first_call.tune_here(tmp_path, lambda kernel, _: OnGpu(0.9, 0.8, kernel.cubin))
    loaded = nostall.load(original, to="bytes", gpu="A GPU of the tests")
    assert row is not None
    assert (row.kind, row.gpu, row.ratio) == ("measured", "A GPU of the tests", 1.25)
    assert loaded == Store().artefacts.get(row.optimised, "cubin") != original


def test_a_search_that_fails_leaves_the_program_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real process, which finds no GPU; the program goes on."""
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "platform.py").write_text("raise SystemExit('a file of the user')")
    launch = LaunchSpec.from_toml(NVCC / "transpose.toml")
    source = load_cubin(NVCC / "transpose.sm_90.cubin", None, launch)
    first_call.tune_apart(source, 0.2, 0)
    assert "no usable GPU" in capfd.readouterr().err
    assert Store().rows() == []


def test_the_decorator_says_what_it_wants() -> None:
    with pytest.raises(BadInput, match=r"stands above @triton\.jit"):
        nostall.optimize(print)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(BadInput, match="how many seconds"):
            nostall.optimize(tune_seconds=seconds)


def test_interpreted_kernels_pass_through() -> None:
    text = (
        "import triton, nostall\n"
        "def f(x): pass\n"
        "kernel = triton.jit(f)\n"
        "assert nostall.optimize(kernel) is kernel\n"
        "print(type(kernel).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "InterpretedFunction\n"
