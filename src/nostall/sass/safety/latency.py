"""Latency tables: the minimum issue distance of instruction pairs, in cycles.

The tables are mined from compiler output (``tools.mining.floors``).  They are neither hardware
limits nor NVIDIA's tables.  There are two kinds of numbers:

* A *floor* is the smallest distance on any path, for a class of pairs.  Code below a floor is
  wrong.  :func:`~nostall.sass.safety.validate` requires the floors of any cubin.
* An *attested* distance is the smallest one in straight-line code in which only the distance
  protects the pair, for an exact pair.  nostall never moves a pair closer than that.  If a pair
  was not seen, the limit is the largest attested distance of its class and of its producer.

Distances at which results were wrong on a GPU (:mod:`.measured_distances`) raise both.  With
``measured_latencies``, measured minima lower both.

There are four sources. ``floors/sm_N.json`` is mined from a corpus of cubins, over all paths, and
``floors/own/sm_N.json`` in the same way from code that was written for pairs that this corpus
hardly has. ``floors/libraries/sm_N.json`` is mined from the libraries in wheels, in straight-line
code (``python -m tools.mining``). ``floors/cutlass/sm_N.json`` has floors alone, mined as those of
the corpus, from kernels of CUTLASS with opcodes and pairs that the others lack. A smaller distance
that a compiler kept often enough is safe, so the smallest row counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from nostall.core.errors import UnsupportedArchitecture
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect, Pipe
from nostall.sass.safety import measured_distances, pairing
from nostall.sass.safety.measured_distances import Bounds, MeasuredDistances
from nostall.sass.safety.pairing import HazardKind


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table."""

    distance: int
    """Distance in cycles."""
    seen: int
    """Number of occurrences in compiler output."""


Rows = dict[str, dict[str, Row]]
"""Kind of pair (RAW, WAW, WAR, ISSUE, AFTER, BEFORE) -> name of the pair -> its row."""


@dataclass(frozen=True, slots=True)
class MinedTables:
    """The tables of one architecture family."""

    floors: Rows
    """Smallest distance for each class of pairs, on any path."""
    attested: Rows
    """Smallest distance for each exact pair, in straight-line code."""
    sufficient: Rows
    """Largest attested distance of the well-seen pairs of a class or producer."""
    ceilings: dict[str, int]
    """Producer class -> cycles after which its result has arrived everywhere."""


_DATA_HAZARDS = ("RAW", "WAW", "WAR")
"""Kinds of pairs of register accesses."""


def load(family: int) -> MinedTables | None:
    """The tables of an architecture family; None if there are none."""
    folder = resources.files("nostall.sass.safety").joinpath("floors")
    corpus_path = folder.joinpath(f"sm_{family}.json")
    if not corpus_path.is_file():
        return None
    corpus = json.loads(corpus_path.read_text())
    names = ("own", "libraries", "cutlass")
    further = [folder.joinpath(name, f"sm_{family}.json") for name in names]
    return combine(corpus, *(json.loads(p.read_text()) for p in further if p.is_file()))


def combine(corpus: Mapping[str, Any], *further: Mapping[str, Any]) -> MinedTables:
    """Combine the tables of the corpus with further ones, as read from JSON.

    Distances between scheduling barriers and other instructions were measured on a GPU to matter
    without any visible dependence, so further tables add rows of them but lower none.
    """
    floors, attested = _rows(corpus["floors"]), _rows(corpus["attested"])
    sufficient = _rows(corpus["suffices"])
    for table in further:
        for part in ("floors", "forms", "classes"):
            _lower(floors, _rows(table.get(part, {}), _DATA_HAZARDS))
        mined = _rows(table.get("attested", {}))
        _lower(attested, {kind: rows for kind, rows in mined.items() if kind in _DATA_HAZARDS})
        _add_missing(attested, {k: rows for k, rows in mined.items() if k not in _DATA_HAZARDS})
        _raise(sufficient, _rows(table.get("suffices", {})))
    return MinedTables(floors, attested, sufficient, corpus["ceilings"])


