"""Witness kernels: does the hardware keep an order that a rule of nostall relies on?

Two instructions of one unit issue one after the other.  Code then waits for the scoreboard of the
later one only, and uses what the rule promises of the earlier one: its result is written
(``result``), or its address register is read (``sources``).  Each case also runs without any wait:
if nothing is wrong there, the case shows nothing.  A case in ``CONTROLS`` pairs two units, whose
order is known to differ: if nothing is wrong there, the method shows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.sass.distances.microkernels import registers as r
from benchmarks.sass.distances.microkernels.consumers import Values
from benchmarks.sass.distances.microkernels.lines import (
    Align,
    Item,
    Line,
    line,
    nops,
    number,
    settled,
)
from benchmarks.sass.distances.microkernels.windows import loaded_values, looped, reported
from benchmarks.sass.distances.microkernels.words import word

Variant = Literal["warm-up", "reference", "blind", "covered", "uncovered"]
"""What the reader waits for: both scoreboards (twice); nothing, and the earlier instruction is
missing or reads the stale address; the later scoreboard only; nothing."""
VARIANTS: tuple[Variant, ...] = ("warm-up", "reference", "blind", "covered", "uncovered")
EARLIER_SB, LATER_SB, PRESSURE_SB = 2, 1, 3
CONFLICT = 96
"""Register with a shared address; the lanes of a warp are all in one bank."""
ADDRESS = 98
"""Registers with the earlier instruction's address, which the reader overwrites."""
LATER_RESULT = 72
PRESSURE_LENGTH = 12

_FORMS = {
    "LDS": "LDS R{d}, [R{a}]",
    "LDS.128": "LDS.128 R{d}, [R{a}]",
    "LDSM": "LDSM.16.M88.4 R{d}, [R{a}]",
    "ATOMS": "ATOMS.EXCH R{d}, [R{a}], R{b}",
    "SHFL": "SHFL.IDX PT, R{d}, R{a}, R{b}, 0x1f",
    "REDUX": "REDUX.SUM UR{ud}, R{a}",
    "LDG": "LDG.E R{d}, desc[UR4][R{a}.64]",
    "STS": "STS [R{a}], R{b}",
    "STG": "STG.E desc[UR4][R{a}.64], R{b}",
    "MUFU": "MUFU.RCP R{d}, R{b}",
    "MUFU.EX2": "MUFU.EX2 R{d}, R{b}",
    "F2F.F64.F32": "F2F.F64.F32 R{d}, R{b}",
    "F2F.F32.F64": "F2F.F32.F64 R{d}, R{b}",
    "I2F": "I2F.RP R{d}, R{b}",
    "I2F.F64": "I2F.F64 R{d}, R{b}",
    "F2I": "F2I.TRUNC.NTZ R{d}, R{b}",
    "FLO": "FLO.U32 R{d}, R{b}",
    "POPC": "POPC R{d}, R{b}",
    "BREV": "BREV R{d}, R{b}",
    "S2R": "S2R R{d}, SR_TID.X",
    "S2UR": "S2UR UR{ud}, SR_CTAID.X",
    "LDC": "LDC R{d}, c[0x0][R{a}+0x210]",
    "LDC.near": "LDC R{d}, c[0x0][0x220]",
}
"""Name of an instruction in a case -> its form."""
_WIDE = ("F2F.F64.F32", "I2F.F64", "LDS.128", "LDSM")
_UNIFORM = ("REDUX", "S2UR")
_SHARED = ("LDS", "LDS.128", "LDSM", "ATOMS", "STS")
_READ_LATE = ("LDG", "LDS", "SHFL", "LDSM", "ATOMS", "STS", "STG")
"""Instructions with a read scoreboard."""


@dataclass(frozen=True, slots=True)
class Case:
    """One order that is tested."""

    family: str
    earlier: str
    later: str
    kind: Literal["result", "sources"] = "result"
    pressure: str = ""
    """Instructions that fill the queues first, separated by ``+``, or empty."""
    guarded: bool = False
    """Whether the later instruction has a guard that is false."""
    is_control: bool = False

    @property
    def name(self) -> str:
        """Label of the case, unique in ``CASES``."""
        guard = "@false " if self.guarded else ""
        behind = f" behind {self.pressure}" if self.pressure else ""
        return f"{self.family}: {self.earlier} then {guard}{self.later}, {self.kind}{behind}"

    @property
    def count(self) -> int:
        """The number of loops."""
        return len(VARIANTS)

    @property
    def values(self) -> Values:
        """What the values of a pass are; LDG and LDC need addresses."""
        forms = (self.earlier, self.later, *self.pressure.split("+"))
        if "LDG" in forms or "STG" in forms:
            return "global"
        return "constant" if "LDC" in forms else "uniform"


def _cases(
    family: str, orders: str, pressures: str, is_control: bool = False, kind: str = "result"
) -> list[Case]:
    rows: list[Case] = []
    for order in orders.split():
        earlier, _, later = order.partition(">")
        guarded = later.startswith("@")
        rows += [
            Case(family, earlier, later.lstrip("@"), kind, pressure, guarded, is_control)  # type: ignore[arg-type]
            for pressure in ("", *pressures.split())
        ]
    return rows


