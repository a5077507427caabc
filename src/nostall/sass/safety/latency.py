"""How far apart a fixed-latency producer and its consumer must issue, in cycles.

The numbers are *floors mined from compiler output* (see :mod:`nostall.sass.safety.mining`): for
each architecture, producer form, register file and consumer slot, the least distance that was
seen, how often, and the usual one.  They are not hardware limits and not the vendor's tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from nostall.core.errors import UnsupportedArchitecture
from nostall.sass.program import registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe, lookup

Kind = Literal["RAW", "WAW", "WAR", "ISSUE", "AFTER", "BEFORE"]

FAMILY = {75: 75, 80: 80, 86: 86, 89: 86, 90: 90, 100: 100, 120: 120}
"""Architectures whose mined tables are shared."""

WELL_OBSERVED = 40
"""Sightings from which a pair's own minimum is trusted instead of its class's."""

TRUSTED = 60
"""Sightings from which a pair's least distance is used for pairs that nostall changes."""

WALL_REACH = 16
"""Cycles around a wall within which distances to it matter."""

WAITER_GAP = 2
"""Cycles after an instruction that sets a scoreboard before another may wait for it."""

_WIDTHS = frozenset(("WIDE", "HI", "64", "F64", "X", "SHL"))


@dataclass(frozen=True, slots=True)
class Floor:
    """Least and usual distance in cycles, and how often the pair was seen."""

    least: int
    usual: int
    seen: int


def producer(instruction: Instruction, register: int) -> tuple[str, str]:
    """(form, class) of a producer; both end in the file that ``register`` lies in."""
    file = ">P" if registers.is_predicate(register) else ">R"
    if registers.is_uniform(register):
        file = ">U" + file[1:]
    if instruction.row.pipe is Pipe.MMA:
        form = instruction.opcode
    else:
        width = sorted(instruction.modifiers & _WIDTHS)
        form = ".".join((instruction.base, *width))
    return form + file, instruction.row.pipe.value + file


def consumer(instruction: Instruction, register: int, kind: Kind) -> tuple[str, str]:
    """Where a consumer takes ``register``: (opcode and operand slot, pipe and operand slot)."""
    pipe = instruction.row.pipe.value
    if kind != "RAW":
        slot = "write"
    elif register in instruction.guards:
        return f"{instruction.base}:guard", "guard"
    elif register in instruction.address:
        slot = "address"
    elif instruction.row.pipe is Pipe.MMA and _is_accumulator(instruction, register):
        slot, pipe = "accumulator", instruction.base
    else:
        slot = "data"
    return f"{instruction.base}.{slot}", f"{pipe}:{slot}"


def pairs(
    first: Instruction, second: Instruction, register: int, kind: Kind
) -> tuple[str, str, str]:
    """The table rows of a pair, from the most particular to the class: form and opcode, form and
    pipe, pipe and pipe."""
    form, group = producer(first, register)
    opcode, slot = consumer(second, register, kind)
    return f"{form}|{opcode}", f"{form}|{slot}", f"{group}|{slot}"


def adjacency(first: Instruction, second: Instruction) -> str:
    """The pair of pipes of two neighbours in a block."""
    return f"{first.row.pipe.value}|{second.row.pipe.value}"


def wall_pair(wall: Instruction, instruction: Instruction) -> str:
    """The table row for an instruction near a wall."""
    return f"{wall.base}|{instruction.row.pipe.value}"


_PIPE_NAMES = frozenset(pipe.value for pipe in Pipe)


def _is_accumulator(instruction: Instruction, register: int) -> bool:
    if len(instruction.operands) < 4 or not instruction.operands[3].startswith("R"):
        return False
    digits = "".join(c for c in instruction.operands[3][1:].split(".")[0] if c.isdigit())
    return bool(digits) and int(digits) <= register < int(digits) + len(instruction.defs)


_QUICK = (Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.UNIFORM)
"""Pipes that have written long before any variable-latency instruction issued later can."""


