"""Matrix product of fp8 values with a scale for each block of 128, as DeepSeek-V3 has it.

``c = (a * a_scale) @ (b * b_scale).T`` in bf16.  ``a`` is (M, K) with a scale for 128 columns of a
row; ``b`` is (N, K) with a scale for 128 x 128 values.  M, N and K are multiples of the tile.
"""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar

_SCALED = 128


@triton.jit
def fp8_gemm(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_tile = a_ptr + offs_m[:, None] * K + offs_k[None, :]
    b_tile = b_ptr + offs_n[None, :] * K + offs_k[:, None]
    a_scales = a_scale_ptr + offs_m * (K // 128)
    b_scales = b_scale_ptr + offs_n // 128 * (K // 128)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(K // BLOCK_K):
        product = tl.dot(tl.load(a_tile), tl.load(b_tile))
        scales = tl.load(a_scales + step)[:, None] * tl.load(b_scales + step)[None, :]
        acc += product * scales
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16))


def launch(m: int, n: int, k: int, *, tile: tuple[int, int], warps: int, stages: int) -> LaunchSpec:
    """Launch for an (m, k) by (k, n) product; ``tile``: rows and columns of a block."""
    block_m, block_n = tile
    if m % block_m or n % block_n or k % _SCALED or n % _SCALED:
        raise ValueError(f"({m}, {n}, {k}) is not a multiple of {tile} and of {_SCALED}")
    blocks = k // _SCALED
    return LaunchSpec(
        grid=(m // block_m, n // block_n, 1),
        args=(
            Buffer(name="a_ptr", dtype="f8e4m3", shape=(m, k)),
            Buffer(name="b_ptr", dtype="f8e4m3", shape=(n, k)),
            Buffer(name="a_scale_ptr", dtype="f32", shape=(m, blocks), low=0.5, high=2.0),
            Buffer(name="b_scale_ptr", dtype="f32", shape=(n // 128, blocks), low=0.5, high=2.0),
            Buffer(name="c_ptr", dtype="bf16", shape=(m, n), role="out"),
            Scalar(name="M", dtype="i32", value=m),
            Scalar(name="N", dtype="i32", value=n),
            Scalar(name="K", dtype="i32", value=k),
            Constant(name="BLOCK_M", constant=block_m),
            Constant(name="BLOCK_N", constant=block_n),
            Constant(name="BLOCK_K", constant=_SCALED),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=2.0 * m * n * k,
    )
