"""Device builder: task tables from lengths on the GPU, without a word from the host.

One launch builds the tables of a batch without shared prefixes. Two more in front of it find the
prefixes in the block table, and arrange the forest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from nostall.serving.errors import BadTables, CapacityExceeded
from nostall.serving.tables import device_kernel
from nostall.serving.tables.columns import (
    COUNTS,
    PREFIX_COLUMNS,
    REDUCTION_COLUMNS,
    TASK_COLUMNS,
)
from nostall.serving.tables.cut_rules import cut_rules
from nostall.serving.tables.orders import (
    deal_cyclic,
    deal_one_each,
    deal_snake,
    find_order,
    sort_as_given,
)
from nostall.serving.tables.prefix.device_leaders import arrange_forest, find_leaders
from nostall.serving.tables.settings import DEVICE_ORDERS, TableCapacity, TableSettings

_DEALS = {
    deal_cyclic: device_kernel.CYCLIC,
    deal_snake: device_kernel.SNAKE,
    deal_one_each: device_kernel.ONE_EACH,
}
"""The kernel's constant of each deal that it knows."""
SORTED_WORKERS = 4
"""Programs for each class of cost."""
GIVEN_WORKERS = 64
"""Programs of an order that does not sort."""
UNIT_BLOCK = 128
"""Units that a program writes at a time."""
PAGE_BLOCK = 512
"""Pages of two sequences that a program compares at a time."""
STATE_MARK = device_kernel.STATE_MARK.value
"""Last word of a state that a build has written."""
MAX_TILES = 16_384
"""Largest capacity of query tiles: each program holds all of them in registers."""


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """Arrays of the task tables as int32 tensors; see :mod:`nostall.serving.tables`."""

    tasks: Any
    program_offsets: Any
    reductions: Any
    counts: Any
    prefix_rows: Any
    has_prefixes: bool
    """Whether the capacity has prefix rows. Without them no builder writes a unit of a shared
    prefix: a batch with groups that pay exceeds the capacity."""


class DeviceForest(NamedTuple):
    """The prefix forest of a batch, tensors of one entry for each sequence of the capacity."""

    leaders: Any
    tokens: Any
    first_rows: Any
    deepest: Any
    node_tokens: Any
    parents: Any
    branch_costs: Any
    """int64: cost of a key for the branches of a node besides that of its leader."""
    branch_tokens: Any


class Totals(NamedTuple):
    """Sums over the builds of a device builder."""

    builds: int
    shared: int
    """Builds with shared prefixes."""
    left: int
    """Builds whose shared prefixes exceeded the capacity."""
    saved_ns: int
    """Modelled time of each program that shared prefixes saved."""


class Prefixes(NamedTuple):
    """Where the shared prefixes of a batch are found."""

    block_table: Any
    """int32 tensor (S, pages)."""
    page_size: int


class KernelLaunch(NamedTuple):
    """A launch of a Triton kernel of which only the first arguments vary from batch to batch."""

    function: Any
    fixed: tuple[Any, ...]
    """Tensors and integers behind the arguments that vary."""
    constants: dict[str, Any]
    """Compile-time constants and options."""

    def __call__(self, grid: int, *varying: Any) -> Any:
        """Launch by Triton; the compiled kernel, None in Triton's interpreter."""
        return self.function[(grid,)](*varying, *self.fixed, **self.constants)


