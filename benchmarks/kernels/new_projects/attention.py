"""Kernels of attention: int8 keys, pair bias, SiLU, selected blocks, decode, linear attention."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.kernels.new_projects.arguments import given, launch, out, require
from nostall.core import LaunchSpec


@triton.jit
def int8_attention(
    q_ptr, k_ptr, v_ptr, qs_ptr, ks_ptr, o_ptr,
    N: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + head * N * D + m[:, None] * D + d[None, :])
    qs = tl.load(qs_ptr + head * (N // BLOCK_M) + block)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_N):
        k = tl.load(k_ptr + head * N * D + (start + n)[None, :] * D + d[:, None])
        ks = tl.load(ks_ptr + head * (N // BLOCK_N) + start // BLOCK_N)
        score = tl.dot(q, k).to(tl.float32) * (qs * ks)
        new = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - new[:, None])
        scale = tl.exp2(peak - new)
        total = total * scale + tl.sum(p, 1)
        v = tl.load(v_ptr + head * N * D + (start + n)[:, None] * D + d[None, :])
        acc = acc * scale[:, None] + tl.dot(p.to(tl.float16), v)
        peak = new
    acc = acc / total[:, None]
    tl.store(o_ptr + head * N * D + m[:, None] * D + d[None, :], acc.to(tl.float16))


def launch_int8_attention(
    heads: int, n: int, d: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """SageAttention's first version: int8 scores with one scale a block, f16 values."""
    m_tile, n_tile = tile
    return launch(
        (n // m_tile, heads),
        (
            given("q_ptr", "i8", heads, n, d, bound=127),
            given("k_ptr", "i8", heads, n, d, bound=127),
            given("v_ptr", "f16", heads, n, d),
            given("qs_ptr", "f32", heads, n // m_tile, low=0.001, high=0.002),
            given("ks_ptr", "f32", heads, n // n_tile, low=0.001, high=0.002),
            out("o_ptr", "f16", heads, n, d),
        ),
        warps, stages, N=n, D=d, BLOCK_M=m_tile, BLOCK_N=n_tile,
    )  # fmt: skip


@triton.jit
def pair_bias_attention(
    q_ptr, k_ptr, v_ptr, bias_ptr, gate_ptr, o_ptr,
    N: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    rows = head * N * D + m[:, None] * D + d[None, :]
    q = tl.load(q_ptr + rows)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_N):
        k = tl.load(k_ptr + head * N * D + (start + n)[None, :] * D + d[:, None])
        bias = tl.load(bias_ptr + m[:, None] * N + (start + n)[None, :]).to(tl.float32)
        score = tl.dot(q, k) * 0.25 + bias
        new = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp(score - new[:, None])
        scale = tl.exp(peak - new)
        total = total * scale + tl.sum(p, 1)
        v = tl.load(v_ptr + head * N * D + (start + n)[:, None] * D + d[None, :])
        acc = acc * scale[:, None] + tl.dot(p.to(tl.bfloat16), v)
        peak = new
    gate = tl.load(gate_ptr + rows).to(tl.float32)
    acc = acc / total[:, None] / (1.0 + tl.exp(-gate))
    tl.store(o_ptr + rows, acc.to(tl.bfloat16))


def launch_pair_bias_attention(
    heads: int, n: int, d: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """OpenFold's Evoformer attention: a pair bias on the scores, a sigmoid gate on the output."""
    return launch(
        (n // tile[0], heads),
        (
            *(given(f"{x}_ptr", "bf16", heads, n, d) for x in "qkv"),
            given("bias_ptr", "bf16", n, n),
            given("gate_ptr", "bf16", heads, n, d),
            out("o_ptr", "bf16", heads, n, d),
        ),
        warps, stages, N=n, D=d, BLOCK_M=tile[0], BLOCK_N=tile[1],
    )  # fmt: skip


@triton.jit
def silu_attention(
    q_ptr, k_ptr, v_ptr, bias_ptr, o_ptr,
    N: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + head * N * D + m[:, None] * D + d[None, :])
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, (block + 1) * BLOCK_M, BLOCK_N):
        column = start + n
        k = tl.load(k_ptr + head * N * D + column[None, :] * D + d[:, None])
        distance = m[:, None] - column[None, :]
        bias = tl.load(bias_ptr + tl.maximum(distance, 0))
        score = tl.dot(q, k) * 0.125 + bias
        score = score / (1.0 + tl.exp(-score)) * (1.0 / N)
        score = tl.where(distance >= 0, score, 0.0)
        v = tl.load(v_ptr + head * N * D + column[:, None] * D + d[None, :])
        acc += tl.dot(score.to(tl.bfloat16), v)
    tl.store(o_ptr + head * N * D + m[:, None] * D + d[None, :], acc.to(tl.bfloat16))


def launch_silu_attention(
    heads: int, n: int, d: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """HSTU of Generative Recommenders: causal, SiLU in place of softmax, relative bias."""
    return launch(
        (n // tile[0], heads),
        (
            *(given(f"{x}_ptr", "bf16", heads, n, d) for x in "qkv"),
            given("bias_ptr", "f32", n),
            out("o_ptr", "bf16", heads, n, d),
        ),
        warps, stages, N=n, D=d, BLOCK_M=tile[0], BLOCK_N=tile[1],
    )  # fmt: skip


@triton.jit
def selected_attention(
    q_ptr, k_ptr, v_ptr, block_ptr, o_ptr,
    N: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    h = tl.arange(0, HEADS)
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    rows = token * HEADS * D + h[:, None] * D + d[None, :]
    q = tl.load(q_ptr + rows)
    acc = tl.zeros((HEADS, D), tl.float32)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for chosen in range(CHOSEN):
        start = tl.load(block_ptr + token * CHOSEN + chosen) * BLOCK
        k = tl.load(k_ptr + (start + n)[None, :] * D + d[:, None])
        score = tl.dot(q, k) * 0.1275
        new = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - new[:, None])
        scale = tl.exp2(peak - new)
        total = total * scale + tl.sum(p, 1)
        v = tl.load(v_ptr + (start + n)[:, None] * D + d[None, :])
        acc = acc * scale[:, None] + tl.dot(p.to(tl.bfloat16), v)
        peak = new
    tl.store(o_ptr + rows, (acc / total[:, None]).to(tl.bfloat16))


def launch_selected_attention(
    tokens: int, n: int, d: int, heads: int, chosen: int,
    *, tile: tuple[int], warps: int, stages: int,
) -> LaunchSpec:  # fmt: skip
    """Native sparse attention, selected branch: the query heads of a group share their blocks."""
    (block,) = tile
    return launch(
        (tokens,),
        (
            given("q_ptr", "bf16", tokens, heads, d),
            given("k_ptr", "bf16", n, d),
            given("v_ptr", "bf16", n, d),
            given("block_ptr", "i32", tokens, chosen, bound=n // block),
            out("o_ptr", "bf16", tokens, heads, d),
        ),
        warps, stages, N=n, D=d, HEADS=heads, CHOSEN=chosen, BLOCK=block,
    )  # fmt: skip


@triton.jit
def token_attention(
    q_ptr, k_ptr, v_ptr, slot_ptr, o_ptr, lse_ptr,
    N: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + request * D + d).to(tl.float32)
    acc = tl.zeros((D,), tl.float32)
    peak = float("-inf")
    total = 0.0
    first = split * (N // SPLITS)
    for start in range(first, first + N // SPLITS, BLOCK):
        slot = tl.load(slot_ptr + request * N + start + n)
        k = tl.load(k_ptr + slot[:, None] * D + d[None, :]).to(tl.float32)
        score = tl.sum(q[None, :] * k, 1) * 0.0884
        new = tl.maximum(peak, tl.max(score, 0))
        p = tl.exp(score - new)
        scale = tl.exp(peak - new)
        v = tl.load(v_ptr + slot[:, None] * D + d[None, :]).to(tl.float32)
        acc = acc * scale + tl.sum(p[:, None] * v, 0)
        total = total * scale + tl.sum(p, 0)
        peak = new
    at = request * SPLITS + split
    tl.store(o_ptr + at * D + d, acc / total)
    tl.store(lse_ptr + at, peak + tl.log(total))


def launch_token_attention(
    requests: int, n: int, d: int, splits: int, *, tile: tuple[int], warps: int, stages: int
) -> LaunchSpec:
    """LightLLM's token attention: one cache slot a token, parts of the context a block."""
    slots = 4 * n
    return launch(
        (requests, splits),
        (
            given("q_ptr", "f16", requests, d),
            given("k_ptr", "f16", slots, d),
            given("v_ptr", "f16", slots, d),
            given("slot_ptr", "i32", requests, n, bound=slots),
            out("o_ptr", "f32", requests, splits, d),
            out("lse_ptr", "f32", requests, splits),
        ),
        warps, stages, N=n, D=d, SPLITS=splits, BLOCK=tile[0],
    )  # fmt: skip


@triton.jit
def retention(
    q_ptr, k_ptr, v_ptr, decay_ptr, o_ptr,
    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    column = tl.program_id(1) * 64 + tl.arange(0, 64)
    t = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    rate = tl.load(decay_ptr + head)
    distance = (t[:, None] - t[None, :]).to(tl.float32)
    mask = tl.where(distance >= 0, tl.exp2(distance * rate), 0.0)
    ahead = tl.exp2((t + 1).to(tl.float32) * rate)
    behind = tl.exp2((BLOCK - 1 - t).to(tl.float32) * rate)
    whole = tl.exp2(BLOCK * rate)
    state = tl.zeros((D, 64), tl.float32)
    for start in range(0, N, BLOCK):
        rows = head * N * D + (start + t)[:, None] * D
        q = tl.load(q_ptr + rows + d[None, :])
        k = tl.load(k_ptr + head * N * D + (start + t)[None, :] * D + d[:, None])
        v = tl.load(v_ptr + rows + column[None, :])
        inner = (tl.dot(q, k) * mask).to(tl.bfloat16)
        o = tl.dot(inner, v) + tl.dot(q, state.to(tl.bfloat16)) * ahead[:, None]
        faded = (k.to(tl.float32) * behind[None, :]).to(tl.bfloat16)
        state = state * whole + tl.dot(faded, v)
        tl.store(o_ptr + rows + column[None, :], o.to(tl.bfloat16))


def launch_retention(
    heads: int, n: int, d: int, *, tile: tuple[int], warps: int, stages: int
) -> LaunchSpec:
    """RetNet's chunked retention: decayed scores in a chunk, a state between chunks."""
    require(n % tile[0] == 0 and d % 64 == 0, f"({n}, {d}) is not a multiple of {tile}, 64")
    return launch(
        (heads, d // 64),
        (
            *(given(f"{x}_ptr", "bf16", heads, n, d) for x in "qkv"),
            given("decay_ptr", "f32", heads, low=-0.05, high=-0.01),
            out("o_ptr", "bf16", heads, n, d),
        ),
        warps, stages, N=n, D=d, BLOCK=tile[0],
    )  # fmt: skip


@triton.jit
def lightning_attention(
    q_ptr, k_ptr, v_ptr, state_ptr, slope_ptr, o_ptr,
    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    i = tl.arange(0, INNER)
    slope = tl.load(slope_ptr + head)
    state = tl.load(state_ptr + (head * (N // BLOCK) + block) * D * D + d[:, None] * D + d[None, :])
    for at in range(0, BLOCK, INNER):
        rows = head * N * D + (block * BLOCK + at + i)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + rows)
        fade = tl.exp2(slope * (at + i + 1).to(tl.float32))
        acc = tl.dot(q, state) * fade[:, None]
        for start in range(0, at + INNER, INNER):
            column = block * BLOCK + start + i
            k = tl.load(k_ptr + head * N * D + column[None, :] * D + d[:, None])
            v = tl.load(v_ptr + head * N * D + column[:, None] * D + d[None, :])
            distance = (at + i)[:, None] - (start + i)[None, :]
            decay = tl.where(distance >= 0, tl.exp2(slope * distance.to(tl.float32)), 0.0)
            acc += tl.dot((tl.dot(q, k) * decay).to(tl.bfloat16), v)
        tl.store(o_ptr + rows, acc.to(tl.bfloat16))


def launch_lightning_attention(
    heads: int, n: int, d: int, block: int, *, tile: tuple[int], warps: int, stages: int
) -> LaunchSpec:
    """MiniMax's lightning attention: a block with the state before it, in smaller blocks."""
    require(block % tile[0] == 0, f"{block} is not a multiple of {tile}")
    return launch(
        (n // block, heads),
        (
            *(given(f"{x}_ptr", "bf16", heads, n, d) for x in "qkv"),
            given("state_ptr", "bf16", heads, n // block, d, d),
            given("slope_ptr", "f32", heads, low=-0.05, high=-0.01),
            out("o_ptr", "bf16", heads, n, d),
        ),
        warps, stages, N=n, D=d, BLOCK=block, INNER=tile[0],
    )  # fmt: skip
