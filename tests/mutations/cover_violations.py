"""Waits for the scoreboard of a later instruction that proves nothing about the earlier one.

The wait for an instruction's own scoreboard is replaced by a wait for that of a later instruction:
for a result one of the same unit, for sources one of another unit or an access that compilers do
not wait for in its place.  On an H200, sources of LDG and LDS were read after the result of a later
MUFU, and in order with those of later accesses (``benchmarks/sass/results/witnesses.json.gz``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.program import Instruction
from tests.mutations.edits import (
    BARRIERS,
    Edit,
    block_mutation,
    first_overwriter,
    first_reader,
    has_bar,
    has_depbar,
    opcodes,
    unit_number,
)

Order = Sequence[Instruction]

_CONVERSIONS = opcodes("F2F F2I I2F FRND")
_BIT_COUNTS = opcodes("POPC FLO BREV")

UNORDERED_RESULTS = {
    "LDC": "LDC LDCU",
    "LDCU": "LDC LDCU",
    "ATOMS": "LDS LDSM SHFL REDUX",
    "REDUX": "LDS LDSM SHFL ATOMS",
    "LDS": "ATOMS REDUX LDG LDL ATOMG",
    "LDSM": "ATOMS REDUX LDG LDL ATOMG",
    "SHFL": "ATOMS REDUX LDG LDL ATOMG",
    "LDG": "LDG LDL LDS LDSM SHFL ATOMS ATOMG",
    "LDL": "LDG LDL LDS LDSM SHFL",
    "ATOMG": "ATOMG LDG LDS SHFL",
    "S2R": "S2R S2UR",
    "double-conversion": "MUFU conversion bits",
    "MUFU": "bits double-conversion",
    "conversion": "bits double-conversion",
    "bits": "MUFU conversion double-conversion",
}
"""Kind of an instruction -> kinds of later ones that do not prove its result written."""


_ORDERED_KINDS = (
    opcodes("LDS LDSM SHFL"),
    opcodes("MUFU conversion"),
    opcodes("double-conversion"),
    opcodes("bits"),
    opcodes("ATOMS"),
    opcodes("REDUX"),
)
"""Kinds whose results arrive in order."""


def _kind(instruction: Instruction) -> str:
    if instruction.base in _CONVERSIONS:
        return "double-conversion" if "F64" in instruction.modifiers else "conversion"
    return "bits" if instruction.base in _BIT_COUNTS else instruction.base


def _waiter(order: Order, at: int, until: int, scoreboard: int) -> int | None:
    """Position of the only wait for a scoreboard after ``at``, up to ``until``."""
    waiters = [k for k in range(at + 1, until + 1) if scoreboard in order[k].control.waits]
    return waiters[0] if len(waiters) == 1 and order[waiters[0]].base not in BARRIERS else None


def _result_of_another(order: Order) -> Iterator[Edit]:
    """The reader of a result waits for a later instruction of the unit only."""
    for at, first in enumerate(order):
        own = first.control.write_sb
        unordered = UNORDERED_RESULTS.get(_kind(first), "").split()
        if own > 5 or not unordered:
            continue
        reader = first_reader(order, at)
        if reader is None or has_depbar(order, at + 1, reader):
            continue
        waiter = _waiter(order, at, reader, own)
        if waiter is None:
            continue
        for later in range(at + 1, reader):
            second = order[later]
            other = second.control.write_sb
            if _kind(second) not in unordered or other in (own, 6, 7):
                continue
            if _is_proved_otherwise(order, at, reader, own, other):
                continue
            control = order[reader].control
            edit = {reader: control.with_(wait=control.wait & ~(1 << own) | 1 << other)}
            if waiter != reader:
                rest = order[waiter].control
                edit[waiter] = rest.with_(wait=rest.wait & ~(1 << own))
            if order[reader - 1].control.stall + (reader - 1 - later) >= 2:
                yield Edit(edit)


def _is_proved_otherwise(order: Order, at: int, until: int, own: int, other: int) -> bool:
    """Whether a third instruction of the unit, between the two, may prove the first one done."""
    waited = {b for k in range(at + 1, until + 1) for b in order[k].control.waits} - {own} | {other}
    kind = _kind(order[at])
    group = next((kinds for kinds in _ORDERED_KINDS if kind in kinds), frozenset[str]())
    return any(
        order[k].control.write_sb in waited and _kind(order[k]) in group
        for k in range(at + 1, until)
    )


UNORDERED_SOURCES = {
    "STG": "LDG LDL SHFL",
    "STS": "LDG LDL ATOMG",
    "STL": "LDG LDL",
    "LDG": "LDS LDSM SHFL STG STS ATOMS",
    "LDS": "LDG LDL ATOMS",
    "SHFL": "LDG STG STS",
}
"""Kind of an instruction -> kinds of later ones that do not prove its sources read."""


def _scoreboards(instruction: Instruction) -> set[int]:
    """The scoreboards that an instruction sets."""
    return {instruction.control.write_sb, instruction.control.read_sb} - {6, 7}


def _only_waiter(order: Order, at: int, writer: int) -> int | None:
    """The instruction up to ``writer`` whose wait alone protects the sources of ``order[at]``.

    None if none waits for them, or if a barrier, a DEPBAR or a wait for the result does as well.
    """
    control = order[at].control
    if has_depbar(order, at + 1, writer) or has_bar(order, at + 1, writer):
        return None
    waited = {b for k in range(at + 1, writer + 1) for b in order[k].control.waits}
    return None if control.write_sb in waited else _waiter(order, at, writer, control.read_sb)


def _sources_of_another(order: Order) -> Iterator[Edit]:
    """The instruction that overwrites a source waits for a later one of another unit only."""
    for at, first in enumerate(order):
        own, unit = first.control.read_sb, unit_number(first)
        if own > 5 or unit < 0 or first.never_executes:
            continue
        writer = first_overwriter(order, at)
        if writer is None or unit_number(order[writer]) == unit:
            continue
        waiter = _only_waiter(order, at, writer)
        if waiter is None:
            continue
        between = order[at + 1 : writer]
        same_unit = {b for i in between if unit_number(i) == unit for b in _scoreboards(i)}
        waited = {b for i in order[at + 1 : writer + 1] for b in i.control.waits}
        if same_unit & waited:
            continue
        for second in (i for i in between if unit_number(i) not in (unit, -1)):
            for other in _scoreboards(second) - same_unit - {own}:
                control = order[writer].control
                edit = {writer: control.with_(wait=control.wait & ~(1 << own) | 1 << other)}
                if waiter != writer:
                    rest = order[waiter].control
                    edit[waiter] = rest.with_(wait=rest.wait & ~(1 << own))
                yield Edit(edit)


def _sources_of_unordered(order: Order) -> Iterator[Edit]:
    """The instruction that overwrites a source waits for a later access only.

    Compiler output may rely on the order of the two, but few functions or none need it.
    """
    for at, first in enumerate(order):
        own = first.control.read_sb
        unordered = UNORDERED_SOURCES.get(first.base, "").split()
        if own > 5 or not unordered or first.never_executes:
            continue
        writer = first_overwriter(order, at)
        if writer is None or unit_number(order[writer]) >= 0:
            continue
        waiter = _only_waiter(order, at, writer)
        if waiter is None:
            continue
        between = [i for i in order[at + 1 : writer] if unit_number(i) == 0]
        if any(i.base not in unordered for i in between):
            continue
        for second in between:
            for other in _scoreboards(second) - {own}:
                control = order[writer].control
                edit = {writer: control.with_(wait=control.wait & ~(1 << own) | 1 << other)}
                if waiter != writer:
                    rest = order[waiter].control
                    edit[waiter] = rest.with_(wait=rest.wait & ~(1 << own))
                yield Edit(edit)


COVERS = {
    "wait for a later result of the unit": block_mutation(_result_of_another),
    "wait for sources of another unit": block_mutation(_sources_of_another),
    "wait for a later access's sources": block_mutation(_sources_of_unordered),
}
