"""Causal attention forward: ``o = softmax(scale * q @ k.T + mask) @ v`` for each head, fp16.

Keys before the diagonal tile need no mask; they and the diagonal have a loop each.  ``q``, ``k``,
``v`` and ``o`` are (Z * H, N_CTX, D), contiguous; N_CTX is a multiple of the tiles.  ``lse`` is the
row-wise logarithm of the softmax sum that a backward pass needs.
"""

# ruff: noqa: N803  (sizes and compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import math

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def _attend(
    q, k_ptr, v_ptr, highest, total, acc, offs_m, scale_log2, start, stop,
    D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offs_n = start + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    k_tile = k_ptr + offs_n[None, :] * D + offs_d[:, None]
    v_tile = v_ptr + offs_n[:, None] * D + offs_d[None, :]
    for first in range(start, stop, BLOCK_N):
        scores = tl.dot(q, tl.load(k_tile)) * scale_log2
        if MASKED:
            seen = offs_m[:, None] >= first + tl.arange(0, BLOCK_N)[None, :]
            scores = tl.where(seen, scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v_ptr.dtype.element_ty), tl.load(v_tile), acc)
        highest = new_highest
        k_tile += BLOCK_N * D
        v_tile += BLOCK_N * D
    return highest, total, acc


@triton.jit
def flash_attention(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    scale_log2,
    N_CTX,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The longest rows first, so that the last wave is made of short ones.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    offset = head.to(tl.int64) * N_CTX * D
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + offset + offs_m[:, None] * D + offs_d[None, :])
    highest = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    diagonal = tile * BLOCK_M
    highest, total, acc = _attend(
        q, k_ptr + offset, v_ptr + offset, highest, total, acc, offs_m, scale_log2,
        0, diagonal, D, BLOCK_N, False,
    )  # fmt: skip
    highest, total, acc = _attend(
        q, k_ptr + offset, v_ptr + offset, highest, total, acc, offs_m, scale_log2,
        diagonal, diagonal + BLOCK_M, D, BLOCK_N, True,
    )  # fmt: skip
    o = acc / total[:, None]
    tl.store(o_ptr + offset + offs_m[:, None] * D + offs_d[None, :], o.to(tl.float16))
    tl.store(lse_ptr + head * N_CTX + offs_m, highest + tl.log2(total))


def launch(
    z: int, h: int, ctx: int, d: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """Launch for ``z`` sequences of ``h`` heads, length ``ctx``, head size ``d``."""
    block_m, block_n = tile
    if ctx % block_m or block_m % block_n:
        raise ValueError(f"ctx={ctx} and tile={tile} must divide one another")
    shape = (z * h, ctx, d)
    return LaunchSpec(
        grid=(ctx // block_m, z * h, 1),
        args=(
            Buffer(name="q_ptr", dtype="f16", shape=shape),
            Buffer(name="k_ptr", dtype="f16", shape=shape),
            Buffer(name="v_ptr", dtype="f16", shape=shape),
            Buffer(name="o_ptr", dtype="f16", shape=shape, role="out"),
            Buffer(name="lse_ptr", dtype="f32", shape=(z * h, ctx), role="out"),
            Scalar(name="scale_log2", dtype="f32", value=math.log2(math.e) / math.sqrt(d)),
            Scalar(name="N_CTX", dtype="i32", value=ctx),
            Constant(name="D", constant=d),
            Constant(name="BLOCK_M", constant=block_m),
            Constant(name="BLOCK_N", constant=block_n),
        ),
        num_warps=warps,
        num_stages=stages,
        # Half of the score matrix and its diagonal; two products of 2 * d each.
        flops=4.0 * z * h * d * ctx * (ctx + 1) / 2,
    )


LAUNCHES = {
    "flash_attention": launch(1, 4, 8192, 64, tile=(128, 64), warps=4, stages=3),
    "flash_attention@d128": launch(1, 4, 8192, 128, tile=(128, 64), warps=8, stages=3),
    "flash_attention@ctx16384": launch(1, 4, 16384, 64, tile=(128, 64), warps=4, stages=3),
    "flash_attention@mma": launch(1, 4, 8192, 64, tile=(32, 32), warps=2, stages=3),
    "flash_attention@short": launch(1, 4, 1024, 64, tile=(64, 32), warps=4, stages=2),
    "flash_attention@full": launch(4, 32, 4096, 128, tile=(128, 64), warps=8, stages=3),
}


def reference(q, k, v):  # type: ignore[no-untyped-def]
    """The same in PyTorch: the output and, in base 2, the logarithm of the softmax sum."""
    import torch

    scores = q.float() @ k.float().transpose(1, 2) / math.sqrt(q.shape[-1])
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v.float()).half(), scores.logsumexp(-1) / math.log(2)
