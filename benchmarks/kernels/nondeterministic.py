"""A kernel with atomic additions: its output bits depend on their order and cannot be compared."""

# ruff: noqa: N803  (compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec


@triton.jit
def atomic_sum(total, x, BLOCK: tl.constexpr):
    """total[column] = sum over all rows of x[row, column], in any order."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * BLOCK + columns)
    tl.atomic_add(total + columns, values)


LAUNCHES = {
    "atomic_sum": LaunchSpec(
        grid=(2048, 1, 1),
        args=(
            Buffer(name="total", dtype="f32", shape=(128,), role="inout"),
            Buffer(name="x", dtype="f32", shape=(2048, 128), low=0.5, high=1.5),
            Constant(name="BLOCK", constant=128),
        ),
    )
}
