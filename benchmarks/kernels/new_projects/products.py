"""Kernels with matrix products: scattered experts, packed weights, losses, adapters, sparsity."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.kernels.new_projects.arguments import given, launch, out, require
from nostall.core import LaunchSpec


@triton.jit
def scattered_experts(
    x_ptr, w_ptr, index_ptr, expert_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, FAN_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    source = tl.load(index_ptr + m) // FAN_OUT
    expert = tl.load(expert_ptr + block)
    x = x_ptr + source[:, None] * K + k[None, :]
    w = w_ptr + expert * K * N + k[:, None] * N + n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(x), tl.load(w), acc)
        x += BLOCK_K
        w += BLOCK_K * N
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(tl.bfloat16))


def launch_scattered_experts(
    rows: int, n: int, k: int, experts: int, fan_out: int,
    *, tile: tuple[int, int, int], warps: int, stages: int,
) -> LaunchSpec:  # fmt: skip
    """ScatterMoE's scatter2scatter: rows gathered by an index, one expert a block of rows."""
    block_m, block_n, block_k = tile
    require(rows % block_m == 0 and n % block_n == 0, f"({rows}, {n}) is not a multiple of {tile}")
    return launch(
        (rows // block_m, n // block_n),
        (
            given("x_ptr", "bf16", rows // fan_out, k),
            given("w_ptr", "bf16", experts, k, n),
            given("index_ptr", "i32", rows, bound=rows),
            given("expert_ptr", "i32", rows // block_m, bound=experts),
            out("y_ptr", "bf16", rows, n),
        ),
        warps, stages, N=n, K=k, FAN_OUT=fan_out,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip


@triton.jit
def zero_point_gemm(
    a_ptr, q_ptr, scale_ptr, zero_ptr, c_ptr,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    shift = (k % 8) * 4
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :])
        packed = tl.load(q_ptr + ((start + k) // 8)[:, None] * N + n[None, :])
        group = start // GROUP
        scale = tl.load(scale_ptr + group * N + n)
        zeros = tl.load(zero_ptr + group * (N // 8) + n // 8) >> ((n % 8) * 4)
        b = ((packed >> shift[:, None]) & 15) - (zeros & 15)[None, :]
        acc = tl.dot(a, (b.to(tl.float16) * scale[None, :]), acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(tl.float16))


def launch_zero_point_gemm(
    m: int, n: int, k: int, group: int,
    *, tile: tuple[int, int, int], warps: int, stages: int,
) -> LaunchSpec:  # fmt: skip
    """GPTQ-triton's product: eight 4-bit weights in 32 bits, packed zero points for each group."""
    block_m, block_n, block_k = tile
    require(m == block_m and group % block_k == 0, f"({m}, {group}) does not fit {tile}")
    return launch(
        (n // block_n,),
        (
            given("a_ptr", "f16", m, k),
            given("q_ptr", "i32", k // 8, n, bound=2**31 - 1),
            given("scale_ptr", "f16", k // group, n, low=0.01, high=0.02),
            given("zero_ptr", "i32", k // group, n // 8, bound=2**31 - 1),
            out("c_ptr", "f16", m, n),
        ),
        warps, stages, N=n, K=k, GROUP=group,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip


@triton.jit
def linear_lse(
    e_ptr, c_ptr, lse_ptr,
    V: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    e = e_ptr + m[:, None] * D + k[None, :]
    c = c_ptr + n[None, :] * D + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, D, BLOCK_K):
        acc = tl.dot(tl.load(e), tl.load(c), acc)
        e += BLOCK_K
        c += BLOCK_K
    acc = 30.0 * (2.0 / (1.0 + tl.exp(-acc / 15.0)) - 1.0)
    peak = tl.max(acc, 1)
    lse = peak + tl.log(tl.sum(tl.exp(acc - peak[:, None]), 1))
    tl.store(lse_ptr + m * (V // BLOCK_N) + block, lse)


def launch_linear_lse(
    tokens: int, v: int, d: int, *, tile: tuple[int, int, int], warps: int, stages: int
) -> LaunchSpec:
    """Cut cross-entropy, forward: a block of logits with soft cap, reduced at once."""
    block_m, block_n, block_k = tile
    return launch(
        (tokens // block_m, v // block_n),
        (
            given("e_ptr", "bf16", tokens, d),
            given("c_ptr", "bf16", v, d, low=-0.1, high=0.1),
            out("lse_ptr", "f32", tokens, v // block_n),
        ),
        warps, stages, V=v, D=d, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip


@triton.jit
def block_sparse_sdd(
    a_ptr, b_ptr, row_ptr, column_ptr, c_ptr,
    K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    m = tl.load(row_ptr + at) * BLOCK + i
    n = tl.load(column_ptr + at) * BLOCK + i
    a = a_ptr + m[:, None] * K + k[None, :]
    b = b_ptr + n[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BLOCK_K
        b += BLOCK_K
    tl.store(c_ptr + at * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :], acc.to(tl.bfloat16))


def launch_block_sparse_sdd(
    blocks: int, rows: int, k: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """MegaBlocks' sampled product: dense times dense, only the blocks of a sparse matrix."""
    block, block_k = tile
    return launch(
        (blocks,),
        (
            given("a_ptr", "bf16", rows, k),
            given("b_ptr", "bf16", rows, k),
            given("row_ptr", "i32", blocks, bound=rows // block),
            given("column_ptr", "i32", blocks, bound=rows // block),
            out("c_ptr", "bf16", blocks, block, block),
        ),
        warps, stages, K=k, BLOCK=block, BLOCK_K=block_k,
    )  # fmt: skip


@triton.jit
def linear_gelu(
    x_ptr, w_ptr, bias_ptr, pre_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, GROUP_M: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    wide = GROUP_M * (N // BLOCK_N)
    first = pid // wide * GROUP_M
    size = tl.minimum(ROWS - first, GROUP_M)
    m = (first + pid % wide % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid % wide // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + m[:, None] * K + k[None, :]
    w = w_ptr + n[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + tl.load(bias_ptr + n).to(tl.float32)[None, :]
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(x), tl.load(w), acc)
        x += BLOCK_K
        w += BLOCK_K
    at = m[:, None] * N + n[None, :]
    tl.store(pre_ptr + at, acc.to(tl.float16))
    y = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    tl.store(y_ptr + at, y.to(tl.float16))


def launch_linear_gelu(
    m: int, n: int, k: int, *, tile: tuple[int, int, int], warps: int, stages: int
) -> LaunchSpec:
    """Kernl's linear layer: bias, exact GELU, and the input of the GELU for the backward pass."""
    block_m, block_n, block_k = tile
    return launch(
        (m // block_m * (n // block_n),),
        (
            given("x_ptr", "f16", m, k),
            given("w_ptr", "f16", n, k, low=-0.1, high=0.1),
            given("bias_ptr", "f16", n),
            out("pre_ptr", "f16", m, n),
            out("y_ptr", "f16", m, n),
        ),
        warps, stages, N=n, K=k, GROUP_M=8, ROWS=m // block_m,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip


@triton.jit
def adapter_shrink(
    x_ptr, a_ptr, adapter_ptr, y_ptr,
    K: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.arange(0, RANK)
    k = split * (K // SPLITS) + tl.arange(0, BLOCK_K)
    adapter = tl.load(adapter_ptr + block)
    x = x_ptr + m[:, None] * K + k[None, :]
    a = a_ptr + adapter * RANK * K + r[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, RANK), tl.float32)
    for _ in range(0, K // SPLITS, BLOCK_K):
        acc = tl.dot(tl.load(x), tl.load(a), acc)
        x += BLOCK_K
        a += BLOCK_K
    rows = split * tl.num_programs(0) * BLOCK_M + m
    tl.store(y_ptr + rows[:, None] * RANK + r[None, :], acc)


def launch_adapter_shrink(
    tokens: int, k: int, rank: int, adapters: int, splits: int,
    *, tile: tuple[int, int], warps: int, stages: int,
) -> LaunchSpec:  # fmt: skip
    """Punica's and S-LoRA's shrink: tokens of several adapters, the long dimension split."""
    block_m, block_k = tile
    return launch(
        (tokens // block_m, splits),
        (
            given("x_ptr", "bf16", tokens, k),
            given("a_ptr", "bf16", adapters, rank, k),
            given("adapter_ptr", "i32", tokens // block_m, bound=adapters),
            out("y_ptr", "f32", splits, tokens, rank),
        ),
        warps, stages, K=k, RANK=rank, SPLITS=splits, BLOCK_M=block_m, BLOCK_K=block_k,
    )  # fmt: skip


@triton.jit
def packed_gemv(
    x_ptr, q_ptr, scale_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    first = split * (K // SPLITS)
    for start in range(first, first + K // SPLITS, BLOCK_K):
        x = tl.load(x_ptr + start + k).to(tl.float32)
        packed = tl.load(q_ptr + ((start + k) // 4)[:, None] * N + n[None, :])
        value = ((packed >> ((k % 4) * 8)[:, None]) & 255).to(tl.float32) - 128.0
        acc += tl.sum(x[:, None] * value, 0)
    tl.store(y_ptr + split * N + n, acc * tl.load(scale_ptr + n))


def launch_packed_gemv(
    n: int, k: int, splits: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """GemLite's matrix-vector product: four 8-bit weights in 32 bits, the sum split."""
    block_n, block_k = tile
    return launch(
        (n // block_n, splits),
        (
            given("x_ptr", "f16", k),
            given("q_ptr", "i32", k // 4, n, bound=2**31 - 1),
            given("scale_ptr", "f32", n, low=0.01, high=0.02),
            out("y_ptr", "f32", splits, n),
        ),
        warps, stages, N=n, K=k, SPLITS=splits, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip


@triton.jit
def ternary_gemm(
    a_ptr, w_ptr, a_scale_ptr, w_scale_ptr, c_ptr,
    N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for part in range(4):
        for start in range(0, K // 4, BLOCK_K):
            a = tl.load(a_ptr + m[:, None] * K + (part * (K // 4) + start + k)[None, :])
            packed = tl.load(w_ptr + n[None, :] * (K // 4) + (start + k)[:, None])
            w = ((packed >> (2 * part)) & 3).to(tl.int8) - 1
            acc = tl.dot(a, w, acc)
    scale = tl.load(a_scale_ptr + m)[:, None] * tl.load(w_scale_ptr)
    tl.store(c_ptr + m[:, None] * N + n[None, :], (acc.to(tl.float32) * scale).to(tl.bfloat16))


def launch_ternary_gemm(
    m: int, n: int, k: int, *, tile: tuple[int, int, int], warps: int, stages: int
) -> LaunchSpec:
    """BitNet's product: int8 activations, four ternary weights in a byte."""
    block_m, block_n, block_k = tile
    return launch(
        (n // block_n, m // block_m),
        (
            given("a_ptr", "i8", m, k, bound=127),
            given("w_ptr", "u8", n, k // 4, bound=255),
            given("a_scale_ptr", "f32", m, low=0.001, high=0.002),
            given("w_scale_ptr", "f32", 1, low=0.01, high=0.02),
            out("c_ptr", "bf16", m, n),
        ),
        warps, stages, N=n, K=k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip


@triton.jit
def codebook_gemv(
    x_ptr, code_ptr, book_ptr, scale_ptr, y_ptr,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    lane = tl.arange(0, 8)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, K // 8, BLOCK_G):
        code = tl.load(code_ptr + n[:, None] * (K // 8) + (start + g)[None, :])
        weight = tl.load(book_ptr + code[:, :, None] * 8 + lane[None, None, :]).to(tl.float32)
        x = tl.load(x_ptr + (start + g)[:, None] * 8 + lane[None, :]).to(tl.float32)
        acc += tl.sum(tl.sum(weight * x[None, :, :], 2), 1)
    tl.store(y_ptr + n, (acc * tl.load(scale_ptr + n)).to(tl.float16))


def launch_codebook_gemv(
    n: int, k: int, codes: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """AQLM's matrix-vector product: a code for eight weights, looked up in a codebook."""
    return launch(
        (n // tile[0],),
        (
            given("x_ptr", "f16", k),
            given("code_ptr", "i32", n, k // 8, bound=codes),
            given("book_ptr", "f16", codes, 8),
            given("scale_ptr", "f32", n),
            out("y_ptr", "f16", n),
        ),
        warps, stages, K=k, BLOCK_N=tile[0], BLOCK_G=tile[1],
    )  # fmt: skip
