"""A file of small Triton kernels with their launches."""

from __future__ import annotations

from pathlib import Path

import pytest

KERNELS = """
import triton
import triton.language as tl
from nostall.core import Buffer, Constant, LaunchSpec, Scalar

@triton.jit
def scale(y, x, n, stride, factor, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offs, tl.load(x + offs * stride, offs < n) * factor, offs < n)

@triton.jit
def broken(y, x, n, stride, factor, BLOCK: tl.constexpr):
    tl.store(y, undefined_name)

@triton.jit
def greedy(y, x, K, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(K):
        acc = tl.dot(tl.load(x + offs + k), tl.load(x + offs + 2 * k), acc)
    tl.store(y + offs, acc)

@triton.jit(do_not_specialize=["n"])
def fixed(y, x, n, stride, factor, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), n + stride)

@triton.autotune([triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def tuned(y, x, n, stride, factor, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)) + n)

def plain(y):
    return y

def launch(n=1000, stride=1):
    return LaunchSpec(
        grid=(8, 1, 1),
        num_warps=2,
        args=(
            Buffer(name="y", dtype="f32", shape=(1024,), role="out"),
            Buffer(name="x", dtype="f32", shape=(1024,)),
            Scalar(name="n", dtype="i32", value=n),
            Scalar(name="stride", dtype="i32", value=stride),
            Scalar(name="factor", dtype="f32", value=1.0),
            Constant(name="BLOCK", constant=128),
        ),
    )

LAUNCHES = {
    "scale": launch(),
    "scale@strided": launch(stride=2),
    "scale@dict": launch(stride=3).model_dump(),
    "scale@wrong": {"grid": [0, 1, 1]},
    "broken": launch(),
    "fixed": launch(1, 1),
    "tuned": launch(),
    "greedy": LaunchSpec(
        num_stages=8,
        args=(
            Buffer(name="y", dtype="f32", shape=(16384,), role="out"),
            Buffer(name="x", dtype="f16", shape=(99999,)),
            Scalar(name="K", dtype="i32", value=64),
            Constant(name="BLOCK", constant=128),
        ),
    ),
}
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path
