"""Attention forward without a mask: ``o = softmax(scale * q @ k.T) @ v`` for each head, fp16.

One pass over the keys with a running maximum and a running sum, so no score is written to memory.
``q``, ``k``, ``v`` and ``o`` are (Z * H, N_CTX, D), contiguous; N_CTX is a multiple of the tiles.
"""

# ruff: noqa: N803  (sizes and compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import math

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def fused_attention(
    q_ptr, k_ptr, v_ptr, o_ptr,
    scale_log2,
    N_CTX,
    stride_head,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * stride_head
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + head + offs_m[:, None] * D + offs_d[None, :])
    k_tile = k_ptr + head + offs_n[None, :] * D + offs_d[:, None]
    v_tile = v_ptr + head + offs_n[:, None] * D + offs_d[None, :]

    highest = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for _ in range(0, N_CTX, BLOCK_N):
        scores = tl.dot(q, tl.load(k_tile)) * scale_log2
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(tl.float16), tl.load(v_tile), acc)
        highest = new_highest
        k_tile += BLOCK_N * D
        v_tile += BLOCK_N * D
    o = acc / total[:, None]
    tl.store(o_ptr + head + offs_m[:, None] * D + offs_d[None, :], o.to(tl.float16))


def launch(
    z: int, h: int, ctx: int, d: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """Launch for ``z`` sequences of ``h`` heads, length ``ctx``, head size ``d``."""
    block_m, block_n = tile
    if ctx % block_m or ctx % block_n:
        raise ValueError(f"ctx={ctx} must be a multiple of the tile {tile}")
    shape = (z * h, ctx, d)
    return LaunchSpec(
        grid=(ctx // block_m, z * h, 1),
        args=(
            Buffer(name="q_ptr", dtype="f16", shape=shape),
            Buffer(name="k_ptr", dtype="f16", shape=shape),
            Buffer(name="v_ptr", dtype="f16", shape=shape),
            Buffer(name="o_ptr", dtype="f16", shape=shape, role="out"),
            Scalar(name="scale_log2", dtype="f32", value=math.log2(math.e) / math.sqrt(d)),
            Scalar(name="N_CTX", dtype="i32", value=ctx),
            Scalar(name="stride_head", dtype="i32", value=ctx * d),
            Constant(name="D", constant=d),
            Constant(name="BLOCK_M", constant=block_m),
            Constant(name="BLOCK_N", constant=block_n),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=4.0 * z * h * ctx * ctx * d,
        trips={0: ctx // block_n},
    )


LAUNCHES = {
    "fused_attention": launch(1, 4, 2048, 64, tile=(64, 64), warps=4, stages=3),
    "fused_attention@ctx512": launch(1, 4, 512, 64, tile=(64, 64), warps=4, stages=3),
    "fused_attention@d32": launch(1, 4, 2048, 32, tile=(64, 64), warps=4, stages=3),
    "fused_attention@d128": launch(1, 4, 2048, 128, tile=(64, 32), warps=4, stages=3),
    "fused_attention@mma": launch(1, 4, 2048, 64, tile=(32, 32), warps=2, stages=3),
    "fused_attention@wgmma": launch(1, 16, 2048, 64, tile=(128, 64), warps=4, stages=3),
    "fused_attention@full": launch(16, 16, 2048, 64, tile=(128, 64), warps=8, stages=3),
}


def reference(q, k, v):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    scores = q.float() @ k.float().transpose(1, 2) / math.sqrt(q.shape[-1])
    return (scores.softmax(-1) @ v.float()).half()
