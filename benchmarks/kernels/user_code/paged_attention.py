"""Attention of one new token a sequence over a paged cache, fp16, with grouped query heads.

``q`` is (sequences, kv heads * GROUP, D).  The caches are (pages, PAGE, kv heads, D); ``table`` has
the pages of each sequence.  Each sequence is divided among several blocks; a block writes its
partial output and the maximum and sum of its softmax.  A block without tokens writes zeros.
"""

# ruff: noqa: N803
from __future__ import annotations

import math

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def paged_decode(
    q_ptr, k_cache, v_cache, table_ptr, length_ptr, o_ptr, high_ptr, total_ptr,
    scale_log2, max_pages,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads, splits = tl.num_programs(1), tl.num_programs(2)
    length = tl.load(length_ptr + sequence) + 1
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, length)
    # tl.dot needs 16 rows; the rows beyond GROUP are zero.
    offs_g = tl.arange(0, 16)
    offs_d = tl.arange(0, D)
    heads = (sequence * kv_heads + kv_head) * GROUP + offs_g
    real = offs_g < GROUP
    q = tl.load(q_ptr + heads[:, None] * D + offs_d[None, :], mask=real[:, None], other=0.0)
    high = tl.full((16,), -float("inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        seen = offs_n < end
        page = tl.load(table_ptr + sequence * max_pages + offs_n // PAGE, mask=seen, other=0)
        token = (page * PAGE + offs_n % PAGE) * kv_heads + kv_head
        place = token[:, None] * D + offs_d[None, :]
        k = tl.load(k_cache + place, mask=seen[:, None], other=0.0)
        v = tl.load(v_cache + place, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_high = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp2(scores - new_high[:, None])
        rescale = tl.exp2(high - new_high)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(tl.float16), v, acc * rescale[:, None])
        high = new_high
    o = tl.where(total[:, None] > 0.0, acc / tl.maximum(total, 1e-30)[:, None], 0.0)
    row = heads * splits + split
    tl.store(o_ptr + row[:, None] * D + offs_d[None, :], o, mask=real[:, None])
    tl.store(high_ptr + row, tl.maximum(high, -1e30), mask=real)
    tl.store(total_ptr + row, total, mask=real)


def launch(
    sequences: int, kv_heads: int, group: int, d: int, pages: int, splits: int,
    *, tile: tuple[int], warps: int, stages: int,
) -> LaunchSpec:  # fmt: skip
    """Launch for sequences of up to ``pages`` pages of 16 tokens; ``tile``: tokens of one step."""
    page_size, heads = 16, kv_heads * group
    cache = (sequences * pages, page_size, kv_heads, d)
    return LaunchSpec(
        grid=(sequences, kv_heads, splits),
        args=(
            Buffer(name="q_ptr", dtype="f16", shape=(sequences, heads, d)),
            Buffer(name="k_cache", dtype="f16", shape=cache),
            Buffer(name="v_cache", dtype="f16", shape=cache),
            Buffer(
                name="table_ptr", dtype="i32", shape=(sequences, pages), bound=sequences * pages
            ),
            Buffer(name="length_ptr", dtype="i32", shape=(sequences,), bound=pages * page_size),
            Buffer(name="o_ptr", dtype="f32", shape=(sequences, heads, splits, d), role="out"),
            Buffer(name="high_ptr", dtype="f32", shape=(sequences, heads, splits), role="out"),
            Buffer(name="total_ptr", dtype="f32", shape=(sequences, heads, splits), role="out"),
            Scalar(name="scale_log2", dtype="f32", value=math.log2(math.e) / math.sqrt(d)),
            Scalar(name="max_pages", dtype="i32", value=pages),
            Constant(name="GROUP", constant=group),
            Constant(name="D", constant=d),
            Constant(name="PAGE", constant=page_size),
            Constant(name="BLOCK_N", constant=tile[0]),
        ),
        num_warps=warps,
        num_stages=stages,
        # On average half of the pages are in use.
        flops=2.0 * sequences * heads * d * pages * page_size,
    )


def reference(torch, given):  # type: ignore[no-untyped-def]
    """The attention output in PyTorch; with one split, ``o_ptr`` is it."""
    outputs = []
    for n, q in enumerate(given["q_ptr"].float()):
        length = int(given["length_ptr"][n]) + 1
        pages = given["table_ptr"][n].long()
        k, v = (
            given[name].float()[pages].flatten(0, 1)[:length].repeat_interleave(
                given["GROUP"], 1
            )
            for name in ("k_cache", "v_cache")
        )  # fmt: skip
        weights = torch.einsum("hd,nhd->hn", q, k).mul(given["scale_log2"] * math.log(2)).softmax(1)
        outputs.append(torch.einsum("hn,nhd->hd", weights, v)[:, None])
    return {"o_ptr": torch.stack(outputs)}
