"""Matrix product of fp16 activations with int4 weights, dequantised in the kernel.

``c = a @ ((w - zero) * scale)``.  ``w`` is (K, N) with eight values of a column in one word, scales
and zero points are for groups of rows.  M, N and K are multiples of the tile, and BLOCK_K divides
the group.
"""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def int4_gemm(
    a_ptr, w_ptr, scale_ptr, zero_ptr, c_ptr, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    shift = (offs_k % 8 * 4)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + offs_k
        a = tl.load(a_ptr + offs_m[:, None] * K + k[None, :])
        words = tl.load(w_ptr + (k // 8)[:, None] * N + offs_n[None, :])
        group = start // GROUP
        scale = tl.load(scale_ptr + group * N + offs_n)
        zeros = tl.load(zero_ptr + group * (N // 8) + offs_n // 8)
        zero = (zeros >> (offs_n % 8 * 4)) & 0xF
        w = (((words >> shift) & 0xF) - zero[None, :]).to(tl.float16) * scale[None, :]
        acc = tl.dot(a, w, acc)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.float16))


def launch(
    m: int, n: int, k: int, *, tile: tuple[int, int, int], warps: int, stages: int
) -> LaunchSpec:
    """Launch for an (m, k) by (k, n) product with groups of 128 rows."""
    block_m, block_n, block_k = tile
    group = 128
    if m % block_m or n % block_n or k % group or group % block_k:
        raise ValueError(f"({m}, {n}, {k}) is not a multiple of {tile} and groups of {group}")
    words = 1 << 31
    return LaunchSpec(
        grid=(m // block_m, n // block_n, 1),
        args=(
            Buffer(name="a_ptr", dtype="f16", shape=(m, k)),
            Buffer(name="w_ptr", dtype="i32", shape=(k // 8, n), bound=words - 1),
            Buffer(name="scale_ptr", dtype="f16", shape=(k // group, n), low=0.01, high=0.1),
            Buffer(name="zero_ptr", dtype="i32", shape=(k // group, n // 8), bound=words - 1),
            Buffer(name="c_ptr", dtype="f16", shape=(m, n), role="out"),
            Scalar(name="N", dtype="i32", value=n),
            Scalar(name="K", dtype="i32", value=k),
            Constant(name="GROUP", constant=group),
            Constant(name="BLOCK_M", constant=block_m),
            Constant(name="BLOCK_N", constant=block_n),
            Constant(name="BLOCK_K", constant=block_k),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=2.0 * m * n * k,
    )


def reference(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    shift = torch.arange(8, dtype=torch.int32) * 4
    w = (given["w_ptr"][:, None, :] >> shift[None, :, None]).bitwise_and(15).flatten(0, 1)
    zero = (given["zero_ptr"][:, :, None] >> shift).bitwise_and(15).flatten(1)
    scale = given["scale_ptr"]
    repeated = (x.repeat_interleave(given["GROUP"], 0) for x in (zero, scale.float()))
    zero, scale = repeated
    return {"c_ptr": given["a_ptr"].float() @ ((w - zero).float() * scale)}
