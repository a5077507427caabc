"""Batched matrix product: ``c[i] = a[i] @ b[i]``, fp16 in and out, fp32 sums."""

# ruff: noqa: N803  (sizes and compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def batched_gemm(
    a_ptr, b_ptr, c_ptr,
    M, N, K,
    stride_ab, stride_am, stride_bb, stride_bk, stride_cb, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Sizes are multiples of the tile; rows are contiguous.
    tile = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    tiles_n = N // BLOCK_N
    offs_m = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_tile = a_ptr + batch * stride_ab + offs_m[:, None] * stride_am + offs_k[None, :]
    b_tile = b_ptr + batch * stride_bb + offs_k[:, None] * stride_bk + offs_n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a_tile), tl.load(b_tile), acc)
        a_tile += BLOCK_K
        b_tile += BLOCK_K * stride_bk
    c_tile = c_ptr + batch * stride_cb + offs_m[:, None] * stride_cm + offs_n[None, :]
    tl.store(c_tile, acc.to(tl.float16))


def launch(
    batch: int, m: int, n: int, k: int, *, tile: tuple[int, int, int], warps: int, stages: int
) -> LaunchSpec:
    """Launch for contiguous ``a`` (batch, m, k), ``b`` (batch, k, n) and ``c`` (batch, m, n)."""
    block_m, block_n, block_k = tile
    if m % block_m or n % block_n or k % block_k:
        raise ValueError(f"sizes {(m, n, k)} must be multiples of the tile {tile}")
    scalars = {
        "M": m, "N": n, "K": k,
        "stride_ab": m * k, "stride_am": k, "stride_bb": k * n,
        "stride_bk": n, "stride_cb": m * n, "stride_cm": n,
    }  # fmt: skip
    return LaunchSpec(
        grid=((m // block_m) * (n // block_n), batch, 1),
        args=(
            Buffer(name="a_ptr", dtype="f16", shape=(batch, m, k)),
            Buffer(name="b_ptr", dtype="f16", shape=(batch, k, n)),
            Buffer(name="c_ptr", dtype="f16", shape=(batch, m, n), role="out"),
            *(Scalar(name=key, dtype="i32", value=value) for key, value in scalars.items()),
            Constant(name="BLOCK_M", constant=block_m),
            Constant(name="BLOCK_N", constant=block_n),
            Constant(name="BLOCK_K", constant=block_k),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=2.0 * batch * m * n * k,
        trips={0: k // block_k},
    )


SMALL = (64, 64, 32)
LAUNCHES = {
    "batched_gemm": launch(4, 512, 512, 2048, tile=SMALL, warps=4, stages=4),
    "batched_gemm@b2k512": launch(2, 512, 512, 512, tile=SMALL, warps=4, stages=4),
    "batched_gemm@b2k4096": launch(2, 512, 512, 4096, tile=SMALL, warps=4, stages=4),
    "batched_gemm@b4k1024": launch(4, 512, 512, 1024, tile=SMALL, warps=4, stages=4),
    "batched_gemm@mma": launch(4, 512, 512, 2048, tile=SMALL, warps=2, stages=4),
    "batched_gemm@wgmma": launch(4, 512, 512, 2048, tile=(128, 128, 64), warps=4, stages=3),
    "batched_gemm@full": launch(16, 2048, 2048, 2048, tile=(128, 128, 64), warps=8, stages=3),
}


def reference(a, b):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    import torch

    return torch.bmm(a.float(), b.float()).half()
