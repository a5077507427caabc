"""Row-wise softmax, one row a block: ``y = exp(x - max(x)) / sum(exp(x - max(x)))``, fp32."""

# ruff: noqa: N803  (sizes and compile-time values are capitals, as is usual in Triton)
from __future__ import annotations

import triton
import triton.language as tl

from nostall.core import Buffer, Constant, LaunchSpec, Scalar


@triton.jit
def softmax(y_ptr, x_ptr, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + offs, mask=offs < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row + offs, e / tl.sum(e, 0), mask=offs < columns)


def launch(rows: int, columns: int, *, warps: int) -> LaunchSpec:
    """Launch for contiguous ``x`` and ``y`` (rows, columns)."""
    return LaunchSpec(
        grid=(rows, 1, 1),
        args=(
            Buffer(name="y_ptr", dtype="f32", shape=(rows, columns), role="out"),
            Buffer(name="x_ptr", dtype="f32", shape=(rows, columns), low=-4.0, high=4.0),
            Scalar(name="columns", dtype="i32", value=columns),
            Scalar(name="stride", dtype="i32", value=columns),
            Constant(name="BLOCK", constant=triton.next_power_of_2(columns)),
        ),
        num_warps=warps,
        # maximum, difference, exponential, sum and quotient: five operations an element
        flops=5.0 * rows * columns,
    )


LAUNCHES = {
    "softmax": launch(1024, 16384, warps=16),
    "softmax@512x32000": launch(512, 32000, warps=32),
    "softmax@64x2048": launch(64, 2048, warps=4),
    "softmax@128x512": launch(128, 512, warps=1),
    "softmax@full": launch(16384, 8192, warps=8),
}


def reference(x):  # type: ignore[no-untyped-def]
    """The same in PyTorch."""
    return x.softmax(-1)
