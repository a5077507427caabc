"""Tile configurations of kernels that compute matrix products with their elementwise readers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from nostall.fusion.hardware import H200, Hardware

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, for the dtypes of products that a kernel computes."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Sizes of the products of one kernel: ``count`` products of one left operand."""

    rows: int
    columns: int
    depth: int
    dtype: str
    count: int = 1
    descriptors: bool = False
    """Whether the operands meet what tensor descriptors (TMA) need (``contiguous_axis``)."""
    prologue_bytes: int = 0
    """Bytes that are read for one element of the left operand, if the kernel computes it from
    several tensors; 0 if it reads the operand."""


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """The tile of a program, and how the loop over the depth is run."""

    rows: int
    columns: int
    """Columns of one product; a kernel of two products has two such tiles."""
    depth: int
    warps: int
    stages: int
    """Tiles of operands in flight or in use."""
    group: int = 8
    """Row tiles that run next to each other, so that they share columns in the L2 cache."""
    descriptors: bool = False
    """Operands are copied by tensor descriptors, not by an address for each element."""
    persistent: bool = False
    """``per_sm`` programs an SM, which compute several tiles."""
    parts: int = 1
    """Parts of a tile's columns for which the elementwise operators run one after the other: fewer
    of their values are in registers at once."""
    per_sm: int = 1
    """Programs on one SM, if persistent."""

    def shared_bytes(self, shape: ProductShape) -> int:
        """Shared memory of the operands' tiles."""
        size = DTYPE_BYTES[shape.dtype]
        left = self.rows * (shape.prologue_bytes or size)
        # A computed operand is not in flight, but tensor cores read it from shared memory, too.
        computed = self.rows * self.depth * size if shape.prologue_bytes else 0
        width = left + shape.count * self.columns * size
        return self.stages * width * self.depth + computed

    def fits(self, shape: ProductShape, hardware: Hardware = H200) -> bool:
        """Whether the tile fits into an SM, and is not mostly outside of the product."""
        threads = 32 * self.warps
        accumulators = shape.count * self.rows * self.columns / threads
        computed = self.rows * self.depth / threads if shape.prologue_bytes else 0
        registers = min(hardware.max_registers, hardware.registers // threads)
        return (
            (shape.descriptors or not self.descriptors)
            and self.shared_bytes(shape) <= hardware.shared_bytes - RESERVED_BYTES
            and accumulators <= MAX_ACCUMULATORS
            and accumulators + PROLOGUE_REGISTERS * computed <= registers - RESERVED_REGISTERS
            and self.rows <= 2 * max(shape.rows, 16)
            and self.columns <= 2 * max(shape.columns, 16)
        )

    def tiles(self, shape: ProductShape) -> tuple[int, int]:
        """Tiles along the rows and along the columns."""
        return -(-shape.rows // self.rows), -(-shape.columns // self.columns)

    def programs(self, shape: ProductShape, hardware: Hardware = H200) -> int:
        """Programs of the launch."""
        rows, columns = self.tiles(shape)
        most = hardware.sms * self.per_sm if self.persistent else rows * columns
        return min(rows * columns, most)

    def __str__(self) -> str:
        """The configuration in one line. Generated sources and stored records contain it."""
        details = [
            f"{self.rows}x{self.columns}x{self.depth}",
            f"{self.warps} warps",
            f"{self.stages} stages",
            f"groups of {self.group}",
            "descriptors" if self.descriptors else "",
            f"{self.per_sm} programs an SM" if self.persistent else "",
            f"{self.parts} parts" if self.parts > 1 else "",
        ]
        return f"product {', '.join(filter(None, details))}"


RESERVED_BYTES = 4096
"""Shared memory that is left for barriers."""
MAX_ACCUMULATORS = 128
"""Accumulators of a thread at most: half of its registers."""
RESERVED_REGISTERS = 40
"""Registers of a thread for addresses and masks: tiles with a few less spill (sm_90)."""

PROLOGUE_REGISTERS = 2
"""Registers for each element of a left operand that a thread computes: the value and one more."""
MAX_TILES_PER_SM = 32
"""Tiles of an SM at most, if larger tiles fit: those read each operand less often."""

MAX_CONFIGS = 9
"""Configurations that a product is measured with.  Of 18 measured products (one H200, up to 21
configurations each: benchmarks/torch_compile/results/product_kernels.json.gz) these are the fastest
of each, also of a product that did not take part in ordering them; 157 kernels are compiled in the
place of 325."""
CONFIGS = (
    ProductConfig(128, 128, 64, 8, 4, descriptors=True, persistent=True, parts=2),
    ProductConfig(128, 256, 64, 8, 3, descriptors=True, persistent=True, parts=4),
    ProductConfig(128, 128, 64, 8, 3, parts=2),
    ProductConfig(64, 128, 64, 4, 4),
    ProductConfig(128, 128, 64, 8, 4, descriptors=True, parts=2),
    ProductConfig(128, 128, 64, 8, 4, descriptors=True, persistent=True),
    ProductConfig(128, 128, 64, 4, 3, descriptors=True, parts=2),
    ProductConfig(128, 128, 64, 8, 3, descriptors=True, persistent=True, parts=4, per_sm=2),
    ProductConfig(128, 128, 64, 8, 3, descriptors=True, parts=4),
    ProductConfig(128, 128, 64, 8, 3, descriptors=True, persistent=True, parts=4),
    ProductConfig(128, 128, 64, 8, 4),
    ProductConfig(128, 128, 64, 8, 3, descriptors=True),
    ProductConfig(128, 128, 64, 8, 4, descriptors=True),
    ProductConfig(256, 128, 64, 8, 3, descriptors=True, persistent=True, parts=2),
    ProductConfig(64, 128, 64, 4, 4, descriptors=True),
    ProductConfig(128, 64, 64, 8, 3, descriptors=True),
    ProductConfig(128, 64, 64, 4, 4),
    ProductConfig(128, 256, 64, 8, 3, descriptors=True, persistent=True),
    ProductConfig(128, 256, 64, 8, 3),
    ProductConfig(128, 128, 32, 4, 5),
    ProductConfig(64, 64, 64, 4, 5),
    ProductConfig(64, 32, 64, 4, 4),
    ProductConfig(32, 64, 64, 4, 4),
    ProductConfig(16, 64, 64, 4, 4),
    ProductConfig(32, 32, 32, 4, 4),
)
"""Configurations in the order in which they are tried: each is the one that helps the measured
products most beside those before it."""


PROLOGUE_CONFIGS = (
    ProductConfig(128, 256, 64, 8, 3),
    ProductConfig(128, 256, 32, 16, 4),
    ProductConfig(128, 128, 64, 8, 3),
    ProductConfig(128, 128, 32, 8, 4, descriptors=True),
    ProductConfig(64, 256, 64, 8, 3),
    ProductConfig(64, 256, 32, 8, 4, descriptors=True, parts=2),
    ProductConfig(64, 128, 64, 8, 3, descriptors=True, persistent=True, parts=2),
    ProductConfig(64, 64, 64, 4, 4),
    ProductConfig(32, 64, 64, 4, 4),
    ProductConfig(16, 128, 64, 4, 4),
    ProductConfig(16, 64, 64, 4, 4),
    ProductConfig(32, 32, 32, 4, 4),
)
"""Configurations of kernels that compute their left operand, in the order in which they are tried.

Each tile of columns computes the operand again: tiles are wide, and few, because a product with a
prologue is measured in addition to one without."""


def configs(shape: ProductShape, hardware: Hardware = H200) -> Iterator[ProductConfig]:
    """The configurations that a shape is measured with."""
    tried = PROLOGUE_CONFIGS if shape.prologue_bytes else CONFIGS
    tiles = {c: math.prod(c.tiles(shape)) for c in tried if c.fits(shape, hardware)}
    most = max(MAX_TILES_PER_SM * hardware.sms, min(tiles.values(), default=0))
    return islice((config for config in tiles if tiles[config] <= most), MAX_CONFIGS)
