"""One kernel in three sizes, for benchmarks of how times grow with the number of instructions.

The kernel repeats a step that loads, exchanges data between warps, computes and stores, so that the
number of each kind of dependence grows with the number of steps. Its result has no use.
"""

# ruff: noqa: N803  (compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def steps(out, x, y, columns, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        x_step = tl.load(x + step * columns + offs, mask=mask, other=0.0)
        y_step = tl.load(y + step * columns + offs, mask=mask, other=0.0)
        total = total * 0.5 + tl.exp(x_step) * y_step
        tl.store(out + step * columns + offs, total - tl.sum(total), mask=mask)


def _launch(count: int, columns: int = 4096, block: int = 2048) -> LaunchSpec:
    def buffer(name: str, role: str) -> Buffer:
        return Buffer(name=name, dtype="f32", shape=(count, columns), role=role)

    return LaunchSpec(
        grid=(columns // block, 1, 1),
        num_warps=4,
        args=[
            buffer("out", "out"),
            buffer("x", "in"),
            buffer("y", "in"),
            Scalar(name="columns", dtype="i32", value=columns),
            Constant(name="STEPS", constant=count),
            Constant(name="BLOCK", constant=block),
        ],
    )


LAUNCHES = {f"steps@{count}": _launch(count) for count in (3, 13, 51)}
"""About 500, 2,500 and 10,000 instructions for sm_90 with Triton 3.9."""