CASES: tuple[Case, ...] = (
    *_cases("LSU", "LDS>LDS LDS>SHFL SHFL>LDS SHFL>SHFL LDSM>LDS LDS>LDSM ATOMS>LDS LDS>ATOMS "
            "ATOMS>SHFL REDUX>LDS LDS>REDUX REDUX>SHFL SHFL>REDUX REDUX>REDUX LDS.128>LDS "
            "LDS.128>SHFL LDSM>SHFL LDSM>LDSM ATOMS>ATOMS LDSM>ATOMS ATOMS>LDSM",
            "LDS.128 LDG ATOMS LDSM LDS.128+LDG ATOMS+LDG"),
    *_cases("LSU", "LDG>LDS LDG>SHFL", "LDG", is_control=True),
    *_cases("XU", "MUFU>MUFU MUFU>MUFU.EX2 F2F.F64.F32>MUFU I2F.F64>MUFU F2F.F32.F64>MUFU I2F>MUFU "
            "F2I>MUFU FLO>MUFU POPC>MUFU BREV>MUFU MUFU>F2F.F64.F32 MUFU>I2F.F64 MUFU>I2F "
            "MUFU>FLO MUFU>POPC F2F.F64.F32>I2F F2F.F64.F32>FLO I2F.F64>FLO I2F>FLO FLO>I2F "
            "I2F>F2F.F64.F32 FLO>F2F.F64.F32 FLO>FLO I2F>I2F F2F.F64.F32>F2F.F64.F32",
            "MUFU F2F.F64.F32 I2F.F64 F2F.F64.F32+I2F MUFU+LDS.128"),
    *_cases("XU", "LDG>MUFU", "", is_control=True),
    *_cases("SPECIAL", "S2UR>S2UR S2R>S2R", "S2R"),
    *_cases("SPECIAL", "S2R>S2UR S2UR>S2R", "S2R", is_control=True),
    *_cases("CONST", "LDC>LDC LDC>LDC.near LDC.near>LDC", "LDC LDC.near LDC+LDS.128"),
    *_cases("CONST", "LDG>LDC.near", "", is_control=True),
    *_cases("WAR", "LDG>LDG LDG>@LDG LDG>@LDS LDG>LDS LDG>@SHFL LDG>SHFL LDG>LDSM LDG>ATOMS "
            "LDG>STS LDG>STG", "LDG LDS.128", kind="sources"),
    *_cases("WAR", "LDS>LDS LDS>@LDS LDS>@LDG LDS>@SHFL LDS>LDG LDS>SHFL LDS>LDSM LDS>ATOMS "
            "LDS>STS LDS>STG", "LDS.128 LDG", kind="sources"),
    *_cases("WAR", "LDG>MUFU LDS>MUFU", "LDG LDS.128", is_control=True, kind="sources"),
)  # fmt: skip
"""All cases.  An ``@`` marks a later instruction whose guard is false."""


def witness_items(case: Case) -> list[Item]:
    """The loops of all variants of a case."""
    items: list[Item] = []
    for at, variant in enumerate(VARIANTS):
        body = [*_head(case), Align(0), *_tested(case, variant), *_tail(case)]
        items += [Align(0), *looped(body, f"v{at}")]
    return items


def _head(case: Case) -> list[Item]:
    lane = line("SHF.R.U32.HI R{d}, R{a}, R{b}, R{c}", d=CONFLICT, a=255, b=number("FIVE"),
                c=r.THREAD)  # fmt: skip
    conflict = [
        lane,
        line("IMAD R{d}, R{a}, {i}, R{c}", d=CONFLICT, a=CONFLICT, i=(1 << 32) - 32, c=r.THREAD),
        line("IMAD R{d}, R{a}, {i}, R{c}", d=CONFLICT, a=CONFLICT, i=128, c=255),
        line("VIADD R{d}, R{a}, {i}", d=CONFLICT, a=CONFLICT, i=1024),
    ]
    slots: list[Item] = [
        line("STG.E desc[UR4][R{a}.64], R{b}", a=pair, b=number(value))
        for pair, value in ((r.FRESH_PAIR, "A"), (r.STALE_PAIR, "B"))
        if case.values == "global"
    ]
    if case.kind == "sources" and case.earlier in _SHARED:
        slots += [
            line("STS [R{a}], R{b}", a=number(place), b=number(value))
            for place, value in (("SCRATCH_SHARED", "A"), ("OTHER_SHARED", "B"))
        ]
    address = r.FRESH_PAIR if case.earlier == "LDG" else number("SCRATCH_SHARED")
    addresses = [line("MOV R{d}, R{b}", d=ADDRESS + k, b=address + k) for k in range(2)]
    targets = [line("MOV R{d}, R{b}", d=r.TARGET + k, b=r.STALE_PAIR + k % 2) for k in range(4)]
    uniform = [line("UMOV UR{ud}, UR{ub}", ud=r.U_TARGET + k, ub=number("U_A")) for k in range(2)]
    return settled([*loaded_values(), *conflict, *slots, *addresses, *targets, *uniform,
                    *nops(2)])  # fmt: skip


