"""The reduction kernel: adds the partial results of tiles whose keys were split (Triton).

The splits of a tile are added in an order that their number alone decides, so that every run gives
the same bits.
"""
# ruff: noqa: N803, N806 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reduce_rows(
    reduction, chunk, first_dim, out, partial, partial_log_sums, query_starts, stride_token,
    stride_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write SPAN dimensions of ROWS rows of one reduction, from ``chunk * ROWS`` on.

    Loads PARTS splits at once.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tokens = tl.load(reduction + 2)
    if chunk * ROWS < tokens * GROUP:
        sequence = tl.load(reduction)
        first_token = tl.load(reduction + 1)
        kv_head = tl.load(reduction + 3)
        first_row = tl.load(reduction + 4)
        splits = tl.load(reduction + 5)
        query_start = tl.load(query_starts + sequence)
        rows = chunk * ROWS + tl.arange(0, ROWS)
        dims = first_dim + tl.arange(0, SPAN)
        live = rows < tokens * GROUP
        both = live[:, None] & (dims < D)[None, :]
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        accumulated = tl.zeros([ROWS, SPAN], tl.float32)
        for first in range(0, splits, PARTS):
            split = first + tl.arange(0, PARTS)
            row = first_row.to(tl.int64) + split[:, None] * tokens * GROUP + rows[None, :]
            present = (split < splits)[:, None] & live[None, :]
            log_sums = tl.load(partial_log_sums + row, mask=present, other=float("-inf"))
            parts = tl.load(
                partial + row[:, :, None] * D + dims[None, None, :],
                mask=present[:, :, None] & (dims < D)[None, None, :],
                other=0.0,
            )
            now_largest = tl.maximum(largest, tl.max(log_sums, 0))
            shift = tl.where(now_largest == float("-inf"), 0.0, now_largest)
            decay = tl.exp2(largest - shift)
            weights = tl.exp2(log_sums - shift[None, :])
            total = total * decay + tl.sum(weights, 0)
            accumulated = accumulated * decay[:, None] + tl.sum(parts * weights[:, :, None], 0)
            largest = now_largest
        result = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
        at = (query_start + first_token + rows // GROUP).to(tl.int64) * stride_token
        pointers = out + (at + (kv_head * GROUP + rows % GROUP) * stride_head)[:, None]
        tl.store(pointers + dims[None, :], result.to(out.dtype.element_ty), mask=both)


@triton.jit
def reduce_splits(
    out, partial, partial_log_sums, reductions, counts, query_starts, stride_token, stride_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run all reductions.

    Axis 0 of the grid strides over them, axis 1 has their chunks of rows, axis 2 their spans of
    dimensions.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    count = tl.load(counts + 1)
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        reduce_rows(
            reductions + index * 6, tl.program_id(1), tl.program_id(2) * SPAN, out, partial,
            partial_log_sums, query_starts, stride_token, stride_head, HEADS, KV_HEADS, D, SPAN,
            ROWS, PARTS,
        )  # fmt: skip