class Floors:
    """The mined table of one architecture."""

    def __init__(self, sm: int, table: dict[str, dict[str, Floor]]) -> None:
        self.sm = sm
        self._table = table
        self._ceiling: dict[tuple[str, str], int] = {}
        self._worst: dict[str, dict[str, int]] = {}

    @classmethod
    def of(cls, sm: int) -> Floors:
        """The committed table for ``sm``; raises :class:`UnsupportedArchitecture`."""
        return _load(sm)

    def least(self, first: Instruction, second: Instruction, register: int, kind: Kind) -> int:
        """Absolute floor: a read's own pair when well observed, else the class's minimum; a class
        that was hardly seen takes the least of its producer's classes."""
        if kind == "WAW" and not second.row.fixed(self.sm) and first.row.pipe in _QUICK:
            return 1
        rows = self._table.get(kind, {})
        _, form, wide = pairs(first, second, register, kind)
        pair, group = rows.get(form), rows.get(wide)
        if kind == "RAW" and pair is not None and pair.seen >= WELL_OBSERVED:
            return pair.least
        if group is not None and group.seen >= WELL_OBSERVED:
            return group.least
        return self._least_of_producer(producer(first, register)[1], kind)

    def usual(self, first: Instruction, second: Instruction, register: int, kind: Kind) -> int:
        """The distance below which nostall never *brings* a pair.

        The least distance of exactly these opcodes when it was seen often; else the largest of the
        class's usual distance and of the least distances that its well-observed pairs have.
        """
        exact, _, group = pairs(first, second, register, kind)
        least = self.least(first, second, register, kind)
        row = self._table.get(kind, {}).get(exact)
        if row is not None and row.seen >= TRUSTED:
            return max(row.least, least)
        fallback = self._safe(group, kind)
        if fallback is None:
            return max(self.ceiling(first), least)
        return max(fallback, row.least if row is not None else 0, least)

    def _safe(self, group: str, kind: Kind) -> int | None:
        """What suffices for every well-observed pair of a class."""
        if kind not in self._worst:
            self._worst[kind] = _worst_of_classes(self._table.get(kind, {}))
        return self._worst[kind].get(group)

    def after_wall(self, wall: Instruction, instruction: Instruction) -> int:
        """Cycles by which an instruction may safely follow a wall (a barrier, say)."""
        return self._wall("AFTER", wall_pair(wall, instruction))

    def before_wall(self, instruction: Instruction, wall: Instruction) -> int:
        """Cycles by which an instruction may safely precede a wall."""
        return self._wall("BEFORE", wall_pair(wall, instruction))

    def _wall(self, kind: Kind, name: str) -> int:
        row = self._table.get(kind, {}).get(name)
        return row.least if row is not None and row.seen >= TRUSTED else WALL_REACH

    def issue_gap(self, first: Instruction, second: Instruction) -> int:
        """Least stall that compilers put between neighbours on these two pipes."""
        row = self._table.get("ISSUE", {}).get(adjacency(first, second))
        return row.least if row is not None else 2

    def ceiling(self, first: Instruction) -> int:
        """Cycles after which nothing can still wait for ``first``."""
        return max((self._class_ceiling(producer(first, r)[1]) for r in first.defs), default=1)

    def _least_of_producer(self, group: str, kind: Kind) -> int:
        key = (group, kind)
        if key not in self._ceiling:
            rows = self._table.get(kind, {})
            near = [f.least for name, f in rows.items() if name.startswith(group + "|")]
            self._ceiling[key] = min(near, default=self._class_ceiling(group))
        return self._ceiling[key]

    def _class_ceiling(self, group: str) -> int:
        key = (group, "")
        if key not in self._ceiling:
            rows = [
                max(floor.least, floor.usual)
                for kind, pairs in self._table.items()
                for name, floor in pairs.items()
                if kind != "ISSUE" and (name.startswith(group + "|") or _forms_class(name) == group)
            ]
            self._ceiling[key] = max(rows, default=40)
        return self._ceiling[key]


def _worst_of_classes(rows: dict[str, Floor]) -> dict[str, int]:
    """For each class: the largest of its usual distance and its trusted pairs' least ones."""
    worst = {name: floor.usual for name, floor in rows.items() if _is_class(name)}
    for name, floor in rows.items():
        form, _, opcode = name.partition("|")
        if floor.seen < TRUSTED or ":" in opcode:
            continue
        row = lookup(opcode.partition(".")[0])
        if row is None:
            continue
        slot = opcode.rpartition(".")[2]
        for pipe in (row.pipe.value, opcode.partition(".")[0]):
            group = f"{_forms_class(form)}|{pipe}:{slot}"
            if group in worst:
                worst[group] = max(worst[group], floor.least)
    return worst


def _is_class(name: str) -> bool:
    return name.partition(">")[0] in _PIPE_NAMES


def _forms_class(name: str) -> str:
    form, _, _ = name.partition("|")
    opcode, _, file = form.partition(">")
    row = lookup(opcode.partition(".")[0])
    return f"{row.pipe.value}>{file}" if row else ""


@cache
def _load(sm: int) -> Floors:
    family = FAMILY.get(sm)
    path = resources.files("nostall.sass.safety").joinpath("floors", f"sm_{family}.json")
    if family is None or not path.is_file():
        raise UnsupportedArchitecture(
            f"there is no latency table for sm_{sm}; there are tables for "
            f"{sorted(FAMILY)}; mine one with `python -m nostall.sass.safety.mining`"
        )
    rows = json.loads(path.read_text())["floors"]
    table = {
        kind: {name: Floor(*numbers) for name, numbers in pairs.items()}
        for kind, pairs in rows.items()
    }
    return Floors(sm, table)
