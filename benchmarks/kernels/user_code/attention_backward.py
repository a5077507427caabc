"""Causal attention backward, fp16: one kernel for ``dk`` and ``dv``, one for ``dq``.

``q``, ``k``, ``v``, ``do`` and the gradients are (heads, N_CTX, D), contiguous.  ``lse`` is the
row-wise logarithm, in base 2, of the softmax sum of the forward pass, and ``delta`` is the row-wise
sum of ``o * do``.  N_CTX is a multiple of both tiles.
"""

# ruff: noqa: N803  (sizes and compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import math

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def attention_dkdv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, scale, scale_log2, N_CTX,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * N_CTX
    first = tl.program_id(0) * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    columns = (head + offs_n)[:, None] * D + offs_d[None, :]
    k = tl.load(k_ptr + columns)
    v = tl.load(v_ptr + columns)
    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    # Queries before the first key of this tile do not see it.
    for start in range(first // BLOCK_M * BLOCK_M, N_CTX, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        rows = (head + offs_m)[:, None] * D + offs_d[None, :]
        q = tl.load(q_ptr + rows)
        do = tl.load(do_ptr + rows)
        lse = tl.load(lse_ptr + head + offs_m)
        delta = tl.load(delta_ptr + head + offs_m)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        p = tl.where(offs_m[None, :] >= offs_n[:, None], p, 0.0)
        dv = tl.dot(p.to(tl.float16), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(tl.float16), q, dk)
    tl.store(dk_ptr + columns, (dk * scale).to(tl.float16))
    tl.store(dv_ptr + columns, dv.to(tl.float16))


@triton.jit
def attention_dq(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, scale, scale_log2, N_CTX,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * N_CTX
    first = tl.program_id(0) * BLOCK_M
    offs_m = first + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    rows = (head + offs_m)[:, None] * D + offs_d[None, :]
    q = tl.load(q_ptr + rows)
    do = tl.load(do_ptr + rows)
    lse = tl.load(lse_ptr + head + offs_m)
    delta = tl.load(delta_ptr + head + offs_m)
    dq = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, first + BLOCK_M, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        columns = (head + offs_n)[:, None] * D + offs_d[None, :]
        k = tl.load(k_ptr + columns)
        v = tl.load(v_ptr + columns)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        p = tl.where(offs_m[:, None] >= offs_n[None, :], p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(tl.float16), k, dq)
    tl.store(dq_ptr + rows, (dq * scale).to(tl.float16))


def _launch(
    kernel: str, heads: int, ctx: int, d: int, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    block_m, block_n = tile
    if ctx % block_m or ctx % block_n:
        raise ValueError(f"N_CTX={ctx} is not a multiple of the tile {tile}")
    shape, own_block = (heads, ctx, d), block_m if kernel == "dq" else block_n
    scale = 1 / math.sqrt(d)
    inputs = [Buffer(name=f"{name}_ptr", dtype="f16", shape=shape) for name in ("q", "k", "v")]
    gradients = {"dq": ["dq_ptr"], "dkdv": ["dk_ptr", "dv_ptr"]}[kernel]
    return LaunchSpec(
        grid=(ctx // own_block, heads, 1),
        args=(
            *inputs,
            Buffer(name="do_ptr", dtype="f16", shape=shape),
            Buffer(name="lse_ptr", dtype="f32", shape=shape[:2], low=5.0, high=7.0),
            Buffer(name="delta_ptr", dtype="f32", shape=shape[:2]),
            *(Buffer(name=name, dtype="f16", shape=shape, role="out") for name in gradients),
            Scalar(name="scale", dtype="f32", value=scale),
            Scalar(name="scale_log2", dtype="f32", value=scale * math.log2(math.e)),
            Scalar(name="N_CTX", dtype="i32", value=ctx),
            Constant(name="D", constant=d),
            Constant(name="BLOCK_M", constant=block_m),
            Constant(name="BLOCK_N", constant=block_n),
        ),
        num_warps=warps,
        num_stages=stages,
        # Half of the score matrix; each product of it has 2 * D operations.
        flops={"dq": 3.0, "dkdv": 4.0}[kernel] * heads * d * ctx * ctx,
    )


def launch_attention_dkdv(
    heads: int, ctx: int, d: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """Launch for gradients of keys and values; ``tile``: queries and keys of one step."""
    return _launch("dkdv", heads, ctx, d, tile, warps, stages)


def launch_attention_dq(
    heads: int, ctx: int, d: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """Launch for the gradient of queries; ``tile``: queries and keys of one step."""
    return _launch("dq", heads, ctx, d, tile, warps, stages)


def _probabilities(torch, given):  # type: ignore[no-untyped-def]
    q, k = given["q_ptr"].float(), given["k_ptr"].float()
    scores = q @ k.transpose(1, 2) * given["scale_log2"]
    p = torch.exp2(scores - given["lse_ptr"][:, :, None]).tril()
    dp = given["do_ptr"].float() @ given["v_ptr"].float().transpose(1, 2)
    return p, p * (dp - given["delta_ptr"][:, :, None]) * given["scale"]


def reference_attention_dkdv(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    p, ds = _probabilities(torch, given)
    dk = ds.transpose(1, 2) @ given["q_ptr"].float()
    return {"dk_ptr": dk, "dv_ptr": p.transpose(1, 2) @ given["do_ptr"].float()}


def reference_attention_dq(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    return {"dq_ptr": _probabilities(torch, given)[1] @ given["k_ptr"].float()}
