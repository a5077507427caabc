"""Pointwise operations fused with a reduction, in the form that TorchInductor generates.

``out = normalise(gelu(x + bias) * keep / 0.9 + residual)`` for each row, fp32 statistics, in the
looped form: rows are XBLOCK, columns are read in steps of RBLOCK, twice.
"""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def _value(in_ptr0, in_ptr1, in_ptr2, in_ptr3, x0, r1, mask, rnumel):
    place = r1 + rnumel * x0
    tmp0 = tl.load(in_ptr0 + place, mask, other=0.0).to(tl.float32)
    tmp1 = tl.load(in_ptr1 + r1, mask, other=0.0).to(tl.float32)
    tmp2 = tmp0 + tmp1
    tmp3 = tmp2 * 0.5 * (1.0 + tl.erf(tmp2 * 0.7071067811865476))
    tmp4 = tl.load(in_ptr2 + place, mask, other=0).to(tl.float32)
    tmp5 = tl.load(in_ptr3 + place, mask, other=0.0).to(tl.float32)
    return tmp3 * tmp4 * 1.1111111111111112 + tmp5


@triton.jit
def fused_reduction(
    in_ptr0, in_ptr1, in_ptr2, in_ptr3, out_ptr0, out_ptr1, xnumel, rnumel,
    XBLOCK: tl.constexpr, RBLOCK: tl.constexpr,
):  # fmt: skip
    x0 = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = x0 < xnumel
    rbase = tl.arange(0, RBLOCK)[None, :]
    total = tl.full((XBLOCK, RBLOCK), 0, tl.float32)
    squares = tl.full((XBLOCK, RBLOCK), 0, tl.float32)
    for roffset in range(0, rnumel, RBLOCK):
        mask = (roffset + rbase < rnumel) & xmask
        value = _value(in_ptr0, in_ptr1, in_ptr2, in_ptr3, x0, roffset + rbase, mask, rnumel)
        total = tl.where(mask, total + value, total)
        squares = tl.where(mask, squares + value * value, squares)
    mean = tl.sum(total, 1)[:, None] / rnumel
    variance = tl.sum(squares, 1)[:, None] / rnumel - mean * mean
    rstd = tl.rsqrt(variance + 1e-5)
    tl.store(out_ptr1 + x0, rstd, xmask)
    for roffset in range(0, rnumel, RBLOCK):
        r1 = roffset + rbase
        mask = (r1 < rnumel) & xmask
        value = _value(in_ptr0, in_ptr1, in_ptr2, in_ptr3, x0, r1, mask, rnumel)
        tl.store(out_ptr0 + (r1 + rnumel * x0), ((value - mean) * rstd).to(tl.float16), mask)


def launch(
    rows: int, columns: int, *, tile: tuple[int, int], warps: int, stages: int = 3
) -> LaunchSpec:
    """Launch for (rows, columns) inputs; ``tile``: XBLOCK and RBLOCK."""
    xblock, rblock = tile
    shape = (rows, columns)
    return LaunchSpec(
        grid=(-(-rows // xblock), 1, 1),
        args=(
            Buffer(name="in_ptr0", dtype="f16", shape=shape),
            Buffer(name="in_ptr1", dtype="f16", shape=(columns,)),
            Buffer(name="in_ptr2", dtype="u8", shape=shape, bound=2),
            Buffer(name="in_ptr3", dtype="f16", shape=shape),
            Buffer(name="out_ptr0", dtype="f16", shape=shape, role="out"),
            Buffer(name="out_ptr1", dtype="f32", shape=(rows,), role="out"),
            Scalar(name="xnumel", dtype="i32", value=rows),
            Scalar(name="rnumel", dtype="i32", value=columns),
            Constant(name="XBLOCK", constant=xblock),
            Constant(name="RBLOCK", constant=rblock),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=40.0 * rows * columns,
    )


def reference(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    x = torch.nn.functional.gelu(given["in_ptr0"].float() + given["in_ptr1"].float())
    value = x * given["in_ptr2"].float() / 0.9 + given["in_ptr3"].float()
    variance = value.var(1, unbiased=False, keepdim=True)
    rstd = torch.rsqrt(variance + 1e-5)
    return {"out_ptr0": (value - value.mean(1, keepdim=True)) * rstd, "out_ptr1": rstd[:, 0]}
