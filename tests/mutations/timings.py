"""Violations in stalls, operand caches and encodings of control words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nostall.sass.program import Instruction
from tests.mutations.edits import (
    ALU,
    FENCES,
    Edit,
    fenced,
    general,
    in_blocks,
    together,
)

Order = Sequence[Instruction]


def _short_gap(order: Order) -> Iterator[Edit]:
    """A wait in the cycle after its scoreboard was set."""
    for at in range(len(order) - 1):
        control, after = order[at].control, order[at + 1].control
        waited = {control.write_sb, control.read_sb} & set(after.waits)
        if waited and control.stall > 1 and order[at].base not in FENCES:
            yield Edit({at: control.with_(stall=1)})


def _near(
    order: Order,
    producers: Callable[[Instruction], bool],
    consumers: Callable[[Instruction, set[int]], bool],
    *,
    original: int,
    cycles: int,
    span: int,
) -> Iterator[Edit]:
    """Stalls cut so that a pair at least ``original`` cycles apart has at most ``cycles``."""
    for at, first in enumerate(order):
        if not producers(first):
            continue
        live = set(first.defs)
        for later in range(at + 1, min(at + 1 + span, len(order))):
            second = order[later]
            if live & set(second.uses) and consumers(second, live):
                distance = sum(i.control.stall for i in order[at:later])
                apart = distance >= original and together(first, second)
                if apart and later - at <= cycles and not fenced(order, at, later - 1):
                    yield Edit({k: order[k].control.with_(stall=1) for k in range(at, later)})
                break
            if live & set(second.defs):
                break


def _short_stall(order: Order) -> Iterator[Edit]:
    """Arithmetic result read after one or two cycles (not by IMAD.WIDE: it takes the high word of
    its addend two cycles late, and compilers use that)."""
    yield from _near(
        order,
        lambda i: i.base in ALU and bool(general(i.defs)),
        lambda i, live: (
            i.base in ALU and "WIDE" not in i.modifiers and bool(live & general(i.uses))
        ),
        original=4,
        cycles=2,
        span=2,
    )


def _short_address(order: Order) -> Iterator[Edit]:
    """Arithmetic result used as an address after at most three cycles."""
    yield from _near(
        order,
        lambda i: i.base in ALU and bool(general(i.defs)),
        lambda i, live: bool(live & set(i.address)),
        original=5,
        cycles=3,
        span=3,
    )


def _short_guard(order: Order) -> Iterator[Edit]:
    """A predicate tested as a guard after at most six cycles."""
    yield from _near(
        order,
        lambda i: i.base in ("ISETP", "FSETP") and not i.is_guarded,
        lambda i, live: bool(live & set(i.guards)),
        original=11,
        cycles=6,
        span=6,
    )


def _short_uniform(order: Order) -> Iterator[Edit]:
    """A uniform result read by a vector instruction after at most three cycles."""
    yield from _near(
        order,
        lambda i: i.base in ("UIADD3", "ULOP3", "UIMAD", "USHF", "ULEA"),
        lambda i, live: not i.base.startswith(("U", "R2UR", "S2UR")),
        original=6,
        cycles=3,
        span=3,
    )


def _short_matrix(order: Order) -> Iterator[Edit]:
    """A matrix product read by other arithmetic after at most six cycles."""
    yield from _near(
        order,
        lambda i: i.base in ("HMMA", "IMMA"),
        lambda i, live: i.base in ALU or i.base in ("F2FP", "STS", "STG"),
        original=12,
        cycles=6,
        span=6,
    )


def _stale_reuse(order: Order) -> Iterator[Edit]:
    """Slot a is kept in the operand cache although its register changes before its next use."""
    for at, first in enumerate(order[:-1]):
        register = _slot_a(first)
        if register is None or first.guard not in (None, "PT"):
            continue
        control = first.control
        if not 1 <= control.stall <= 11 or control.reuse & 1:
            continue
        edit = Edit({at: control.with_(reuse=control.reuse | 1, yields=False)})
        if register in first.defs:
            if _slot_a(order[at + 1]) == register:
                yield edit
        elif at + 2 < len(order):
            between = order[at + 1]
            if (
                between.base in ALU
                and register in between.defs
                and not general(between.uses)
                and _slot_a(order[at + 2]) == register
            ):
                yield edit


def _slot_a(instruction: Instruction) -> int | None:
    register = instruction.payload >> 24 & 0xFF
    known = instruction.base in ALU and instruction.base != "MOV"
    return register if known and register != 255 and register in instruction.uses else None


def _illegal_encoding(order: Order) -> Iterator[Edit]:
    """Control words that do not exist."""
    for at, instruction in enumerate(order):
        control = instruction.control
        if instruction.base not in ALU:
            continue
        for stall in (0, 12, 13, 14, 15):
            yield Edit({at: control.with_(stall=stall, yields=False, reuse=0)})
        if not control.yields and control.reuse and control.stall <= 11:
            yield Edit({at: control.with_(yields=True)})
        yield Edit({at: control.with_(write_sb=6)})
        yield Edit({at: control.with_(read_sb=6)})


def _board_without_signal(order: Order) -> Iterator[Edit]:
    """A scoreboard on arithmetic of fixed latency, which never releases one."""
    for at, instruction in enumerate(order):
        control = instruction.control
        if instruction.base in ALU and (control.write_sb, control.read_sb) == (7, 7):
            yield Edit({at: control.with_(write_sb=at % 6)})
            yield Edit({at: control.with_(read_sb=at % 6)})


TIMINGS = {
    "wait right after the setter": in_blocks(_short_gap),
    "short stall": in_blocks(_short_stall),
    "short distance to an address": in_blocks(_short_address),
    "short distance to a guard": in_blocks(_short_guard),
    "short distance from uniform": in_blocks(_short_uniform),
    "short distance from a matrix product": in_blocks(_short_matrix),
    "stale reuse": in_blocks(_stale_reuse),
    "illegal encoding": in_blocks(_illegal_encoding),
    "scoreboard on fixed latency": in_blocks(_board_without_signal),
}
