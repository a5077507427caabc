"""Matrix product with a leaky ReLU: ``c = leaky_relu(a @ b)``, fp16 in and out, fp32 sums.

The default launch and the ``k…`` variants have few blocks with long loops, so a warp that waits is
not hidden by other blocks.  ``wgmma`` has tiles that use Hopper's warpgroup instructions, ``mma``
has half as many warps, which keeps Hopper on the older warp-wide instructions.
"""

# ruff: noqa: N803  (sizes and compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def gemm_leakyrelu(
    a_ptr, b_ptr, c_ptr,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # Blocks that run together share rows of a and columns of b: GROUP rows of tiles at a time.
    block = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = block // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP)
    inside = block % (GROUP * tiles_n)
    tile_m = first_m + inside % rows
    tile_n = inside // rows

    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_tile = a_ptr + (offs_m % M)[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_tile = b_ptr + offs_k[:, None] * stride_bk + (offs_n % N)[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            a = tl.load(a_tile)
            b = tl.load(b_tile)
        else:
            left = K - k * BLOCK_K
            a = tl.load(a_tile, mask=offs_k[None, :] < left, other=0.0)
            b = tl.load(b_tile, mask=offs_k[:, None] < left, other=0.0)
        acc = tl.dot(a, b, acc)
        a_tile += BLOCK_K * stride_ak
        b_tile += BLOCK_K * stride_bk
    acc = tl.where(acc > 0, acc, 0.01 * acc)

    c_tile = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(c_tile, acc.to(tl.float16), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


def launch(
    m: int, n: int, k: int, *, tile: tuple[int, int, int], warps: int, stages: int
) -> LaunchSpec:
    """Launch for row-major ``a`` (m, k), ``b`` (k, n) and ``c`` (m, n)."""
    block_m, block_n, block_k = tile
    values = {"M": m, "N": n, "K": k}
    strides = {
        "stride_am": k, "stride_ak": 1, "stride_bk": n,
        "stride_bn": 1, "stride_cm": n, "stride_cn": 1,
    }  # fmt: skip
    return LaunchSpec(
        grid=(triton.cdiv(m, block_m) * triton.cdiv(n, block_n), 1, 1),
        args=(
            Buffer(name="a_ptr", dtype="f16", shape=(m, k)),
            Buffer(name="b_ptr", dtype="f16", shape=(k, n)),
            Buffer(name="c_ptr", dtype="f16", shape=(m, n), role="out"),
            *(Scalar(name=key, dtype="i32", value=v) for key, v in (values | strides).items()),
            Constant(name="BLOCK_M", constant=block_m),
            Constant(name="BLOCK_N", constant=block_n),
            Constant(name="BLOCK_K", constant=block_k),
            Constant(name="GROUP", constant=8),
            Constant(name="EVEN_K", constant=k % block_k == 0),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=2.0 * m * n * k,
        trips={0: triton.cdiv(k, block_k)},
    )


SMALL = (64, 64, 32)
LAUNCHES = {
    "gemm_leakyrelu": launch(512, 512, 2048, tile=SMALL, warps=4, stages=4),
    "gemm_leakyrelu@k512": launch(512, 512, 512, tile=SMALL, warps=4, stages=4),
    "gemm_leakyrelu@k1024": launch(512, 512, 1024, tile=SMALL, warps=4, stages=4),
    "gemm_leakyrelu@k4096": launch(512, 512, 4096, tile=SMALL, warps=4, stages=4),
    "gemm_leakyrelu@mma": launch(512, 512, 2048, tile=SMALL, warps=2, stages=4),
    "gemm_leakyrelu@mma32": launch(512, 512, 2048, tile=(32, 32, 32), warps=2, stages=4),
    "gemm_leakyrelu@ragged": launch(500, 510, 1000, tile=SMALL, warps=4, stages=3),
    "gemm_leakyrelu@wgmma": launch(512, 512, 2048, tile=(128, 128, 64), warps=4, stages=3),
    "gemm_leakyrelu@full": launch(4096, 4096, 4096, tile=(128, 128, 64), warps=8, stages=3),
}


def reference(a, b):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    import torch

    return torch.nn.functional.leaky_relu(a.float() @ b.float(), 0.01).half()
