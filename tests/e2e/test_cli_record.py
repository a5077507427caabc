"""Commands `nostall record` and `nostall init`: from a program or a cubin to a first result."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.cli import EXAMPLES, NVCC, SMALL, error_line, nostall, nostall_here

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def add(x_ptr, y_ptr, z_ptr, n, alpha, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x, y = tl.load(x_ptr + at, mask=mask), tl.load(y_ptr + at, mask=mask)
    tl.store(z_ptr + at, x + alpha * y, mask=mask)
"""
PROGRAM = """
import subprocess, sys, torch, triton
import own_settings
from kernels import add

n = 1000
x, y, z = torch.randn(n), torch.randn(n), torch.empty(n)
for step in range(3):
    add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, z, n, float(step), BLOCK=128)
assert torch.allclose(z, x + 2 * y)
print("result", sys.argv[1:], own_settings.loaded, flush=True)
sys.exit(7)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program with a Triton kernel, and a ``sitecustomize`` of the user's own."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "app.py").write_text(PROGRAM)
    (tmp_path / "own_settings.py").write_text("loaded = False\n")
    (tmp_path / "sitecustomize.py").write_text("import own_settings\nown_settings.loaded = True\n")
    return tmp_path / "app.py"


@pytest.mark.slow
def test_the_launches_of_a_program_become_launch_files(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    paths = ":".join([str(tmp_path), *filter(None, sys.path)])
    done = nostall(
        "record", "--out", "my launches", "--", sys.executable, program, "--flag", "-x",
        cwd=tmp_path, TRITON_INTERPRET="1", PYTHONPATH=paths,
    )  # fmt: skip
    assert done.code == 7, done.err
    assert "result ['--flag', '-x'] True" in done.out  # the user's own sitecustomize ran, too
    assert (tmp_path / "my launches" / "add.toml").exists()
    words = shlex.split(done.out.splitlines()[-1])
    assert words[:3] == ["next:", "nostall", "tune"]
    budget = ["--objective", "model", "--evaluations", 20, "--out", "run"]
    tuned = nostall(*words[2:], *budget, cwd=tmp_path)
    assert tuned.code == 0, tuned.err
    assert "verifier: safe" in tuned.out


def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    done = nostall_here("record", "--", "no-such-program", cwd=tmp_path)
    assert "cannot run 'no-such-program'" in error_line(done)
    done = nostall_here("record", "--", sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path)
    assert (done.code, done.out) == (3, "")
    assert "no launches" in done.err


def test_a_written_launch_file_can_be_tuned_at_once(tmp_path: Path) -> None:
    done = nostall_here("init", SMALL, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "4 arguments; 6 points marked TODO" in done.out
    words = shlex.split(done.out.splitlines()[-1])
    tuned = nostall_here(*words[2:], "--evaluations", 20, "--quiet", cwd=tmp_path)
    assert tuned.code == 0, tuned.err
    line = error_line(nostall_here("init", SMALL, cwd=tmp_path))
    assert "transpose.toml exists already" in line


@pytest.mark.parametrize("command", ["tune", "bench", "inspect"])
def test_the_launch_of_another_kernel_is_refused(command: str, tmp_path: Path) -> None:
    other = EXAMPLES / "nvcc" / "dot_product.toml"
    line = error_line(nostall_here(command, SMALL, "--launch", other, cwd=tmp_path))
    assert "is the launch that of another kernel?" in line
    empty = tmp_path / "empty.toml"
    empty.write_text("grid = [8, 1, 1]\n")
    line = error_line(nostall_here(command, SMALL, "--launch", empty, cwd=tmp_path))
    assert "has 0 arguments" in line and "takes 4 (8, 8, 4, 4 bytes)" in line
    assert f"`nostall init {SMALL} --kernel transpose`" in line


def test_an_architecture_that_contradicts_the_cubin_is_refused() -> None:
    for args in (["inspect", SMALL], ["verify", SMALL], ["verify", SMALL, SMALL]):
        line = error_line(nostall_here(*args, "--arch", "sm_80"))
        assert "is for sm_90, and --arch is sm_80" in line
    assert nostall_here("verify", SMALL, "--arch", "sm_90a").code == 0
    line = error_line(nostall_here("verify", SMALL, "--arch", "sm9"))
    assert "sm_90, sm_90a, sm_100, sm_100a" in line


def test_a_kernel_with_a_struct_can_be_modelled_but_not_measured(tmp_path: Path) -> None:
    kernel = [NVCC / "hopper.sm_90a.cubin", "--kernel", "store_tiles"]
    launch = ["--launch", tmp_path / "l.toml"]
    assert nostall_here("init", *kernel, "--out", tmp_path / "l.toml").code == 0
    assert "bytes = 128" in (tmp_path / "l.toml").read_text()
    line = error_line(nostall_here("bench", *kernel, *launch))
    assert "128 bytes of unknown content" in line
    assert nostall_here("inspect", *kernel, *launch).code == 0


TUNED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton
from kernels import add

def time(call, quantiles):
    call()
    return [1.0, 1.0, 1.0]

configs = [triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((256, 4), (128, 2), (1024, 8))]
tuned = triton.autotune(configs, key=["n"], do_bench=time)(add)
x, y, z = torch.randn(4096), torch.randn(4096), torch.empty(4096)
for step in range(3):
    tuned[lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)](x, y, z, 4096, float(step))
add[(16,)](x, y, z, 4096, 1.0, BLOCK=512)
"""


@pytest.mark.slow
def test_all_kernels_of_a_program_are_tuned(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    (tmp_path / "tuned.py").write_text(TUNED)
    paths = ":".join([str(tmp_path), *filter(None, sys.path)])
    budget = ["--objective", "model", "--seconds", 60, "--evaluations", 20]
    done = nostall(
        "tune", "tuned.py", *budget, "--out", "runs-of-it", "--format", "json",
        cwd=tmp_path, PYTHONPATH=paths,
    )  # fmt: skip
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["kind"] == "modelled" and document["ratio"] >= 1.0
    chosen, other = sorted(document["kernels"], key=lambda kernel: -kernel["launches"])
    assert (chosen["kernel"], chosen["launches"], other["launches"]) == ("add", 3, 1)
    searched = {search["configuration"].split(",")[0] for search in chosen["searches"]}
    assert searched <= {"BLOCK=256", "BLOCK=128", "BLOCK=1024"} and len(searched) > 1
    assert sum(search["own"] for search in chosen["searches"]) <= 1
    assert [search["configuration"] for search in other["searches"]] == ["as launched"]
    assert len(document["runs"]) == len(chosen["searches"]) + len(other["searches"])
    assert all(run.startswith("runs-of-it/") for run in document["runs"])
