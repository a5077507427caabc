"""Settings of the task tables, their capacity, and the arrays that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nostall.serving.errors import BadTables
from nostall.serving.tables.columns import (
    COUNTS,
    PREFIX_COLUMNS,
    PREFIX_ROWS,
    PROGRAMS,
    REDUCTION_COLUMNS,
    REDUCTIONS,
    TASK_COLUMNS,
    UNITS,
)
from nostall.serving.tables.costs import CostTable, TileSet, modelled_costs

Int32s = NDArray[np.int32]
ORDER_NAMES = ("given", "snake", "lpt", "sorted", "paired")
"""Keys of :data:`nostall.serving.tables.orders.ORDERS`, which needs numba."""
DEVICE_ORDERS = ("given", "snake", "sorted")
"""Those that the device builder knows: it has closed forms of their deals only."""
MAX_CLASSES = 256
"""Most classes of cost: a cost times this fits into 31 bits."""


@dataclass(frozen=True)
class TableCapacity:
    """Sizes of the table arrays; a batch that needs more is refused, never cut."""

    sequences: int
    """Sequences of a batch."""
    tiles: int
    """Query tiles of a batch, of one KV head and before keys are split."""
    units: int
    reductions: int
    scratch_rows: int
    programs: int
    prefix_rows: int = 0
    """Query tokens of a batch that has shared prefixes, and of all kept nodes of it together. A
    batch whose prefixes exceed this, or the next, is built without them."""
    prefix_tiles: int = 0
    """Query tiles of kept nodes; a part of ``tiles``."""


@dataclass(frozen=True)
class TableSettings:
    """Everything besides the batch that decides the tables."""

    heads: int
    """Query heads; a multiple of ``kv_heads``."""
    kv_heads: int
    programs: int
    """Programs that run at the same time; the persistent orders distribute units over them."""
    tiles: TileSet = field(default_factory=TileSet)
    costs: CostTable | None = None
    """Costs of units; None: :func:`nostall.serving.tables.costs.modelled_costs`."""
    order: str = "snake"
    """A key of :data:`nostall.serving.tables.orders.ORDERS`."""
    cost_classes: int = 64
    """Classes into which the orders snake and sorted sort costs: equal parts of the largest."""
    window: int = 0
    """Keys that a token sees, its own included (sliding window); 0: all."""

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads) < 1 or self.heads % self.kv_heads:
            raise BadTables(
                f"{self.heads} heads and {self.kv_heads} KV heads; allowed is a multiple of the "
                "KV heads"
            )
        if self.programs < 1:
            raise BadTables(f"{self.programs} programs; allowed is 1 or more")
        if not 1 <= self.cost_classes <= MAX_CLASSES:
            raise BadTables(f"{self.cost_classes} classes of cost; allowed are 1 to {MAX_CLASSES}")
        if self.window < 0:
            raise BadTables(f"window {self.window}; allowed is 0 (none) or more")
        self.tiles.tile_tokens(self.group)
        if len(self.unit_costs.start_ns) != len(self.tiles.heights):
            raise BadTables(
                f"the cost table has {len(self.unit_costs.start_ns)} tiles and the tile set "
                f"{len(self.tiles.heights)}; give costs of this tile set"
            )

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def unit_costs(self) -> CostTable:
        """The costs in force."""
        return self.costs or modelled_costs(self.tiles)


@dataclass(frozen=True, eq=False)
class TaskTables:
    """Arrays of the task tables; see :mod:`nostall.serving.tables` for their content."""

    tasks: Int32s
    program_offsets: Int32s
    reductions: Int32s
    counts: Int32s
    prefix_rows: Int32s

    @staticmethod
    def empty(capacity: TableCapacity) -> TaskTables:
        """Arrays of a capacity without units."""
        return TaskTables(
            np.zeros((capacity.units, TASK_COLUMNS), np.int32),
            np.zeros(capacity.programs + 1, np.int32),
            np.zeros((capacity.reductions, REDUCTION_COLUMNS), np.int32),
            np.zeros(COUNTS, np.int32),
            np.zeros((capacity.prefix_rows, PREFIX_COLUMNS), np.int32),
        )

    @property
    def used_tasks(self) -> Int32s:
        """The units, shape (units, 8)."""
        return self.tasks[: self.counts[UNITS]]

    @property
    def used_reductions(self) -> Int32s:
        """The reductions, shape (reductions, 6)."""
        return self.reductions[: self.counts[REDUCTIONS]]

    @property
    def used_offsets(self) -> Int32s:
        """Offsets of the programs, shape (programs + 1,)."""
        return self.program_offsets[: self.counts[PROGRAMS] + 1]

    @property
    def used_prefix_rows(self) -> Int32s:
        """Where the partial results of shared prefixes go, shape (query tokens or 0, 4)."""
        return self.prefix_rows[: self.counts[PREFIX_ROWS]]
