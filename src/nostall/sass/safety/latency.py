"""Latency tables: the minimum issue distance of instruction pairs, in cycles.

The tables are mined from compiler output by :mod:`nostall.sass.safety.mining`.  They are neither
hardware limits nor NVIDIA's tables.  There are two kinds of numbers:

* A *floor* is the smallest distance on any path, for a class of pairs.  Code below a floor is
  wrong.  :func:`~nostall.sass.safety.validate` requires the floors of any cubin.
* An *attested* distance is the smallest one in straight-line code in which only the distance
  protects the pair (:mod:`.evidence`), for an exact pair.  nostall never moves a pair closer than
  that.  If a pair was not seen, the limit is the largest attested distance of its class and of
  its producer.

Distances at which results were wrong on a GPU (:mod:`.measured_distances`) raise both.  With
``measured_latencies``, measured minima lower both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from nostall.core.errors import UnsupportedArchitecture
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe
from nostall.sass.safety import measured_distances, pairing
from nostall.sass.safety.measured_distances import Bounds, MeasuredDistances
from nostall.sass.safety.pairing import HazardKind

FAMILY = {75: 75, 80: 80, 86: 86, 89: 86, 90: 90, 100: 100, 120: 120}
"""Architecture -> architecture whose mined table it uses."""

WELL_OBSERVED = 40
"""Occurrences from which a row's own minimum is trusted instead of its class's."""

BARRIER_REACH = 16
"""Cycles around a scheduling barrier within which distances to it matter."""

OVERWRITE_GAP = 2
"""Cycles from a fixed-latency read to a variable-latency write of the same register.

Compilers rarely leave a single cycle, and nostall leaves one only where they did.
"""

SCOREBOARD_GAP = 2
"""Cycles from an instruction that sets a scoreboard to one that waits for it, at least."""

_UNKNOWN_LATENCY = 40
"""Cycles that are assumed for a producer class without a row."""

_DONE_BEFORE_VARIABLE: dict[HazardKind, tuple[Pipe, ...]] = {
    "WAW": (Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.UNIFORM),
    "WAR": (Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.MMA),
}
"""Pipes that have written (WAW) or read (WAR) before a later variable-latency result can arrive.