def _tested(case: Case, variant: Variant) -> list[Item]:
    """Pressure, the two instructions, and the reader, between two clock reads."""
    both = 1 << EARLIER_SB | 1 << LATER_SB
    waits = {"warm-up": both, "reference": both, "covered": 1 << LATER_SB}.get(variant, 0)
    earlier = _word(case, case.earlier, r.TARGET, r.U_TARGET, is_earlier=True)
    later = _word(case, case.later, LATER_RESULT, r.U_RESULT, is_earlier=False)
    first = Line(earlier, stall=2, yields=False, write_sb=EARLIER_SB)
    if variant == "blind" and case.kind == "result":
        first = Line(word("NOP"), stall=2, yields=False)
    last = Line(later, stall=2, yields=False, **_later_scoreboard(case))
    readers = _readers(case, waits)
    clock = "CS2R.32 R{d}, SR_CLOCKLO"
    pressure = [_pressure(case.pressure, at) for at in range(PRESSURE_LENGTH) if case.pressure]
    if case.kind == "sources" and variant == "blind":
        readers, first = [], Line(_stale_address_word(case), write_sb=EARLIER_SB)
    return [
        line(clock, d=r.CLOCK_BEFORE),
        *pressure,
        first,
        last,
        *readers,
        line(clock, d=r.CLOCK_AFTER),
    ]


def _later_scoreboard(case: Case) -> dict[str, int]:
    """The read scoreboard for sources, if the unit has one; else the write scoreboard."""
    reads = case.kind == "sources" and case.later in _READ_LATE
    return {"read_sb" if reads else "write_sb": LATER_SB}


def _readers(case: Case, waits: int) -> list[Item]:
    """What uses the promise of the rule: reads of the result, or writes of the address."""
    if case.kind == "sources":
        stale = r.STALE_PAIR if case.earlier == "LDG" else number("OTHER_SHARED")
        count = 2 if case.earlier == "LDG" else 1
        moves = [word("MOV R{d}, R{b}", d=ADDRESS + k, b=stale + k) for k in range(count)]
        return [_reader(move, 0 if at else waits, 5) for at, move in enumerate(moves)]
    if case.earlier in _UNIFORM:
        return [_reader(word("MOV R{d}, UR{ub}", d=r.RESULT, ub=r.U_TARGET), waits, 5)]
    count = 2 if case.earlier in _WIDE else 1
    moves = [word("MOV R{d}, R{b}", d=r.RESULT + k, b=r.TARGET + k) for k in range(count)]
    return [_reader(move, 0 if at else waits, 2) for at, move in enumerate(moves)]


def _reader(payload: int, wait: int, stall: int) -> Line:
    return Line(payload, stall=stall, yields=False, wait=wait)


def _tail(case: Case) -> list[Item]:
    everything = 1 << EARLIER_SB | 1 << LATER_SB | 1 << PRESSURE_SB
    moved = []
    if case.kind == "sources":
        moved = [line("MOV R{d}, R{b}", d=r.RESULT, b=r.TARGET)]
    return settled([*nops(4), *moved, *reported("R")], waits=everything)


def _word(case: Case, name: str, target: int, uniform: int, *, is_earlier: bool) -> int:
    """The word of the earlier or later instruction of a case."""
    address = r.FRESH_PAIR
    if name in _SHARED:
        address = CONFLICT if is_earlier and case.kind == "result" else number("SCRATCH_SHARED")
    if name == "LDC":
        address = r.FRESH
    if name in ("SHFL", "REDUX"):
        address = r.THREAD if name == "SHFL" else number("A")
    if case.kind == "sources" and is_earlier:
        address = ADDRESS
    other = number("FIVE" if name == "SHFL" else "A")
    guard = f"P{r.P_FALSE}" if case.guarded and not is_earlier else ""
    return word(_FORMS[name], guard, d=target, ud=uniform, a=address, b=other)


def _stale_address_word(case: Case) -> int:
    address = r.STALE_PAIR if case.earlier == "LDG" else number("OTHER_SHARED")
    return word(_FORMS[case.earlier], d=r.TARGET, a=address, b=number("A"))


def _pressure(names: str, at: int) -> Line:
    """One instruction that fills a queue."""
    choices = names.split("+")
    name = choices[at % len(choices)]
    fields = {"d": 76 + 4 * (at % 4), "a": CONFLICT, "b": number("A")}
    if name == "LDG":
        fields["a"] = r.FRESH_PAIR
    if name == "LDC":
        fields["a"] = r.FRESH
    form = _FORMS[name]
    return Line(word(form, **fields), stall=2, yields=False, write_sb=PRESSURE_SB)
