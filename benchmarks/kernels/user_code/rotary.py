"""Rotary position embedding of queries and keys, fp16: one block a token, halves rotated."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec


@triton.jit
def _rotate(x_ptr, y_ptr, token, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr):
    heads = tl.arange(0, HEADS)[:, None]
    offs = (token * HEADS + heads) * 2 * HALF + tl.arange(0, HALF)[None, :]
    left = tl.load(x_ptr + offs).to(tl.float32)
    right = tl.load(x_ptr + offs + HALF).to(tl.float32)
    tl.store(y_ptr + offs, (left * cos - right * sin).to(tl.float16))
    tl.store(y_ptr + offs + HALF, (right * cos + left * sin).to(tl.float16))


@triton.jit
def rotary(
    q_ptr, k_ptr, cos_ptr, sin_ptr, position_ptr, q_out, k_out,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    position = tl.load(position_ptr + token)
    columns = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + position * HALF + columns)[None, :]
    sin = tl.load(sin_ptr + position * HALF + columns)[None, :]
    _rotate(q_ptr, q_out, token, cos, sin, HEADS, HALF)
    _rotate(k_ptr, k_out, token, cos, sin, KV_HEADS, HALF)


def launch(tokens: int, heads: int, kv_heads: int, d: int, *, warps: int) -> LaunchSpec:
    """Launch for ``tokens`` tokens with ``heads`` query heads of size ``d``."""
    q_shape, k_shape, table = (tokens, heads, d), (tokens, kv_heads, d), (4096, d // 2)
    return LaunchSpec(
        grid=(tokens, 1, 1),
        args=(
            Buffer(name="q_ptr", dtype="f16", shape=q_shape),
            Buffer(name="k_ptr", dtype="f16", shape=k_shape),
            Buffer(name="cos_ptr", dtype="f32", shape=table),
            Buffer(name="sin_ptr", dtype="f32", shape=table),
            Buffer(name="position_ptr", dtype="i32", shape=(tokens,), bound=table[0]),
            Buffer(name="q_out", dtype="f16", shape=q_shape, role="out"),
            Buffer(name="k_out", dtype="f16", shape=k_shape, role="out"),
            Constant(name="HEADS", constant=heads),
            Constant(name="KV_HEADS", constant=kv_heads),
            Constant(name="HALF", constant=d // 2),
        ),
        num_warps=warps,
        flops=3.0 * tokens * (heads + kv_heads) * d,
    )


def reference(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    position = given["position_ptr"].long()
    cos, sin = (given[name][position][:, None, :] for name in ("cos_ptr", "sin_ptr"))

    def rotate(x):  # type: ignore[no-untyped-def]
        left, right = x.float().chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    return {"q_out": rotate(given["q_ptr"]), "k_out": rotate(given["k_ptr"])}
