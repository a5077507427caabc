"""How far apart instructions must issue, in cycles, learnt from compiler output.

Two kinds of numbers, both written by :mod:`nostall.sass.safety.mining` and neither a hardware
limit nor the vendor's tables:

* *floors*: the least distance on any path, per class of pair.  Code below them is wrong; they are
  what :func:`~nostall.sass.safety.validate` asks of any cubin.
* *attested* distances: the least one that compilers left in straight-line code with nothing but
  time as protection (:mod:`.evidence`), per exact pair.  nostall never brings a pair closer than
  that, and where it was not seen, not closer than any well-seen pair of its class or its producer
  needs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from nostall.core.errors import UnsupportedArchitecture
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe
from nostall.sass.safety import pairing
from nostall.sass.safety.pairing import Kind

FAMILY = {75: 75, 80: 80, 86: 86, 89: 86, 90: 90, 100: 100, 120: 120}
"""Architectures whose mined tables are shared."""

WELL_OBSERVED = 40
"""Sightings from which a pair's own minimum is trusted instead of its class's."""

WALL_REACH = 16
"""Cycles around a wall within which distances to it matter."""

OVERWRITE_GAP = 2
"""Cycles before a variable-latency instruction overwrites what a fixed-latency one reads; compilers
rarely leave one, and nostall does so only where they did."""

WAITER_GAP = 2
"""Cycles after an instruction that sets a scoreboard before another may wait for it."""

_UNKNOWN = 40

_OVERTAKEN: dict[Kind, tuple[Pipe, ...]] = {
    "WAW": (Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.UNIFORM),
    "WAR": (Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.MMA),
}
"""Pipes that have written, or have read, before the result of any variable-latency instruction
issued later can come: compilers leave one cycle between them."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Least distance in cycles, and how often the pair was seen."""

    least: int
    seen: int


Table = dict[str, dict[str, Floor]]
"""kind -> name of the pair -> its distance."""


class Floors:
    """The mined tables of one architecture.

    ``floors``: least distances of classes; ``attested``: of exact pairs; ``suffices``: the largest
    attested distance of the well-seen pairs of a class, and of a producer; ``ceilings``: per class
    of producer the cycles after which its result has arrived everywhere.
    """

    def __init__(
        self,
        sm: int,
        floors: Table,
        attested: Table,
        suffices: Table,
        ceilings: dict[str, int],
    ) -> None:
        self.sm = sm
        self._ceilings = ceilings
        self._floors, self._attested, self._suffices = floors, attested, suffices
        self._classes: dict[tuple[str, str], int] = {}
        self._walls: dict[tuple[str, str, str], int] = {}
        self._usual: dict[tuple[object, ...], tuple[int, bool]] = {}

    @classmethod
    def of(cls, sm: int) -> Floors:
        """The committed tables for ``sm``; raises :class:`UnsupportedArchitecture`."""
        return _load(sm)

    def least(self, first: Instruction, second: Instruction, register: int, kind: Kind) -> int:
        """Absolute floor: a read's own row when well observed, else the class's minimum; a class
        that was hardly seen takes the least of its producer's classes."""
        names = pairing.coarse(first, second, register, kind)
        return self._least(first, second, names, kind)

    def _least(
        self, first: Instruction, second: Instruction, names: tuple[str, str], kind: Kind
    ) -> int:
        if not second.row.fixed(self.sm) and first.row.pipe in _OVERTAKEN.get(kind, ()):
            return 1
        rows = self._floors.get(kind, {})
        pair, group = rows.get(names[0]), rows.get(names[1])
        if kind == "RAW" and pair is not None and pair.seen >= WELL_OBSERVED:
            return pair.least
        if group is not None and group.seen >= WELL_OBSERVED:
            return group.least
        return self._least_of_class(names[1].partition("|")[0], kind)

    def usual(self, first: Instruction, second: Instruction, register: int, kind: Kind) -> int:
        """The distance below which nostall never *brings* a pair."""
        key = pairing.pair_key(first, second, register, kind)
        known = self._usual.get(key)
        if known is None:
            known = self._usual[key] = self._looked_up(first, second, register, kind)
        least, is_rare = known
        return max(least, self.ceiling(first)) if is_rare else least

    def _looked_up(
        self, first: Instruction, second: Instruction, register: int, kind: Kind
    ) -> tuple[int, bool]:
        """The tables' answer, and whether they lack a row, so that only the ceiling is safe."""
        names = pairing.coarse(first, second, register, kind)
        least, is_rare = self._least(first, second, names, kind), False
        attested, suffices = self._attested.get(kind, {}), self._suffices.get(kind, {})
        for name in pairing.exact(first, second, register, kind):
            row = attested.get(name)
            if row is not None:
                least = max(least, row.least)
                continue
            wider = (suffices.get(names[1]), suffices.get(name.partition("|")[0]))
            known = [row.least for row in wider if row is not None]
            if len(known) == 2:
                least = max(least, *known)
            else:
                is_rare = True
        return least, is_rare

    def issue_gap(self, first: Instruction, second: Instruction) -> int:
        """Least stall that compilers put between neighbours on these two pipes."""
        row = self._floors.get("ISSUE", {}).get(pairing.neighbours(first, second))
        return row.least if row is not None else 2

    def after_wall(self, wall: Instruction, instruction: Instruction) -> int:
        """Cycles by which an instruction may safely follow a wall (a barrier, say)."""
        return self._wall("AFTER", wall, instruction)

    def before_wall(self, instruction: Instruction, wall: Instruction) -> int:
        """Cycles by which an instruction may safely precede a wall."""
        return self._wall("BEFORE", wall, instruction)

    def _wall(self, kind: str, wall: Instruction, instruction: Instruction) -> int:
        key = (kind, wall.base, instruction.base)
        known = self._walls.get(key)
        if known is None:
            exact, pipe = pairing.wall_pair(wall, instruction)
            row = self._attested.get(kind, {}).get(exact) or self._suffices.get(kind, {}).get(pipe)
            known = self._walls[key] = WALL_REACH if row is None else row.least
        return known

    def ceiling(self, first: Instruction) -> int:
        """Cycles after which nothing can still wait for ``first``."""
        touched = first.defs or first.uses
        return max((self._class_ceiling(pairing.group(first, r)) for r in touched), default=1)

    def _class_ceiling(self, group: str) -> int:
        return self._ceilings.get(group, _UNKNOWN)

    def _least_of_class(self, group: str, kind: Kind) -> int:
        key = (group, kind)
        if key not in self._classes:
            rows = self._floors.get(kind, {})
            near = [f.least for name, f in rows.items() if name.startswith(group + "|")]
            self._classes[key] = min(near, default=self._class_ceiling(group))
        return self._classes[key]


@cache
def _load(sm: int) -> Floors:
    family = FAMILY.get(sm)
    path = resources.files("nostall.sass.safety").joinpath("floors", f"sm_{family}.json")
    if family is None or not path.is_file():
        raise UnsupportedArchitecture(
            f"there is no latency table for sm_{sm}; there are tables for "
            f"{sorted(FAMILY)}; mine one with `python -m nostall.sass.safety.mining`"
        )
    content = json.loads(path.read_text())
    floors, attested, suffices = (
        {
            kind: {name: Floor(*numbers) for name, numbers in rows.items()}
            for kind, rows in content[part].items()
        }
        for part in ("floors", "attested", "suffices")
    )
    return Floors(sm, floors, attested, suffices, content["ceilings"])
