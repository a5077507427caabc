"""Timing violations: stalls that are too short, stale reuse flags, illegal control words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nostall.sass.program import Instruction
from tests.mutations.edits import (
    ALU,
    BARRIERS,
    Edit,
    block_mutation,
    general_registers,
    has_barrier,
    may_both_execute,
)

Order = Sequence[Instruction]


def _short_scoreboard_gap(order: Order) -> Iterator[Edit]:
    """A wait one cycle after its scoreboard is set."""
    for at in range(len(order) - 1):
        control, after = order[at].control, order[at + 1].control
        waited = {control.write_sb, control.read_sb} & set(after.waits)
        if waited and control.stall > 1 and order[at].base not in BARRIERS:
            yield Edit({at: control.with_(stall=1)})


def _shorten_distance(
    order: Order,
    producers: Callable[[Instruction], bool],
    consumers: Callable[[Instruction, set[int]], bool],
    *,
    original: int,
    cycles: int,
    span: int,
) -> Iterator[Edit]:
    """Stalls are cut until a dependent pair is at most ``cycles`` apart.

    Only pairs that are at least ``original`` cycles apart and at most ``span`` positions count.
    """
    for at, first in enumerate(order):
        if not producers(first):
            continue
        live = set(first.defs)
        for later in range(at + 1, min(at + 1 + span, len(order))):
            second = order[later]
            if live & set(second.uses) and consumers(second, live):
                distance = sum(i.control.stall for i in order[at:later])
                is_candidate = distance >= original and may_both_execute(first, second)
                if is_candidate and later - at <= cycles and not has_barrier(order, at, later - 1):
                    yield Edit({k: order[k].control.with_(stall=1) for k in range(at, later)})
                break
            if live & set(second.defs):
                break


def _short_stall(order: Order) -> Iterator[Edit]:
    """An arithmetic result is read after one or two cycles.

    IMAD.WIDE is left out as a reader: it reads the high word of its addend two cycles late, and
    compilers use that.
    """
    yield from _shorten_distance(
        order,
        lambda i: i.base in ALU and bool(general_registers(i.defs)),
        lambda i, live: (
            i.base in ALU and "WIDE" not in i.modifiers and bool(live & general_registers(i.uses))
        ),
        original=4,
        cycles=2,
        span=2,
    )


def _short_address(order: Order) -> Iterator[Edit]:
    """An arithmetic result is used as an address after at most three cycles."""
    yield from _shorten_distance(
        order,
        lambda i: i.base in ALU and bool(general_registers(i.defs)),
        lambda i, live: bool(live & set(i.address_registers)),
        original=5,
        cycles=3,
        span=3,
    )


def _short_guard(order: Order) -> Iterator[Edit]:
    """A predicate is tested as a guard after at most six cycles."""
    yield from _shorten_distance(
        order,
        lambda i: i.base in ("ISETP", "FSETP") and not i.is_guarded,
        lambda i, live: bool(live & set(i.guard_registers)),
        original=11,
        cycles=6,
        span=6,
    )


def _short_uniform(order: Order) -> Iterator[Edit]:
    """A vector instruction reads a uniform result after at most three cycles."""
    yield from _shorten_distance(
        order,
        lambda i: i.base in ("UIADD3", "ULOP3", "UIMAD", "USHF", "ULEA"),
        lambda i, live: not i.base.startswith(("U", "R2UR", "S2UR")),
        original=6,
        cycles=3,
        span=3,
    )


def _short_matrix(order: Order) -> Iterator[Edit]:
    """Other arithmetic reads a matrix product after at most six cycles."""
    yield from _shorten_distance(
        order,
        lambda i: i.base in ("HMMA", "IMMA"),
        lambda i, live: i.base in ALU or i.base in ("F2FP", "STS", "STG"),
        original=12,
        cycles=6,
        span=6,
    )


def _stale_reuse(order: Order) -> Iterator[Edit]:
    """Slot a stays in the reuse cache although its register changes before the next use."""
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
                and not general_registers(between.uses)
                and _slot_a(order[at + 2]) == register
            ):
                yield edit


def _slot_a(instruction: Instruction) -> int | None:
    """The general register in operand slot a, or None."""
    register = instruction.payload >> 24 & 0xFF
    known = instruction.base in ALU and instruction.base != "MOV"
    return register if known and register != 255 and register in instruction.uses else None


def _illegal_encoding(order: Order) -> Iterator[Edit]:
    """Control words that are not legal."""
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


def _scoreboard_on_fixed_latency(order: Order) -> Iterator[Edit]:
    """Arithmetic with fixed latency sets a scoreboard, which it never releases."""
    for at, instruction in enumerate(order):
        control = instruction.control
        if instruction.base in ALU and (control.write_sb, control.read_sb) == (7, 7):
            yield Edit({at: control.with_(write_sb=at % 6)})
            yield Edit({at: control.with_(read_sb=at % 6)})


TIMINGS = {
    "wait right after the setter": block_mutation(_short_scoreboard_gap),
    "short stall": block_mutation(_short_stall),
    "short distance to an address": block_mutation(_short_address),
    "short distance to a guard": block_mutation(_short_guard),
    "short distance from uniform": block_mutation(_short_uniform),
    "short distance from a matrix product": block_mutation(_short_matrix),
    "stale reuse": block_mutation(_stale_reuse),
    "illegal encoding": block_mutation(_illegal_encoding),
    "scoreboard on fixed latency": block_mutation(_scoreboard_on_fixed_latency),
}
