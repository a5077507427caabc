"""Row-wise RMS normalisation: ``y = x / sqrt(mean(x ** 2) + eps) * w``, fp16 in and out.

Rows are tokens; a row holds all heads of a token, so a model with H heads of size D has H * D
columns.
"""

# ruff: noqa: N803  (sizes and compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def rmsnorm(y_ptr, x_ptr, w_ptr, columns, stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride
    offs = tl.arange(0, BLOCK)
    mask = offs < columns
    x = tl.load(x_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(y_ptr + row + offs, (x * scale * w).to(tl.float16), mask=mask)


@triton.jit
def rmsnorm_loop(y_ptr, x_ptr, w_ptr, columns, stride, eps, BLOCK: tl.constexpr):
    # Two passes over a row that does not fit into the registers of a block.
    row = tl.program_id(0).to(tl.int64) * stride
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + offs, mask=offs < columns, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + offs, mask=offs < columns, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + offs, mask=offs < columns, other=0.0).to(tl.float32)
        tl.store(y_ptr + row + offs, (x * scale * w).to(tl.float16), mask=offs < columns)


def launch(rows: int, columns: int, *, warps: int, block: int | None = None) -> LaunchSpec:
    """Launch for contiguous ``x`` and ``y`` (rows, columns) and ``w`` (columns)."""
    return LaunchSpec(
        grid=(rows, 1, 1),
        args=(
            Buffer(name="y_ptr", dtype="f16", shape=(rows, columns), role="out"),
            Buffer(name="x_ptr", dtype="f16", shape=(rows, columns)),
            Buffer(name="w_ptr", dtype="f16", shape=(columns,)),
            Scalar(name="columns", dtype="i32", value=columns),
            Scalar(name="stride", dtype="i32", value=columns),
            Scalar(name="eps", dtype="f32", value=1e-6),
            Constant(name="BLOCK", constant=block or triton.next_power_of_2(columns)),
        ),
        num_warps=warps,
        # square, sum and two products: four operations an element
        flops=4.0 * rows * columns,
    )


LAUNCHES = {
    "rmsnorm": launch(512, 512, warps=4),
    "rmsnorm@128x512": launch(128, 512, warps=4),
    "rmsnorm@128x8192": launch(128, 8192, warps=8),
    "rmsnorm@512x128": launch(512, 128, warps=1),
    "rmsnorm@512x8192": launch(512, 8192, warps=8),
    "rmsnorm@64x4096": launch(64, 4096, warps=4),
    "rmsnorm@full": launch(16384, 8192, warps=8),
    "rmsnorm_loop": launch(128, 8192, warps=4, block=1024),
    "rmsnorm_loop@full": launch(4096, 32768, warps=8, block=2048),
}


def reference(x, w, eps=1e-6):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    x = x.float()
    return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w.float()).half()
