"""The GEMM kernel y = x W^T + bias for any number of rows M (Triton).

Virtual padding (arXiv:2412.18106, section 6): a tile has ``ROWS`` rows on chip, and rows at or
behind M are neither read nor written. Few rows leave SMs idle, so the sum over K is split: each
program adds a part, and the last program of a tile to arrive adds the parts in the order of K. The
result does not depend on which program is the last.
"""
# ruff: noqa: N803 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(program, rows, columns, GROUP: tl.constexpr):
    """Row and column of a program's tile; GROUP tiles of rows share the columns in the L2 cache."""
    width = GROUP * columns
    first = program // width * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + program % width % height, program % width // height


@triton.jit
def add_parts(partial, part_stride, offsets, mask, like, SPLIT: tl.constexpr):
    """The sum of the parts of a tile, in the order of K."""
    total = tl.zeros_like(like)
    for part in tl.static_range(SPLIT):
        at = partial + part * part_stride + offsets
        total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def multiply(
    x, weight, row, column, begin, end, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """The products of a tile over K from ``begin`` to ``end``: (ROWS, COLUMNS), or transposed.

    ``begin``, ``end`` and K are multiples of DEPTH.
    """
    rows = row * ROWS + tl.arange(0, ROWS)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    inside = columns < N
    from_x = rows.to(tl.int64) * K
    from_weight = columns.to(tl.int64) * K
    if SWAP:
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(begin, end, DEPTH):
        # Parts are multiples of DEPTH, so K needs no mask; a mask along K would narrow the loads.
        at = k + depth
        left = tl.load(x + from_x[:, None] + at[None, :], mask=(rows < M)[:, None], other=0.0)
        right = tl.load(
            weight + from_weight[:, None] + at[None, :], mask=inside[:, None], other=0.0
        )
        if SWAP:
            # Weights as the left operand: tensor cores take 64 of its rows, and few of the other's.
            total = tl.dot(right, tl.trans(left), total)
        else:
            total = tl.dot(left, tl.trans(right), total)
    return total


@triton.jit(do_not_specialize=["M"])
def smooth_gemm(
    x, weight, bias, y, partial, arrivals, M, N, K, stride_y,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """y = x W^T + bias; x is (M, K), ``weight`` (N, K), both contiguous; ``stride_y``: rows of y.

    Axis 0 of the grid has the tiles, axis 1 the parts of K. ``partial`` is fp32 (SPLIT, M, N), and
    ``arrivals`` one int32 for each tile, 0 between launches.
    """
    program = tl.program_id(0)
    part = tl.program_id(1)
    row, column = tile_of(program, tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS), GROUP)
    share = tl.cdiv(K, SPLIT * DEPTH) * DEPTH
    begin = part * share
    end = tl.minimum(begin + share, K)
    total = multiply(x, weight, row, column, begin, end, M, N, K, ROWS, COLUMNS, DEPTH, SWAP)
    rows = row * ROWS + tl.arange(0, ROWS)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)
    if SWAP:
        mask = (columns < N)[:, None] & (rows < M)[None, :]
        offsets = rows.to(tl.int64)[None, :] * N + columns[:, None]
        to_y = rows.to(tl.int64)[None, :] * stride_y + columns[:, None]
    else:
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
        to_y = rows.to(tl.int64)[:, None] * stride_y + columns[None, :]
    is_last = True
    if SPLIT > 1:
        size = M.to(tl.int64) * N
        tl.store(partial + part * size + offsets, total, mask=mask)
        tl.debug_barrier()  # all threads have stored before the count of arrivals grows
        is_last = tl.atomic_add(arrivals + program, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            total = add_parts(partial, size, offsets, mask, total, SPLIT)
            tl.store(arrivals + program, 0)
    if is_last:
        if BIAS:
            added = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
            if SWAP:
                total += added[:, None]
            else:
                total += added[None, :]
        tl.store(y + to_y, total.to(y.dtype.element_ty), mask=mask)
