"""The tile set, and the costs of its units: nanoseconds by tile and keys, measured or modelled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from nostall.core.validation import first_problem
from nostall.serving.errors import BadTables

FRACTION_BITS = 8
"""Bits behind the point of the fixed-point coefficients."""
MAX_COST_NS = (1 << 23) - 1
"""Largest cost of a unit (8.4 ms); longer units cost as much as this."""


@dataclass(frozen=True)
class CostTable:
    """Cost of a unit in ns: ``start_ns[tile] + key_ns[tile] * keys``.

    Builders compute in integers (fixed point), so that host and device agree in every bit.
    """

    start_ns: tuple[float, ...]
    """Time that a unit takes without keys, by tile."""
    key_ns: tuple[float, ...]
    """Time for each key, by tile."""
    kind: Literal["measured", "modelled"] = "modelled"
    source: str = ""
    """GPU and benchmark, or model, that the numbers are from."""

    def __post_init__(self) -> None:
        if len(self.start_ns) != len(self.key_ns):
            raise BadTables(
                f"a cost table has {len(self.start_ns)} start times and {len(self.key_ns)} times "
                "for a key; give one of each for each tile"
            )
        values = (*self.start_ns, *self.key_ns)
        if not all(0 <= value <= MAX_COST_NS for value in values):
            raise BadTables(
                f"a cost table has the times {values} ns; allowed are 0 to {MAX_COST_NS}"
            )

    def fixed_point(self) -> NDArray[np.int64]:
        """Start and key times in 1/256 ns, shape (2, tiles)."""
        scaled = np.array([self.start_ns, self.key_ns], np.float64) * (1 << FRACTION_BITS)
        return np.rint(scaled).astype(np.int64)


def modelled_costs(tiles: TileSet) -> CostTable:
    """Modelled costs: for each key the longer of its bytes and its FLOPs; 1 us to start a unit.

    For heads of 128 elements of 2 bytes, with one SM's share of an H100's 3.35 TB/s, and of 600
    TFLOP/s (FA3's best rate there). A measured table replaces them.
    """
    read_ns = 2 * 128 * 2 / 25.4
    key_ns = tuple(max(read_ns, 4 * 128 * height / 4500.0) for height in tiles.heights)
    return CostTable(
        (1000.0,) * len(key_ns), key_ns, "modelled", "bytes and FLOPs of one SM of an H100"
    )


class _CostFile(pydantic.BaseModel):
    """Content of a cost file."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    heights: tuple[int, ...]
    start_ns: tuple[float, ...]
    key_ns: tuple[float, ...]
    source: str


def load_costs(path: Path, tiles: TileSet) -> CostTable:
    """The measured costs of a JSON file. Raises :class:`BadTables` if it is for other tiles."""
    try:
        file = _CostFile.model_validate_json(path.read_bytes())
    except pydantic.ValidationError as error:
        raise BadTables(
            f"cost file {path}: {first_problem(error, 'the document')}; the file has the fields "
            "heights, start_ns, key_ns and source"
        ) from error
    if file.heights != tiles.heights:
        raise BadTables(
            f"cost file {path} is for tile heights {file.heights}, and the tile set has "
            f"{tiles.heights}; measure the costs of this tile set"
        )
    return CostTable(file.start_ns, file.key_ns, "measured", file.source)


MAX_TILES = 8
"""Most tile heights of a set."""

LEAST_SAVED_NS = 4000
"""Default of ``TileSet.least_saved_ns``, chosen from the samples of one H200
(benchmarks/serving/results/prefix_groups_h200.json.gz) and not confirmed by a fresh run. The rule
rejects a group of verifies (saving 1.3 us) although grouping made it 1.35 times as fast."""

MOST_SAVED_NS = 10**9
"""Largest ``least_saved_ns``: products with it fit into 64 bits."""


@dataclass(frozen=True)
class TileSet:
    """Tile heights in rows (query tokens x group), and the rule that splits keys into units."""

    heights: tuple[int, ...] = (16, 64, 128)
    """Rows of each tile, ascending; multiples of 16. A sequence takes the first tile that its rows
    (query length x group) fit into, otherwise the last one."""
    split: int = 1 << 30
    """Most keys of a unit; a multiple of ``kv_align``."""
    least_split: int = 512
    """Fewest keys for which a tile is split further by cost; a multiple of ``kv_align``."""
    units_per_program: int = 0
    """Units that a program gets at least if the costs are split evenly: a tile that costs more than
    the total / (programs * units_per_program) is split. 0: only ``split`` decides."""
    kv_align: int = 64
    """Units begin at multiples of this many keys behind the first; a multiple of 16."""
    least_prefix: int = 0
    """Fewest keys of a shared prefix that is read once for its group; 0: never."""
    least_saved_ns: int = LEAST_SAVED_NS
    """Least time of each program, by the costs of units, that reading a prefix once must save; 0:
    any saving that exceeds the cost of the partial results."""

    def __post_init__(self) -> None:
        heights = self.heights
        if not 1 <= len(heights) <= MAX_TILES or list(heights) != sorted(set(heights)):
            raise BadTables(
                f"tile heights {heights}; allowed are 1 to {MAX_TILES} ascending heights"
            )
        if any(height < 16 or height % 16 for height in heights):
            raise BadTables(f"tile heights {heights}; allowed are multiples of 16")
        if self.kv_align < 16 or self.kv_align % 16:
            raise BadTables(f"kv_align {self.kv_align}; allowed are multiples of 16")
        for name in ("split", "least_split"):
            keys = getattr(self, name)
            if keys < self.kv_align or keys % self.kv_align:
                raise BadTables(f"{name} {keys}; allowed are multiples of kv_align {self.kv_align}")
        if self.least_prefix < 0:
            raise BadTables(f"least_prefix {self.least_prefix}; allowed is 0 (never) or more")
        if not 0 <= self.least_saved_ns <= MOST_SAVED_NS:
            raise BadTables(f"least_saved_ns {self.least_saved_ns}; allowed are 0 to 10^9")
        if self.units_per_program < 0:
            raise BadTables(f"units_per_program {self.units_per_program}; allowed is 0 or more")

    def tile_tokens(self, group: int) -> tuple[int, ...]:
        """Query tokens of each tile for a group of heads; 0 if the group does not fit.

        Raises :class:`BadTables` if the group fits into no tile.
        """
        if group > self.heights[-1]:
            raise BadTables(
                f"{group} query heads share a KV head, and the largest tile has "
                f"{self.heights[-1]} rows; give a tile height of at least {group}"
            )
        return tuple(height // group for height in self.heights)
