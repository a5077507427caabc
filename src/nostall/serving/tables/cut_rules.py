"""The settings of task tables as integers, for compiled code, with the rules of one query tile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.tables.costs import FRACTION_BITS, MAX_COST_NS
from nostall.serving.tables.settings import TableSettings

Int64s = NDArray[np.int64]

NO_REFERENCE_COUNTS = {"cache": True, "_nrt": False}
"""Options of functions that allocate nothing: numba then counts no references to array rows."""
NO_WINDOW = 1 << 40
"""Window of a batch without a sliding window."""


class CutRules(NamedTuple):
    """The settings as integers, for compiled code."""

    tile_tokens: Int64s
    """Query tokens of each tile height; 0 if the group does not fit into it."""
    heights: Int64s
    """Rows of each tile: those of a sequence up to which it is taken."""
    costs: Int64s
    """Start and key times in 1/256 ns, shape (2, heights)."""
    group: int
    kv_heads: int
    window: int
    split: int
    least_split: int
    parts: int
    """Units into which the costs are split evenly at least; 0: splits do not depend on costs."""
    kv_align: int
    least_prefix: int
    """Fewest keys of a shared prefix that is read once; 0: never."""
    least_saved: int
    """Cost that a group saves at least, of all KV heads, in 1/256 ns."""


def cut_rules(settings: TableSettings) -> CutRules:
    """The rules of the settings."""
    tiles = settings.tiles
    return CutRules(
        np.array(tiles.tile_tokens(settings.group), np.int64),
        np.array(tiles.heights, np.int64),
        settings.unit_costs.fixed_point(),
        settings.group,
        settings.kv_heads,
        settings.window or NO_WINDOW,
        tiles.split,
        tiles.least_split,
        settings.programs * tiles.units_per_program,
        tiles.kv_align,
        # A prefix that a window hides in part is not shared.
        0 if settings.window else tiles.least_prefix,
        (tiles.least_saved_ns * settings.programs) << FRACTION_BITS,
    )


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def tile_of(length: int, rules: CutRules) -> int:
    """Index of the tile height for so many query tokens."""
    rows = length * rules.group
    last = len(rules.heights) - 1
    for index in range(last):
        if rules.tile_tokens[index] > 0 and rows <= rules.heights[index]:
            return index
    return last


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def unit_cost(index: int, keys: int, rules: CutRules) -> int:
    """Cost of a unit in ns."""
    scaled: int = (rules.costs[0, index] + rules.costs[1, index] * keys) >> FRACTION_BITS
    return min(max(scaled, 1), MAX_COST_NS)
