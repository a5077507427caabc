"""Costs of units: a measured (or modelled) table of nanoseconds by tile and number of keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic
from numpy.typing import NDArray

from nostall.serving.errors import BadTables
from nostall.serving.tables.tiles import TileSet

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


def modelled_costs(
    tiles: TileSet,
    head_dim: int = 128,
    element_bytes: int = 2,
    bytes_per_ns: float = 25.4,
    flops_per_ns: float = 4500.0,
) -> CostTable:
    """Modelled costs: for each key the longer of its bytes and its FLOPs; 1 us to start a unit.

    The defaults are one SM's share of an H100's 3.35 TB/s, and of 600 TFLOP/s (FA3's best rate
    there). A measured table replaces them.
    """
    read_ns = 2 * head_dim * element_bytes / bytes_per_ns
    key_ns = tuple(max(read_ns, 4 * head_dim * height / flops_per_ns) for height in tiles.heights)
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
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise BadTables(
            f"cost file {path}: {where}: {first['msg']}; the file has the fields heights, "
            "start_ns, key_ns and source"
        ) from error
    if file.heights != tiles.heights:
        raise BadTables(
            f"cost file {path} is for tile heights {file.heights}, and the tile set has "
            f"{tiles.heights}; measure the costs of this tile set"
        )
    return CostTable(file.start_ns, file.key_ns, "measured", file.source)
