"""Grouped matrix product of a mixture of experts, fp16.

Rows of ``a`` are gathered by ``token``; each tile of BLOCK_M gathered rows has one expert, whose
weights are ``b[expert]``, (K, N).  Each gathered row is scaled by its routing weight.
"""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def moe_gemm(
    a_ptr, b_ptr, c_ptr, token_ptr, expert_ptr, weight_ptr, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    # Blocks of one group of row tiles run together, so that they share the weights in L2.
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.num_programs(0) // tiles_n
    in_group = GROUP_M * tiles_n
    group = tl.program_id(0) // in_group
    rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + tl.program_id(0) % in_group % rows
    tile_n = tl.program_id(0) % in_group // rows
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    token = tl.load(token_ptr + offs_m)
    expert = tl.load(expert_ptr + tile_m).to(tl.int64)
    a_tile = a_ptr + token[:, None] * K + offs_k[None, :]
    b_tile = b_ptr + expert * N * K + offs_k[:, None] * N + offs_n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a_tile), tl.load(b_tile), acc)
        a_tile += BLOCK_K
        b_tile += BLOCK_K * N
    acc *= tl.load(weight_ptr + offs_m)[:, None]
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.float16))


def launch(
    tokens: int, rows: int, n: int, k: int, experts: int,
    *, tile: tuple[int, int, int], warps: int, stages: int,
) -> LaunchSpec:  # fmt: skip
    """Launch for ``rows`` gathered rows of ``tokens`` tokens."""
    block_m, block_n, block_k = tile
    if rows % block_m or n % block_n or k % block_k:
        raise ValueError(f"({rows}, {n}, {k}) is not a multiple of {tile}")
    return LaunchSpec(
        grid=(rows // block_m * (n // block_n), 1, 1),
        args=(
            Buffer(name="a_ptr", dtype="f16", shape=(tokens, k)),
            Buffer(name="b_ptr", dtype="f16", shape=(experts, k, n)),
            Buffer(name="c_ptr", dtype="f16", shape=(rows, n), role="out"),
            Buffer(name="token_ptr", dtype="i32", shape=(rows,), bound=tokens),
            Buffer(name="expert_ptr", dtype="i32", shape=(rows // block_m,), bound=experts),
            Buffer(name="weight_ptr", dtype="f32", shape=(rows,), low=0.0),
            Scalar(name="N", dtype="i32", value=n),
            Scalar(name="K", dtype="i32", value=k),
            Constant(name="BLOCK_M", constant=block_m),
            Constant(name="BLOCK_N", constant=block_n),
            Constant(name="BLOCK_K", constant=block_k),
            Constant(name="GROUP_M", constant=4),
        ),
        num_warps=warps,
        num_stages=stages,
        flops=2.0 * rows * n * k,
    )


def reference(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    a = given["a_ptr"].float()[given["token_ptr"].long()]
    tiles = a.reshape(-1, given["BLOCK_M"], a.shape[1])
    c = torch.bmm(tiles, given["b_ptr"].float()[given["expert_ptr"].long()]).flatten(0, 1)
    return {"c_ptr": c * given["weight_ptr"][:, None]}