@dataclass(frozen=True, eq=False)
class DeviceBuilder:
    """Builds the tables of batches into one set of tensors, whose addresses do not change."""

    settings: TableSettings
    capacity: TableCapacity
    tables: DeviceTables
    grid: int
    """Programs of the launch."""
    state: Any
    """int64 (7,): the queue and sums over all builds; see :func:`device_kernel.build_kernel`."""
    _forest: DeviceForest
    _constants: dict[str, Any]

    @staticmethod
    def of(
        settings: TableSettings,
        capacity: TableCapacity,
        device: str = "cuda",
        workers: int | None = None,
    ) -> DeviceBuilder:
        """A builder with tensors of a capacity; ``workers`` are programs for a class of cost.

        Raises :class:`BadTables` for an order that the device does not know, and for a capacity
        of more than :data:`MAX_TILES` query tiles or sequences.
        """
        order = find_order(settings.order)
        if settings.order not in DEVICE_ORDERS:
            raise BadTables(
                f"the device builder does not know the order {settings.order!r}; allowed are "
                f"{', '.join(DEVICE_ORDERS)}"
            )
        if max(capacity.tiles, capacity.sequences) > MAX_TILES:
            raise BadTables(
                f"{capacity.tiles} query tiles and {capacity.sequences} sequences; the device "
                f"builder allows {MAX_TILES} of each; use larger tiles, or the host builder"
            )
        sorts = order.sort is not sort_as_given
        workers = workers or (SORTED_WORKERS if sorts else GIVEN_WORKERS)
        tables = DeviceTables(
            _zeros(device, max(capacity.units, 1), TASK_COLUMNS),
            _zeros(device, capacity.programs + 1),
            _zeros(device, max(capacity.reductions, 1), REDUCTION_COLUMNS),
            _zeros(device, COUNTS),
            _zeros(device, max(capacity.prefix_rows, 1), PREFIX_COLUMNS),
            has_prefixes=capacity.prefix_rows > 0,
        )
        constants = _constants(settings) | {
            "CLASSES": settings.cost_classes if sorts else 0,
            "DEAL": _DEALS[order.deal].value,
            "WORKERS": workers,
            "BLOCK_S": max(32, triton.next_power_of_2(capacity.sequences)),
            "BLOCK_T": max(32, triton.next_power_of_2(capacity.tiles)),
            "BLOCK_U": UNIT_BLOCK,
            "num_warps": _warps(capacity.tiles),
        }
        grid = (settings.cost_classes if sorts else 1) * workers
        state = torch.zeros(7, dtype=torch.int64, device=device)
        forest = DeviceForest(
            *(_zeros(device, max(capacity.sequences, 1)) for _ in DeviceForest._fields)
        )
        forest = forest._replace(branch_costs=forest.branch_costs.long())
        return DeviceBuilder(settings, capacity, tables, grid, state, forest, constants)

    @property
    def queue(self) -> Any:
        """int64 (2,): a queue for the attention kernel, which each build empties."""
        return self.state[:2]

    @property
    def least_prefix(self) -> int:
        """Fewest keys of a shared prefix that is read once; 0: never."""
        return int(self._constants["LEAST_PREFIX"])

    @property
    def totals(self) -> Totals:
        """Sums over all builds since the state was last lost; waits for the device."""
        builds, shared, left, saved_ns, mark = self.state[2:].tolist()
        return Totals(builds, shared, left, saved_ns) if mark == STATE_MARK else Totals(0, 0, 0, 0)

    def build(
        self, query_starts: Any, kv_lengths: Any, prefixes: Prefixes | None = None
    ) -> DeviceTables:
        """Launch the build on the current stream; the tables are the builder's tensors.

        ``query_starts`` is int32 (S + 1,): the first packed query row of each sequence, and the
        total; ``kv_lengths`` is int32 (S,), S at most the capacity. A batch that does not fit gets
        no unit, and the counts that it needs. A batch of which only the shared prefixes do not fit
        is built without them.
        """
        sequences = len(kv_lengths)
        if sequences > self.capacity.sequences:
            raise CapacityExceeded(
                f"the batch needs {sequences} sequences (capacity {self.capacity.sequences}); "
                "allocate tables of this capacity"
            )
        # Without prefixes the kernel is one that does not look for any.
        least = self.least_prefix if prefixes is not None and sequences else 0
        if least and prefixes is not None:
            table = prefixes.block_table
            self.leaders_launch(prefixes.page_size)(
                sequences, table, query_starts, kv_lengths, sequences, *table.shape[1:],
                table.stride(0),
            )  # fmt: skip
            self.forest_launch()(sequences, query_starts, sequences)
        self.tables_launch(least)(self.grid, query_starts, kv_lengths, sequences)
        return self.tables

    def leaders_launch(self, page_size: int) -> KernelLaunch:
        """Finds leaders in a block table; a program for each sequence."""
        forest = self._forest
        fixed = (forest.leaders, forest.tokens, forest.branch_costs, forest.branch_tokens)
        block = self._constants["BLOCK_S"]
        sizes = {"PAGE": page_size, "BLOCK_S": block, "BLOCK_P": PAGE_BLOCK, "num_warps": 4}
        return KernelLaunch(find_leaders, fixed, sizes)

    def forest_launch(self) -> KernelLaunch:
        """Arranges the forest of the leaders; a program for each sequence."""
        names = ("TILE_TOKENS", "LIMITS", "KEY_COSTS", "GROUP", "BLOCK_S")
        constants = {name: self._constants[name] for name in names}
        return KernelLaunch(arrange_forest, tuple(self._forest), {**constants, "num_warps": 4})

    def tables_launch(self, least_prefix: int) -> KernelLaunch:
        """Writes the tables; :attr:`grid` programs. ``least_prefix`` 0: there is no forest."""
        tables, capacity = self.tables, self.capacity
        fixed = (
            *self._forest,
            tables.tasks,
            tables.program_offsets,
            tables.reductions,
            tables.counts,
            tables.prefix_rows,
            self.state,
            capacity.tiles,
            capacity.units,
            capacity.reductions,
            capacity.scratch_rows,
            capacity.programs,
            capacity.prefix_rows,
            capacity.prefix_tiles,
        )
        constants = {**self._constants, "LEAST_PREFIX": least_prefix}
        return KernelLaunch(device_kernel.build_kernel, fixed, constants)

    @property
    def written(self) -> list[Any]:
        """The tensors that a build writes, except the state."""
        tables = self.tables
        arrays = (tables.tasks, tables.program_offsets, tables.reductions, tables.counts)
        return [*arrays, tables.prefix_rows, *self._forest]


def _warps(tiles: int) -> int:
    """Warps of the builder: a thread holds 8 to 16 query tiles of a large capacity."""
    return 4 if tiles <= 1024 else 16 if tiles <= 4096 else 32


def _constants(settings: TableSettings) -> dict[str, Any]:
    """Compile-time constants of the kernel that the settings decide."""
    rules = cut_rules(settings)
    return {
        "PROGRAMS": settings.programs,
        "TILE_TOKENS": tuple(rules.tile_tokens.tolist()),
        "LIMITS": tuple(rules.heights.tolist()),
        "START_COSTS": tuple(rules.costs[0].tolist()),
        "KEY_COSTS": tuple(rules.costs[1].tolist()),
        "GROUP": rules.group,
        "KV_HEADS": rules.kv_heads,
        "WINDOW": settings.window,
        "SPLIT": rules.split,
        "LEAST_SPLIT": rules.least_split,
        "PARTS": rules.parts,
        "KV_ALIGN": rules.kv_align,
        "LEAST_PREFIX": rules.least_prefix,
        "LEAST_SAVED": rules.least_saved,
    }


def _zeros(device: str, *size: int) -> Any:
    return torch.zeros(size, dtype=torch.int32, device=device)
