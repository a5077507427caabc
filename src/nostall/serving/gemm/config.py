"""Shapes of linear layers, configurations of the Triton kernel, and entries of the table over M."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nostall.core.errors import BadInput

ALIGN = 16
"""N and K are multiples of this (paper, section 6): 16-byte loads of 8 bf16 values, and tiles."""
DTYPES = ("bfloat16", "float16")


class LinearShape(NamedTuple):
    """A linear layer y = x W^T; M changes with each step."""

    columns: int
    """N, the outputs."""
    depth: int
    """K, the inputs."""
    dtype: str = "bfloat16"

    def check(self) -> LinearShape:
        """This shape; raises :class:`BadInput` if the kernel cannot compute it."""
        if min(self.columns, self.depth) < 1 or self.columns % ALIGN or self.depth % ALIGN:
            raise BadInput(
                f"a linear layer of N={self.columns} and K={self.depth}; allowed are multiples of "
                f"{ALIGN}; leave this layer to cuBLAS"
            )
        if self.dtype not in DTYPES:
            raise BadInput(f"dtype {self.dtype}; allowed are {', '.join(DTYPES)}")
        return self


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One configuration of :func:`nostall.serving.gemm.kernel.smooth_gemm`."""

    rows: int
    columns: int
    depth: int
    split: int = 1
    """Parts of K."""
    warps: int = 4
    stages: int = 4
    swap: bool = False
    """Whether weights are the left operand of the products."""
    group: int = 8
    """Row tiles that run next to each other."""

    def fits(self, shape: LinearShape) -> bool:
        """Whether K is a multiple of the depth and has a tile for each part, as the kernel needs.

        Sizes of tiles and the number of warps are powers of 2.
        """
        sizes = (self.rows, self.columns, self.depth, self.warps)
        if not all(size > 0 and size & (size - 1) == 0 for size in sizes):
            return False
        return shape.depth % self.depth == 0 and 1 <= self.split <= shape.depth // self.depth

    def grid(self, m: int, shape: LinearShape) -> tuple[int, int]:
        """Tiles and parts of a product with ``m`` rows."""
        tiles = -(-m // self.rows) * -(-shape.columns // self.columns)
        return tiles, self.split


def candidates(m: int, shape: LinearShape, sms: int) -> Iterator[GemmConfig]:
    """Configurations that are worth a measurement for ``m`` rows on a GPU of ``sms`` SMs.

    Tiles with more than twice the rows waste tensor cores; a split that leaves more than four
    programs an SM, or a grid that leaves half of the SMs idle although it could be split, loses.
    """
    for base in BASES:
        if base.rows >= 2 * max(m, ALIGN) or (m > 2 * base.rows and base.rows < 64):
            continue
        for split in (1, 2, 4, 8):
            config = GemmConfig(
                base.rows, base.columns, base.depth, split, base.warps, base.stages, base.swap
            )
            tiles, _ = config.grid(m, shape)
            busy = tiles * split / sms
            if config.fits(shape) and (split == 1 or busy <= 4) and (busy >= 0.5 or split == 8):
                yield config


BASES = (
    GemmConfig(16, 64, 128, warps=4, stages=4),
    GemmConfig(16, 32, 256, warps=4, stages=4),
    GemmConfig(16, 64, 256, warps=4, stages=3),
    GemmConfig(16, 128, 128, warps=4, stages=4, swap=True),
    GemmConfig(16, 64, 128, warps=4, stages=5, swap=True),
    GemmConfig(32, 64, 128, warps=4, stages=4, swap=True),
    GemmConfig(32, 128, 128, warps=4, stages=4, swap=True),
    GemmConfig(64, 64, 128, warps=4, stages=4),
    GemmConfig(64, 128, 64, warps=4, stages=4, swap=True),
    GemmConfig(64, 128, 128, warps=4, stages=3, swap=True),
    GemmConfig(128, 128, 64, warps=8, stages=4),
    GemmConfig(128, 256, 64, warps=8, stages=3),
)
"""Configurations without a split of K."""
