"""Kernels that the attention benchmark tries."""

from __future__ import annotations

from nostall.serving.attention.config import KernelConfig, TileConfig


def make_kernel(
    tiles: list[tuple[int, int, int, str]], warps: int, registers: int, programs: int
) -> KernelConfig:
    """A kernel of tiles (rows, keys, stages, masks), warps, registers and programs on an SM."""
    return KernelConfig(tuple(TileConfig(*tile) for tile in tiles), warps, registers, programs)  # type: ignore[arg-type]


KERNELS: dict[str, KernelConfig] = {
    # Three heights, for every batch.
    "w8x2 n32": make_kernel(
        [(16, 64, 4, "all"), (64, 32, 4, "all"), (128, 32, 4, "branch")], 8, 128, 2
    ),
    "w8x2 n64": make_kernel(
        [(16, 64, 4, "all"), (64, 64, 2, "all"), (128, 64, 2, "branch")], 8, 128, 2
    ),
    "w8x1 n128": make_kernel(
        [(16, 128, 3, "all"), (64, 128, 3, "all"), (128, 128, 2, "branch")], 8, 0, 1
    ),
    "w8x1 n128 s3": make_kernel(
        [(16, 128, 3, "all"), (64, 128, 3, "all"), (128, 128, 3, "branch")], 8, 0, 1
    ),
    "w8x1 n64": make_kernel(
        [(16, 128, 3, "all"), (64, 64, 4, "all"), (128, 64, 4, "branch")], 8, 0, 1
    ),
    "w4x2 n64": make_kernel(
        [(16, 64, 4, "all"), (64, 64, 3, "all"), (128, 64, 2, "branch")], 4, 0, 2
    ),
    "w4x2 n32": make_kernel(
        [(16, 64, 4, "all"), (64, 64, 3, "all"), (128, 32, 4, "branch")], 4, 0, 2
    ),
    # Two heights.
    "w4x2 m64": make_kernel([(16, 64, 4, "all"), (64, 64, 3, "branch")], 4, 0, 2),
    "w8x2 m64": make_kernel([(16, 64, 4, "all"), (64, 32, 4, "branch")], 8, 128, 2),
    "w4x3 m64": make_kernel([(16, 64, 3, "all"), (64, 32, 3, "all")], 4, 168, 3),
    "w4x1 n128": make_kernel([(16, 128, 4, "all"), (64, 128, 3, "all")], 4, 0, 1),
    # One height, for decodes only.
    "d w4x3 n64": make_kernel([(16, 64, 3, "all")], 4, 168, 3),
    "d w4x4 n32": make_kernel([(16, 32, 4, "all")], 4, 128, 4),
    "d w2x3 n64": make_kernel([(16, 64, 3, "all")], 2, 0, 3),
    "d w2x4 n32": make_kernel([(16, 32, 4, "all")], 2, 0, 4),
    "d w1x4 n32": make_kernel([(16, 32, 4, "all")], 1, 0, 4),
    "d w8x1 n128": make_kernel([(16, 128, 4, "all")], 8, 0, 1),
    # One height, for prefills only.
    "p w8x1 n128": make_kernel([(128, 128, 3, "branch")], 8, 0, 1),
    "p w8x1 n128 tail": make_kernel([(128, 128, 3, "tail")], 8, 0, 1),
    "p w8x1 n64": make_kernel([(128, 64, 4, "branch")], 8, 0, 1),
    "p w4x2 n64": make_kernel([(128, 64, 2, "branch")], 4, 0, 2),
    "p w8x2 n64": make_kernel([(128, 64, 2, "branch")], 8, 128, 2),
    "p w4x3 m64": make_kernel([(64, 32, 3, "branch")], 4, 168, 3),
    "p w4x2 m64": make_kernel([(64, 64, 3, "branch")], 4, 0, 2),
    "p w4x2 m64 tail": make_kernel([(64, 64, 3, "tail")], 4, 0, 2),
    # Two kernels that fit on one SM at the same time.
    "s wide": make_kernel([(128, 64, 3, "branch")], 8, 168, 1),
    "s narrow": make_kernel([(16, 64, 3, "all"), (64, 32, 3, "all")], 4, 168, 1),
}
"""Kernels by name: warps x programs of an SM, keys of an iteration."""