def _rows(part: Mapping[str, Any], kinds: tuple[str, ...] | None = None) -> Rows:
    """The rows of one part of a table; only those of ``kinds`` if given."""
    return {
        kind: {name: Row(numbers[0], numbers[1]) for name, numbers in rows.items()}
        for kind, rows in part.items()
        if kinds is None or kind in kinds
    }


def _lower(rows: Rows, others: Rows) -> None:
    """Merge other rows: the smaller distance and the sum of the occurrences."""
    for kind, more in others.items():
        known = rows.setdefault(kind, {})
        for name, row in more.items():
            old = known.get(name, row)
            seen = row.seen + (old.seen if name in known else 0)
            known[name] = Row(min(old.distance, row.distance), seen)


def _raise(rows: Rows, others: Rows) -> None:
    """Merge other rows: the larger distance and the sum of the occurrences."""
    for kind, more in others.items():
        known = rows.setdefault(kind, {})
        for name, row in more.items():
            old = known.get(name, Row(0, 0))
            known[name] = Row(max(old.distance, row.distance), old.seen + row.seen)


def _add_missing(rows: Rows, others: Rows) -> None:
    """Add the rows whose names are not known."""
    for kind, more in others.items():
        rows[kind] = {**more, **rows.get(kind, {})}


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
    "WAR": (Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.MMA, Pipe.UNIFORM),
}
"""Pipes that have written (WAW) or read (WAR) before a later variable-latency result can arrive.

Compilers leave one cycle between such a pair.  What has written its result has read its operands,
so each pipe of WAW is one of WAR.
"""


_WRITE_ORDER: dict[str, tuple[Pipe, ...]] = {
    "R": (Pipe.FMA, Pipe.INT, Pipe.HALF, Pipe.DOUBLE, Pipe.MMA),
    "P": (Pipe.INT, Pipe.HALF, Pipe.FMA, Pipe.DOUBLE),
}
"""Register file -> pipes from the one that writes earliest after issue to the one that writes last.

Source: the mined RAW floors, and the order in NVIDIA's tables (fixed-latency results on sm_75 to
sm_120).  A distance that suffices before a write of one pipe suffices before later writes too.
"""

_VECTOR_ROLES = (
    *("int:data", "fma:data", "half:data", "double:data", "xu:data", "lsu:data", "lsu:address"),
    *("texture:data", "texture:address"),
)
"""Operands of vector instructions: all of them read uniform registers through one port."""

_VECTOR_READERS = tuple(f"{pipe}>UR" for pipe in (Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.DOUBLE))
"""Vector instructions of fixed latency as readers of uniform registers: through the same port."""

_ARITHMETIC_ROLES = ("int:data", "fma:data", "half:data", "uniform:data")
"""Operands whose RAW floors show the difference of two latencies."""

_EARLY_UNIFORM = frozenset(("UMOV",))
"""Uniform instructions that write earlier after issue than other uniform arithmetic.

Source: NVIDIA's tables, in which UMOV has 2 cycles to a uniform reader and the others have 4.
"""

_LATE_ADDEND_FROM = 90
_UPPER_ADDEND_DELAY = 2
"""Cycles from the read of the lower word of ``IMAD.WIDE``'s addend to that of the upper one.

Source: the mined tables of sm_90, sm_100 and sm_120, in which each producer of one word that was
seen often comes 2 cycles closer to the upper word than to the lower one; not so up to sm_89.
"""