Compilers leave one cycle between such a pair.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table."""

    distance: int
    """Distance in cycles."""
    seen: int
    """Number of occurrences in compiler output."""


Rows = dict[str, dict[str, Row]]
"""Kind of pair (RAW, WAW, WAR, ISSUE, AFTER, BEFORE) -> name of the pair -> its row."""


class LatencyTable:
    """The mined latency table of one architecture."""

    def __init__(
        self,
        sm: int,
        floors: Rows,
        attested: Rows,
        sufficient: Rows,
        ceilings: dict[str, int],
        measured: MeasuredDistances | None = None,
        *,
        measured_latencies: bool = False,
    ) -> None:
        """Build a table from its parts.

        ``floors``: smallest distance for each class of pairs.
        ``attested``: smallest distance for each exact pair.
        ``sufficient``: largest attested distance of the well-seen pairs of a class or producer.
        ``ceilings``: producer class -> cycles after which its result has arrived everywhere.
        ``measured``: distances measured on a GPU; ``measured_latencies``: whether they may lower
        the others.
        """
        self.sm = sm
        self._floors, self._attested, self._sufficient = floors, attested, sufficient
        self._ceilings = ceilings
        self._measured, self._lowers = measured, measured_latencies
        self._bounds: dict[tuple[object, ...], Bounds] = {}
        self._class_floors: dict[tuple[str, str], int] = {}
        self._barrier_distances: dict[tuple[str, str, str], int] = {}
        self._safe_distances: dict[tuple[object, ...], tuple[int, bool]] = {}

    @classmethod
    def load(cls, sm: int, *, measured_latencies: bool = False) -> LatencyTable:
        """The table for ``sm``.

        ``measured_latencies``: distances measured on a GPU may lower mined ones.  Raises
        :class:`UnsupportedArchitecture` if there is no table.
        """
        measured = MeasuredDistances.load(sm) if measured_latencies else measured_distances.find(sm)
        return _load(sm, measured, measured_latencies)

    @classmethod
    def mined(cls, sm: int) -> LatencyTable:
        """The table for ``sm`` from compiler output alone, with which measurements are compared."""
        return _load(sm, None, False)

    def min_distance(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind
    ) -> int:
        """The floor of a pair: the distance below which any code is wrong.

        It is the row of the producer's form (RAW only) if that is well observed, else the row of
        the producer's class, else the smallest row of all pairs with the producer's class.
        """
        names = pairing.coarse_names(first, second, register, kind)
        floor = self._floor(first, second, names, kind)
        return self._measured_bounds(first, second, register, kind).apply(floor, lower=self._lowers)

    def _measured_bounds(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind
    ) -> Bounds:
        """What measurements say of a pair."""
        if self._measured is None:
            return _NOT_MEASURED
        key = pairing.pair_key(first, second, register, kind)
        bounds = self._bounds.get(key)
        if bounds is None:
            names = pairing.exact_names(first, second, register, kind)
            bounds = self._bounds[key] = self._measured.bounds(names, kind)
        return bounds

    def evidence(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind, cycles: int
    ) -> str:
        """Where the requirement of ``cycles`` for a pair comes from, for a finding."""
        bounds = self._measured_bounds(first, second, register, kind)
        if self._measured is not None and (
            cycles == bounds.wrong_below or (self._lowers and cycles == bounds.limit)
        ):
            return f"measured on {self._measured.gpu}: wrong below {bounds.wrong_below} cycles"
        rows = self._attested.get(kind, {})
        names = pairing.exact_names(first, second, register, kind)
        seen = [row.seen for name in names if (row := rows.get(name)) and row.distance == cycles]
        if seen:
            return f"seen {sum(seen)} times in compiler output"
        return "by the class of the pair in compiler output"

    def _floor(
        self, first: Instruction, second: Instruction, names: tuple[str, str], kind: HazardKind
    ) -> int:
        """The floor of a pair; ``names`` are its coarse names."""
        if not second.has_fixed_latency(self.sm) and first.pipe in _DONE_BEFORE_VARIABLE.get(
            kind, ()
        ):
            return 1
        rows = self._floors.get(kind, {})
        form_row, class_row = rows.get(names[0]), rows.get(names[1])
        if kind == "RAW" and form_row is not None and form_row.seen >= WELL_OBSERVED:
            return form_row.distance
        if class_row is not None and class_row.seen >= WELL_OBSERVED:
            return class_row.distance
        return self._producer_floor(names[1].partition("|")[0], kind)

    def safe_distance(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind
    ) -> int:
        """The distance below which no change of the schedule may bring a pair."""
        key = pairing.pair_key(first, second, register, kind)
        cached = self._safe_distances.get(key)
        if cached is None:
            cached = self._look_up_safe_distance(first, second, register, kind)
            self._safe_distances[key] = cached
        distance, lacks_row = cached
        distance = max(distance, self.max_latency(first)) if lacks_row else distance
        bounds = self._measured_bounds(first, second, register, kind)
        return bounds.apply(distance, lower=self._lowers)

    def _look_up_safe_distance(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind
    ) -> tuple[int, bool]:
        """(distance, whether the tables lack a row).

        If they lack a row, only the maximum latency of the producer is safe.
        """
        names = pairing.coarse_names(first, second, register, kind)
        distance, lacks_row = self._floor(first, second, names, kind), False
        attested, sufficient = self._attested.get(kind, {}), self._sufficient.get(kind, {})
        for name in pairing.exact_names(first, second, register, kind):
            row = attested.get(name)
            if row is not None:
                distance = max(distance, row.distance)
                continue
            coarser = (sufficient.get(names[1]), sufficient.get(name.partition("|")[0]))
            distances = [row.distance for row in coarser if row is not None]
            if len(distances) == 2:
                distance = max(distance, *distances)
            else:
                lacks_row = True
        return distance, lacks_row

    def min_issue_gap(self, first: Instruction, second: Instruction) -> int:
        """Smallest stall of ``first`` that compilers leave before a neighbour like ``second``."""
        row = self._floors.get("ISSUE", {}).get(pairing.pipe_pair(first, second))
        return row.distance if row is not None else 2

    def min_distance_after_barrier(self, barrier: Instruction, instruction: Instruction) -> int:
        """Cycles from a scheduling barrier to an instruction after it, at least."""
        return self._barrier_distance("AFTER", barrier, instruction)

    def min_distance_before_barrier(self, instruction: Instruction, barrier: Instruction) -> int:
        """Cycles from an instruction to a scheduling barrier after it, at least."""
        return self._barrier_distance("BEFORE", barrier, instruction)

    def _barrier_distance(self, kind: str, barrier: Instruction, instruction: Instruction) -> int:
        key = (kind, barrier.base, instruction.base)
        distance = self._barrier_distances.get(key)
        if distance is None:
            exact, coarse = pairing.barrier_pair(barrier, instruction)
            attested, sufficient = self._attested.get(kind, {}), self._sufficient.get(kind, {})
            row = attested.get(exact) or sufficient.get(coarse)
            distance = BARRIER_REACH if row is None else row.distance
            self._barrier_distances[key] = distance
        return distance

    def max_latency(self, first: Instruction) -> int:
        """Cycles after which no instruction can still depend on the timing of ``first``."""
        touched = first.defs or first.uses
        classes = (pairing.producer_class(first, register) for register in touched)
        return max((self._ceiling(producer) for producer in classes), default=1)

    def _ceiling(self, producer: str) -> int:
        return self._ceilings.get(producer, _UNKNOWN_LATENCY)

    def _producer_floor(self, producer: str, kind: HazardKind) -> int:
        """The smallest floor of all pairs with a producer class."""
        key = (producer, kind)
        if key not in self._class_floors:
            rows = self._floors.get(kind, {})
            distances = [
                row.distance for name, row in rows.items() if name.startswith(producer + "|")
            ]
            self._class_floors[key] = min(distances, default=self._ceiling(producer))
        return self._class_floors[key]


_NOT_MEASURED = Bounds()


@cache
def _load(sm: int, measured: MeasuredDistances | None, measured_latencies: bool) -> LatencyTable:
    family = FAMILY.get(sm)
    path = resources.files("nostall.sass.safety").joinpath("floors", f"sm_{family}.json")
    if family is None or not path.is_file():
        raise UnsupportedArchitecture(
            f"there is no latency table for sm_{sm}; there are tables for {sorted(FAMILY)}; mine "
            "one with `python -m nostall.sass.safety.mining`"
        )
    content = json.loads(path.read_text())
    floors, attested, sufficient = (
        {
            kind: {name: Row(*numbers) for name, numbers in rows.items()}
            for kind, rows in content[part].items()
        }
        for part in ("floors", "attested", "suffices")
    )
    return LatencyTable(
        sm,
        floors,
        attested,
        sufficient,
        content["ceilings"],
        measured,
        measured_latencies=measured_latencies,
    )
