"""Gated activations of feed-forward layers, fp16: SwiGLU backward, and GEGLU forward."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def swiglu_backward(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, size, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(dup_ptr + offs, (dy * silu).to(tl.float16), mask=mask)
    dgate = dy * up * (silu * (1.0 - sigmoid) + sigmoid)
    tl.store(dgate_ptr + offs, dgate.to(tl.float16), mask=mask)


@triton.jit
def geglu(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    # A row of x is (gate, up); GELU in its approximation by tanh.
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < columns
        gate = tl.load(x_ptr + row * 2 * columns + offs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * columns + columns + offs, mask=mask, other=0.0)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
        y = 0.5 * gate * (1.0 + tanh) * up.to(tl.float32)
        tl.store(y_ptr + row * columns + offs, y.to(tl.float16), mask=mask)


def launch_swiglu_backward(
    rows: int, columns: int, *, tile: tuple[int], warps: int, stages: int = 3
) -> LaunchSpec:
    """Launch for (rows, columns) gates; ``tile``: elements of a block."""
    shape, size = (rows, columns), rows * columns
    inputs = [Buffer(name=name, dtype="f16", shape=shape) for name in ("dy_ptr", "gate_ptr")]
    return LaunchSpec(
        grid=(-(-size // tile[0]), 1, 1),
        args=(
            *inputs,
            Buffer(name="up_ptr", dtype="f16", shape=shape),
            Buffer(name="dgate_ptr", dtype="f16", shape=shape, role="out"),
            Buffer(name="dup_ptr", dtype="f16", shape=shape, role="out"),
            Scalar(name="size", dtype="i32", value=size),
            Constant(name="BLOCK", constant=tile[0]),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=12.0 * size,
    )


def launch_geglu(
    rows: int, columns: int, *, tile: tuple[int], warps: int, stages: int = 3
) -> LaunchSpec:
    """Launch for ``rows`` rows of ``columns`` outputs; ``tile``: columns of one step."""
    return LaunchSpec(
        grid=(rows, 1, 1),
        args=(
            Buffer(name="x_ptr", dtype="f16", shape=(rows, 2 * columns), low=-3.0, high=3.0),
            Buffer(name="y_ptr", dtype="f16", shape=(rows, columns), role="out"),
            Scalar(name="columns", dtype="i32", value=columns),
            Constant(name="BLOCK", constant=tile[0]),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=14.0 * rows * columns,
    )


def reference_swiglu_backward(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch, by autograd."""
    gate, up = (given[name].float().requires_grad_() for name in ("gate_ptr", "up_ptr"))
    y = torch.nn.functional.silu(gate) * up
    dgate, dup = torch.autograd.grad(y, (gate, up), given["dy_ptr"].float())
    return {"dgate_ptr": dgate, "dup_ptr": dup}


def reference_geglu(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    gate, up = given["x_ptr"].float().chunk(2, -1)
    return {"y_ptr": torch.nn.functional.gelu(gate, approximate="tanh") * up}