class LatencyTable:
    """The mined latency table of one architecture."""

    def __init__(
        self,
        sm: int,
        tables: MinedTables,
        measured: MeasuredDistances | None = None,
        *,
        measured_latencies: bool = False,
    ) -> None:
        """Build the table of one architecture from the tables of its family.

        ``measured``: distances measured on a GPU.  ``measured_latencies``: whether they may lower
        the mined ones.
        """
        self.sm = sm
        self._measured, self._lowers = measured, measured_latencies
        self._bounds: dict[tuple[object, ...], Bounds] = {}
        self._floors, self._attested = tables.floors, tables.attested
        self._sufficient, self._ceilings = tables.sufficient, tables.ceilings
        self._floor_cache: dict[tuple[object, ...], int] = {}
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

        It is the row of the producer's class.  If a RAW pair and the form of its producer are well
        observed, it is the row of the form: a form without that evidence never raises the floor of
        a pair above the floor of its class.  The upper word of a wide addend is read later, so its
        floor may lie below the row of the form, but not below that of the class.  If even the class
        is not well observed, the floor is the smaller of two distances: the smallest row of all
        pairs with the producer's class, and the attested distance of the pair (at least three
        sightings).  No floor is above the attested distance of a well-observed pair.
        """
        key = pairing.pair_key(first, second, register, kind)
        floor = self._floor_cache.get(key)
        if floor is None:
            floor = self._look_up_floor(first, second, register, kind)
            if (seen := self._well_observed_distance(first, second, register, kind)) is not None:
                floor = min(floor, seen)
            self._floor_cache[key] = floor
        floor = floor if kind == "WAR" else min(floor, self.max_latency(first))
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

    def _look_up_floor(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind
    ) -> int:
        if not second.has_fixed_latency(self.sm) and first.pipe in _DONE_BEFORE_VARIABLE.get(
            kind, ()
        ):
            return 1
        if kind == "WAR" and first.effects & Effect.ENDS_BLOCK:
            return 1  # nothing issues after a branch that has not read its condition
        is_early = first.base in _EARLY_UNIFORM and second.pipe is Pipe.UNIFORM
        if kind == "WAW" and is_early and second.base not in _EARLY_UNIFORM:
            return 1
        form, class_name = pairing.coarse_names(first, second, register, kind)
        rows = self._floors.get(kind, {})
        class_row, form_row = self._class_row(class_name, second, kind), rows.get(form)
        if kind == "WAW" and (gap := self._write_gap(first, second, register)) is not None:
            class_row = _smaller(class_row, Row(gap, WELL_OBSERVED))
        if kind == "RAW" and form_row is not None and form_row.seen >= WELL_OBSERVED:
            is_seen = self._well_observed_distance(first, second, register, kind) is not None
            if is_seen or class_row is None or class_row.distance > form_row.distance:
                distance = form_row.distance
                if class_row is not None and self._reads_late(first, second, register):
                    distance = max(
                        distance - _UPPER_ADDEND_DELAY, min(class_row.distance, distance)
                    )
                return distance
        if class_row is not None and class_row.seen >= WELL_OBSERVED:
            return class_row.distance
        distance = self._producer_floor(class_name.partition("|")[0], kind)
        attested = self._attested_row(first, second, register, kind)
        return distance if attested is None else min(distance, attested.distance)

    def _reads_late(self, first: Instruction, second: Instruction, register: int) -> bool:
        """Whether ``second`` reads ``register`` later than its other operands."""
        return self.sm >= _LATE_ADDEND_FROM and pairing.is_upper_addend(first, second, register)

    def _class_row(self, class_name: str, second: Instruction, kind: HazardKind) -> Row | None:
        """The row of a class, or a smaller one of a class whose distance suffices for this one.

        A distance that suffices before a write suffices before a later write, and a result of
        variable latency arrives later than all of fixed latency.  A uniform register that can be
        read by one vector instruction can be read by all of them.
        """
        rows = self._floors.get(kind, {})
        own = rows.get(class_name)
        producer, _, role = class_name.partition("|")
        if kind == "RAW":
            is_vector_read = producer == f"{Pipe.UNIFORM}>UR" and role in _VECTOR_ROLES
            roles = list(_VECTOR_ROLES) if is_vector_read else []
        else:
            order = _WRITE_ORDER.get(producer.partition(">")[2], ())
            if second.has_fixed_latency(self.sm):
                order = order[: order.index(second.pipe) + 1] if second.pipe in order else ()
            roles = [role, *(f"{pipe}:write" for pipe in order)]
        producers = [producer]
        if kind == "WAR" and producer in _VECTOR_READERS:
            producers += _VECTOR_READERS
        found = (rows.get(f"{name}|{other}") for name in producers for other in roles)
        trusted = [row for row in found if row is not None and row.seen >= WELL_OBSERVED]
        return min(trusted, key=lambda row: row.distance, default=own)

    def _write_gap(self, first: Instruction, second: Instruction, register: int) -> int | None:
        """Cycles after which ``second`` writes later than ``first``; None if that is unknown.

        It is the difference of their latencies plus 1: the largest difference of the RAW floors of
        both to the same operands.  WAW distances hardly ever bind, so the rows of pairs say little.
        """
        if not second.has_fixed_latency(self.sm):
            return None
        late, early = (self._read_floors(i, register) for i in (first, second))
        gaps = [late[role] - early[role] + 1 for role in late.keys() & early.keys()]
        return max(1, *gaps) if gaps else None

    def _read_floors(self, producer: Instruction, register: int) -> dict[str, int]:
        """Role of an operand -> RAW floor of the form of a producer, else of its class."""
        rows = self._floors.get("RAW", {})
        found: dict[str, int] = {}
        names = (
            pairing.producer_class(producer, register),
            pairing.producer_form(producer, register),
        )
        for name in names:
            for role in _ARITHMETIC_ROLES:
                row = rows.get(f"{name}|{role}")
                if row is not None and row.seen >= WELL_OBSERVED:
                    found[role] = row.distance
        return found

    def _well_observed_distance(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind
    ) -> int | None:
        """The attested distance of an exact pair that was seen often, else None."""
        row = self._attested_row(first, second, register, kind)
        return row.distance if row is not None and row.seen >= WELL_OBSERVED else None

    def _attested_row(
        self, first: Instruction, second: Instruction, register: int, kind: HazardKind
    ) -> Row | None:
        """The row of an exact pair in the attested distances, else None.

        If several operands hold the register, the row has the largest distance and the smallest
        number of occurrences of all of them.
        """
        attested = self._attested.get(kind, {})
        rows = []
        for name in pairing.exact_names(first, second, register, kind):
            if (row := attested.get(name)) is None:
                return None
            rows.append(row)
        if not rows:
            return None
        return Row(max(r.distance for r in rows), min(r.seen for r in rows))

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

        If the exact pair was not seen, the limits of its class (producer pipe and consumer port)
        and of its producer hold.  If there are none either, only the maximum latency of the
        producer is safe.
        """
        class_name = pairing.coarse_names(first, second, register, kind)[1]
        distance, lacks_row = self.min_distance(first, second, register, kind), False
        attested, sufficient = self._attested.get(kind, {}), self._sufficient.get(kind, {})
        for name in pairing.exact_names(first, second, register, kind):
            row = attested.get(name)
            if row is not None:
                distance = max(distance, row.distance)
                continue
            coarser = (sufficient.get(class_name), sufficient.get(name.partition("|")[0]))
            distances = [row.distance for row in coarser if row is not None]
            distance = max((distance, *distances))
            lacks_row |= not distances
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
        classes = pairing.producer_classes(first, first.defs or first.uses)
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


def _smaller(row: Row | None, other: Row) -> Row:
    """The row with the smaller distance."""
    return other if row is None or other.distance < row.distance else row


_NOT_MEASURED = Bounds()


@cache
def _load(sm: int, measured: MeasuredDistances | None, measured_latencies: bool) -> LatencyTable:
    family = FAMILY.get(sm)
    tables = None if family is None else load(family)
    if tables is None:
        raise UnsupportedArchitecture(
            f"there is no latency table for sm_{sm}; there are tables for {sorted(FAMILY)}; mine "
            "one with `python -m tools.mining.floors`"
        )
    return LatencyTable(sm, tables, measured, measured_latencies=measured_latencies)
