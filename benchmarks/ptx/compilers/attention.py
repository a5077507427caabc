"""Decode and varlen attention as two public reports of slower compilers describe it."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.kernels.new_projects.arguments import given, launch, out
from nostall.core import LaunchSpec


@triton.jit
def sparse_decode(
    q_ptr, latent_ptr, index_ptr, o_ptr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, D)
    q = tl.load(q_ptr + (row * HEADS + h[:, None]) * D + d[None, :])
    acc = tl.zeros((BLOCK_H, D), tl.float32)
    peak = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, TOKENS, BLOCK_N):
        slot = tl.load(index_ptr + row * TOKENS + start + n)
        latent = tl.load(latent_ptr + slot[:, None].to(tl.int64) * D + d[None, :])
        score = tl.dot(q, tl.trans(latent)) * 0.0625
        score = tl.where(slot[None, :] >= 0, score, float("-inf"))
        new = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - new[:, None])
        scale = tl.exp2(peak - new)
        total = total * scale + tl.sum(p, 1)
        acc = acc * scale[:, None] + tl.dot(p.to(tl.bfloat16), latent)
        peak = new
    acc = acc / total[:, None]
    tl.store(o_ptr + (row * HEADS + h[:, None]) * D + d[None, :], acc.to(tl.bfloat16))


def launch_sparse_decode(
    batch: int, heads: int, tokens: int, d: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """Decode of a sparse attention: each row gathers ``tokens`` latents of ``d`` values."""
    return launch(
        (batch, heads // tile[0]),
        (
            given("q_ptr", "bf16", batch, heads, d),
            given("latent_ptr", "bf16", 2 * tokens, d),
            given("index_ptr", "i32", batch, tokens, bound=2 * tokens),
            out("o_ptr", "bf16", batch, heads, d),
        ),
        warps, stages, HEADS=heads, TOKENS=tokens, D=d, BLOCK_H=tile[0], BLOCK_N=tile[1],
    )  # fmt: skip


@triton.jit
def varlen_attention(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, o_ptr,
    Q: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGES: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(1), tl.program_id(2)
    kv = head // (HEADS // KV_HEADS)
    length = tl.load(length_ptr + sequence)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, d = tl.arange(0, PAGE), tl.arange(0, D)
    rows = ((sequence * Q + m[:, None]) * HEADS + head) * D + d[None, :]
    q = tl.load(q_ptr + rows, mask=m[:, None] < Q, other=0.0)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    peak = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for page in range(tl.cdiv(length, PAGE)):
        block = tl.load(table_ptr + sequence * PAGES + page).to(tl.int64)
        slots = ((block * PAGE + n) * KV_HEADS + kv) * D
        key = page * PAGE + n
        k = tl.load(k_ptr + slots[None, :] + d[:, None], mask=key[None, :] < length, other=0.0)
        v = tl.load(v_ptr + slots[:, None] + d[None, :], mask=key[:, None] < length, other=0.0)
        seen = (key[None, :] <= length - Q + m[:, None]) & (key[None, :] < length)
        score = tl.where(seen, tl.dot(q, k) * 0.0884, -1e30)
        new = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2((score - new[:, None]) * 1.4427)
        scale = tl.exp2((peak - new) * 1.4427)
        total = total * scale + tl.sum(p, 1)
        acc = acc * scale[:, None] + tl.dot(p.to(tl.float16), v)
        peak = new
    acc = acc / total[:, None]
    tl.store(o_ptr + rows, acc.to(tl.float16), mask=m[:, None] < Q)


def launch_varlen_attention(
    batch: int, q: int, heads: int, d: int, page: int,
    *, tile: tuple[int], warps: int, stages: int,
) -> LaunchSpec:  # fmt: skip
    """Causal attention to a paged cache of 2,048 tokens, four query heads to one of the cache."""
    kv_heads, pages = heads // 4, 2048 // page
    return launch(
        (-(-q // tile[0]), batch, heads),
        (
            given("q_ptr", "f16", batch, q, heads, d),
            given("k_ptr", "f16", batch * pages, page, kv_heads, d),
            given("v_ptr", "f16", batch * pages, page, kv_heads, d),
            given("table_ptr", "i32", batch, pages, bound=batch * pages),
            given("length_ptr", "i32", batch, bound=2048),
            out("o_ptr", "f16", batch, q, heads, d),
        ),
        warps, stages, Q=q, HEADS=heads, KV_HEADS=kv_heads, PAGES=pages, PAGE=page, D=d,
        BLOCK_M=tile[0],
    )  # fmt: skip
