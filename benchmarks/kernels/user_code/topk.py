"""The largest K values of each row and their columns, by a bitonic sort of packed keys."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec


@triton.jit
def topk(x_ptr, value_ptr, index_ptr, COLUMNS: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, COLUMNS)
    bits = tl.load(x_ptr + row * COLUMNS + offs).to(tl.int32, bitcast=True)
    # Order of signed integers as that of the floating-point values.
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    # Equal values: the smaller column first.
    packed = (key.to(tl.int64) << 32) | (COLUMNS - 1 - offs).to(tl.int64)
    packed = tl.sort(packed, descending=True)
    key = (packed >> 32).to(tl.int32)
    value = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    column = COLUMNS - 1 - (packed & 0xFFFFFFFF).to(tl.int32)
    tl.store(value_ptr + row * K + offs, value, mask=offs < K)
    tl.store(index_ptr + row * K + offs, column, mask=offs < K)


def launch(rows: int, columns: int, k: int, *, warps: int) -> LaunchSpec:
    """Launch for (rows, columns) values; ``columns`` is a power of two."""
    return LaunchSpec(
        grid=(rows, 1, 1),
        args=(
            Buffer(name="x_ptr", dtype="f32", shape=(rows, columns)),
            Buffer(name="value_ptr", dtype="f32", shape=(rows, k), role="out"),
            Buffer(name="index_ptr", dtype="i32", shape=(rows, k), role="out"),
            Constant(name="COLUMNS", constant=columns),
            Constant(name="K", constant=k),
        ),
        num_warps=warps,
        # Not floating-point: comparisons of a bitonic sort.
        flops=float(rows * columns * columns.bit_length() ** 2 / 2),
    )


def reference(torch, given):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    values, columns = given["x_ptr"].topk(given["K"], 1)
    return {"value_ptr": values, "index_ptr": columns}
