"""Plans of meta-attention: a kernel configuration with the rules of its task tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nostall.serving.attention.config import AttentionShape, KernelConfig, TileConfig
from nostall.serving.tables.settings import TableSettings
from nostall.serving.tables.tiles import LEAST_SAVED_NS, TileSet

WIDE_HEAD_KERNEL = KernelConfig(
    (TileConfig(16, 32, 3), TileConfig(32, 32, 3), TileConfig(64, 32, 3, "branch")),
    registers=0,
    programs_per_sm=1,
)
"""For heads of 256: a tile of 128 rows would need more registers than a program has."""


def default_kernel(shape: AttentionShape) -> KernelConfig:
    """A kernel for a shape that has not been tuned."""
    return KernelConfig() if shape.padded_head_dim <= 128 else WIDE_HEAD_KERNEL


@dataclass(frozen=True)
class AttentionPlan:
    """Everything that decides the time of a batch, besides the batch and the GPU."""

    kernel: KernelConfig = field(default_factory=KernelConfig)
    order: str = "paired"
    """A key of :data:`nostall.serving.tables.orders.ORDERS`; ``sorted`` for schedule ``unit``."""
    split: int = 1 << 30
    """Most keys of a unit."""
    least_split: int = 512
    """Fewest keys of a unit that is split by cost."""
    units_per_program: int = 4
    """Units that a program gets at least if the costs are split evenly; 0: no split by cost."""
    least_prefix: int = 256
    """Fewest keys of a shared prefix that is read once for its group; 0: never. Only for shapes
    that have prefixes."""
    least_saved_ns: int = LEAST_SAVED_NS
    """Least modelled time of each program that a group must save; 0: any saving."""

    @property
    def tile_set(self) -> TileSet:
        """The tile set of the kernel's heights."""
        return TileSet(
            tuple(tile.rows for tile in self.kernel.tiles),
            split=self.split,
            least_split=self.least_split,
            units_per_program=self.units_per_program,
            least_prefix=self.least_prefix,
            least_saved_ns=self.least_saved_ns,
            kv_align=max(64, *(tile.keys for tile in self.kernel.tiles)),
        )

    def programs(self, sms: int) -> int:
        """Programs of a persistent launch."""
        return sms * self.kernel.programs_per_sm

    def launched_programs(self, sms: int, units: int) -> int:
        """Programs of the launch for tables with so many units."""
        return units if self.kernel.schedule == "unit" else self.programs(sms)

    def table_settings(self, shape: AttentionShape, sms: int) -> TableSettings:
        """Settings of the tables for a GPU of so many SMs."""
        return TableSettings(
            shape.heads,
            shape.kv_heads,
            self.programs(sms),
            self.tile_set if shape.has_prefixes else replace(self.tile_set, least_prefix=0),
            order=self.order,
            window=shape.window,
        )
