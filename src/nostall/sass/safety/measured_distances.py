"""Issue distances that were measured on a GPU, for exact pairs of instructions.

``measured/sm_NN.json`` has three kinds of rows.  ``python -m benchmarks.sass.distances.table``
writes them from the results of the benchmark ``sass.measured_distances``.

* A *minimum* is the smallest distance at which every result was right.  One cycle less gave stale
  results.  With ``measured_latencies``, changes of a schedule may bring a pair as close as the
  minimum plus a margin.
* A *joint* minimum is that of an operand that reads several words of one result.  It holds for each
  word, but a word alone may arrive earlier.
* A *refuted* row names a distance below which results were wrong, for a pair without a minimum.

Results below a minimum or a refuted row were wrong, so no table may permit less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from nostall.core.errors import UnsupportedArchitecture
from nostall.sass.safety.pairing import HazardKind

Rows = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Kind of pair -> producer -> consumer -> cycles.  ``producer|consumer`` is an exact name."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What measurements say of a pair, in cycles."""

    wrong_below: int = 0
    """Smaller distances gave wrong results; 0 if nothing was measured."""
    limit: int | None = None
    """Minimum with the margin; None unless each operand of the pair has a minimum."""

    def apply(self, distance: int, *, lower: bool) -> int:
        """``distance`` of a mined table, raised if it is refuted, and lowered to the limit."""
        if lower and self.limit is not None:
            distance = min(distance, self.limit)
        return max(distance, self.wrong_below)


@dataclass(frozen=True, eq=False)
class MeasuredDistances:
    """The measured distances of one architecture."""

    gpu: str
    """Name of the GPU that ran the experiments."""
    margin: int
    """Cycles that the limits add to the minima."""
    minima: Rows
    joint: Rows
    refuted: Rows

    @classmethod
    def load(cls, sm: int) -> MeasuredDistances:
        """The distances of ``sm``; raises :class:`UnsupportedArchitecture` if there are none."""
        measured = find(sm)
        if measured is None:
            known = ", ".join(f"sm_{number}" for number in architectures())
            raise UnsupportedArchitecture(
                f"there are no measured issue distances for sm_{sm}; they exist for {known}; leave "
                "out --measured-latencies (measured_latencies=True) to use mined distances"
            )
        return measured

    def bounds(self, names: Sequence[str], kind: HazardKind) -> Bounds:
        """The bounds of a pair with these exact names, one for each operand."""
        minima, joint, refuted = (
            [_row(rows, name, kind) for name in names]
            for rows in (self.minima, self.joint, self.refuted)
        )
        right = [max(row) for row in zip(minima, joint, strict=True)]
        limit = max(right) + self.margin if right and all(right) else None
        return Bounds(max(*minima, *refuted, 0), limit)


def architectures() -> list[int]:
    """The architectures with measured distances."""
    folder = resources.files("nostall.sass.safety").joinpath("measured")
    names = (path.name for path in folder.iterdir() if path.name.endswith(".json"))
    return sorted(int(name.removeprefix("sm_").removesuffix(".json")) for name in names)


@cache
def find(sm: int) -> MeasuredDistances | None:
    """The measured distances of ``sm``, or None if there are none."""
    path = resources.files("nostall.sass.safety").joinpath("measured", f"sm_{sm}.json")
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    return MeasuredDistances(
        content["gpu"],
        content["margin"],
        content["minima"],
        content["joint"],
        content["refuted"],
    )


def _row(rows: Rows, name: str, kind: HazardKind) -> int:
    """The cycles of a row; 0 if there is none."""
    producer, _, consumer = name.partition("|")
    return rows.get(kind, {}).get(producer, {}).get(consumer, 0)
