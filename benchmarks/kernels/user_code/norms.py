"""Normalisation kernels, fp16: RMSNorm backward, and layer norm with quantisation to int8."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def rmsnorm_backward(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr, rows, columns, rows_a_block,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Each block adds up the weight's gradient over its rows; a second kernel adds the blocks.
    block = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < columns
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    first = block * rows_a_block
    for row in range(first, tl.minimum(first + rows_a_block, rows)):
        x = tl.load(x_ptr + row * columns + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * columns + offs, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normal = x * rstd
        grad = dy * weight
        mean = tl.sum(grad * normal, 0) / columns
        dx = (grad - normal * mean) * rstd
        tl.store(dx_ptr + row * columns + offs, dx.to(tl.float16), mask=mask)
        dweight += dy * normal
    tl.store(dweight_ptr + block * columns + offs, dweight, mask=mask)


@triton.jit
def layernorm_quantise(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, sum_ptr, q_ptr, scale_ptr, columns, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < columns
    x = tl.load(x_ptr + row * columns + offs, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row * columns + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(sum_ptr + row * columns + offs, x.to(tl.float16), mask=mask)
    mean = tl.sum(x, 0) / columns
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / columns + eps)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = centred * rstd * weight + bias
    scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-8) / 127.0
    scaled = y / scale
    rounded = scaled + tl.where(scaled >= 0.0, 0.5, -0.5)
    tl.store(q_ptr + row * columns + offs, rounded.to(tl.int8), mask=mask)
    tl.store(scale_ptr + row, scale)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def launch_rmsnorm_backward(rows: int, columns: int, blocks: int, *, warps: int) -> LaunchSpec:
    """Launch for (rows, columns) inputs on ``blocks`` blocks."""
    shape = (rows, columns)
    return LaunchSpec(
        grid=(blocks, 1, 1),
        args=(
            Buffer(name="dy_ptr", dtype="f16", shape=shape),
            Buffer(name="x_ptr", dtype="f16", shape=shape),
            Buffer(name="weight_ptr", dtype="f16", shape=(columns,)),
            Buffer(name="rstd_ptr", dtype="f32", shape=(rows,), low=1.0, high=2.0),
            Buffer(name="dx_ptr", dtype="f16", shape=shape, role="out"),
            Buffer(name="dweight_ptr", dtype="f32", shape=(blocks, columns), role="out"),
            Scalar(name="rows", dtype="i32", value=rows),
            Scalar(name="columns", dtype="i32", value=columns),
            Scalar(name="rows_a_block", dtype="i32", value=-(-rows // blocks)),
            Constant(name="BLOCK", constant=_power_of_two(columns)),
        ),
        num_warps=warps,
        flops=10.0 * rows * columns,
    )


def launch_layernorm_quantise(rows: int, columns: int, *, warps: int) -> LaunchSpec:
    """Launch for (rows, columns) inputs, one block a row."""
    shape = (rows, columns)
    return LaunchSpec(
        grid=(rows, 1, 1),
        args=(
            Buffer(name="x_ptr", dtype="f16", shape=shape),
            Buffer(name="residual_ptr", dtype="f16", shape=shape),
            Buffer(name="weight_ptr", dtype="f16", shape=(columns,)),
            Buffer(name="bias_ptr", dtype="f16", shape=(columns,)),
            Buffer(name="sum_ptr", dtype="f16", shape=shape, role="out"),
            Buffer(name="q_ptr", dtype="i8", shape=shape, role="out"),
            Buffer(name="scale_ptr", dtype="f32", shape=(rows,), role="out"),
            Scalar(name="columns", dtype="i32", value=columns),
            Scalar(name="eps", dtype="f32", value=1e-5),
            Constant(name="BLOCK", constant=_power_of_two(columns)),
        ),
        num_warps=warps,
        flops=14.0 * rows * columns,
    )


def reference_rmsnorm_backward(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch; the weight's gradient for one block."""
    dy, x, weight = (given[f"{name}_ptr"].float() for name in ("dy", "x", "weight"))
    normal = x * given["rstd_ptr"][:, None]
    grad = dy * weight
    dx = (grad - normal * (grad * normal).mean(1, keepdim=True)) * given["rstd_ptr"][:, None]
    return {"dx_ptr": dx, "dweight_ptr": (dy * normal).sum(0, keepdim=True)}


def reference_layernorm_quantise(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    x, weight = given["x_ptr"].float() + given["residual_ptr"].float(), given["weight_ptr"].float()
    bias = given["bias_ptr"].float()
    y = torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, given["eps"])
    scale = y.abs().amax(1) / 127
    return {"sum_ptr": x, "scale_ptr": scale, "q_ptr": (y / scale[:, None]).round()}
