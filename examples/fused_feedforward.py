"""Gated feed-forward, first half: ``y = silu(x @ w1) * (x @ w3)``, both products in one loop."""

# ruff: noqa: N803  (sizes and compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def fused_feedforward(
    x_ptr, w1_ptr, w3_ptr, y_ptr,
    M, N, K,
    stride_xm, stride_wk, stride_ym,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    offs_m = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + (offs_m % M)[:, None] * stride_xm + offs_k[None, :]
    w_offs = offs_k[:, None] * stride_wk + (offs_n % N)[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        x = tl.load(x_tile)
        gate = tl.dot(x, tl.load(w1_ptr + k * BLOCK_K * stride_wk + w_offs), gate)
        up = tl.dot(x, tl.load(w3_ptr + k * BLOCK_K * stride_wk + w_offs), up)
        x_tile += BLOCK_K
    y = gate * tl.sigmoid(gate) * up
    y_tile = y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(y_tile, y.to(tl.float16), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


def launch(
    m: int, n: int, k: int, *, tile: tuple[int, int, int], warps: int, stages: int
) -> LaunchSpec:
    """Launch for row-major ``x`` (m, k), ``w1`` and ``w3`` (k, n) and ``y`` (m, n)."""
    block_m, block_n, block_k = tile
    if k % block_k:
        raise ValueError(f"k={k} must be a multiple of {block_k}")
    scalars = {"M": m, "N": n, "K": k, "stride_xm": k, "stride_wk": n, "stride_ym": n}
    return LaunchSpec(
        grid=(triton.cdiv(m, block_m) * triton.cdiv(n, block_n), 1, 1),
        args=(
            Buffer(name="x_ptr", dtype="f16", shape=(m, k)),
            Buffer(name="w1_ptr", dtype="f16", shape=(k, n), low=-0.1, high=0.1),
            Buffer(name="w3_ptr", dtype="f16", shape=(k, n), low=-0.1, high=0.1),
            Buffer(name="y_ptr", dtype="f16", shape=(m, n), role="out"),
            *(Scalar(name=key, dtype="i32", value=value) for key, value in scalars.items()),
            Constant(name="BLOCK_M", constant=block_m),
            Constant(name="BLOCK_N", constant=block_n),
            Constant(name="BLOCK_K", constant=block_k),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=2.0 * 2.0 * m * n * k,
        trips={0: k // block_k},
    )


SMALL = (64, 64, 32)
LAUNCHES = {
    "fused_feedforward": launch(512, 512, 2048, tile=SMALL, warps=4, stages=3),
    "fused_feedforward@k512": launch(512, 512, 512, tile=SMALL, warps=4, stages=3),
    "fused_feedforward@k4096": launch(512, 512, 4096, tile=SMALL, warps=4, stages=3),
    "fused_feedforward@mma": launch(512, 512, 2048, tile=(32, 64, 32), warps=2, stages=3),
    "fused_feedforward@wgmma": launch(512, 512, 2048, tile=(128, 64, 64), warps=4, stages=3),
    "fused_feedforward@full": launch(4096, 4096, 4096, tile=(128, 64, 64), warps=8, stages=3),
}


def reference(x, w1, w3):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    import torch

    gate = x.float() @ w1.float()
    return (torch.nn.functional.silu(gate) * (x.float() @ w3.float())).half()
