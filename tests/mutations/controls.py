"""Violations in control words: waits, scoreboards, stalls, operand caches, encodings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nostall.sass.binary.encoding import Control
from nostall.sass.program import Function, Instruction, Program
from tests.mutations.edits import (
    ALU,
    FENCES,
    SHARED_RESULTS,
    TEXTURE,
    Edit,
    Guardian,
    blocks,
    counted_wait,
    drains,
    fenced,
    first_overwriter,
    first_reader,
    general,
    guardians,
    in_blocks,
    mutation,
    together,
    unit,
    unwaited,
)

Order = Sequence[Instruction]


def results(order: Order) -> Iterator[tuple[int, int, Guardian]]:
    """(producer, reader, its only protection) of loads whose result is read in the block."""
    for at, instruction in enumerate(order):
        if unit(instruction) < 0 or not instruction.defs or instruction.base in FENCES:
            continue
        reader = first_reader(order, at)
        if reader is None or counted_wait(order, at + 1, reader):
            continue
        found = guardians(order, at, reader, of_sources=False)
        if len(found) == 1:
            yield at, reader, found[0]


def sources(order: Order) -> Iterator[tuple[int, int, Guardian]]:
    """(reader, overwriter, the only protection) of accesses whose sources are overwritten."""
    for at, instruction in enumerate(order):
        if unit(instruction) != 0 or instruction.base in FENCES or instruction.never_executes:
            continue
        writer = first_overwriter(order, at)
        if writer is None or unit(order[writer]) >= 0:
            continue
        if counted_wait(order, at + 1, writer) or drains(order, at + 1, writer):
            continue
        found = guardians(order, at, writer, of_sources=True)
        if len(found) == 1:
            yield at, writer, found[0]


def _without(control: Control, board: int) -> Control:
    return control.with_(wait=control.wait & ~(1 << board))


def _dropped_wait(order: Order) -> Iterator[Edit]:
    """The only wait between a load and the first reader of its result is gone."""
    for _, _, guardian in results(order):
        if len(guardian.waiters) == 1:
            waiter = guardian.waiters[0]
            yield Edit({waiter: _without(order[waiter].control, guardian.board)})


def _dropped_source_wait(order: Order) -> Iterator[Edit]:
    """The only wait between an access and the overwriting of its sources is gone."""
    for _, _, guardian in sources(order):
        if len(guardian.waiters) == 1 and order[guardian.waiters[0]].base not in FENCES:
            waiter = guardian.waiters[0]
            yield Edit({waiter: _without(order[waiter].control, guardian.board)})


def _late_wait(order: Order) -> Iterator[Edit]:
    """The wait moved from the reader to the instruction behind it."""
    for _, reader, guardian in results(order):
        if guardian.waiters == (reader,) and reader + 1 < len(order):
            after = order[reader + 1].control
            yield Edit(
                {
                    reader: _without(order[reader].control, guardian.board),
                    reader + 1: after.with_(wait=after.wait | 1 << guardian.board),
                }
            )


def _wrong_board(order: Order) -> Iterator[Edit]:
    """The only waiter waits for another scoreboard than the one that is set."""
    for at, reader, guardian in results(order):
        if len(guardian.waiters) != 1:
            continue
        waiter = guardian.waiters[0]
        control = _without(order[waiter].control, guardian.board)
        used = {
            sb for i in order[at : reader + 1] for sb in (i.control.write_sb, i.control.read_sb)
        }
        for other in set(range(6)) - used:
            yield Edit({waiter: control.with_(wait=control.wait | 1 << other)})


def _write_board_removed(order: Order) -> Iterator[Edit]:
    """A load no longer announces its result."""
    for at, _, guardian in results(order):
        if guardian.setter == at and guardian.is_write:
            yield Edit(guardian.removed(order))


def _write_board_changed(order: Order) -> Iterator[Edit]:
    """A load announces its result by a scoreboard that its reader does not wait for."""
    for at, reader, guardian in results(order):
        if guardian.setter == at and guardian.is_write:
            for board in unwaited(order, at + 1, reader):
                yield Edit({at: order[at].control.with_(write_sb=board)})


def _read_board_removed(order: Order) -> Iterator[Edit]:
    """An access no longer announces that its sources, overwritten later, were read."""
    for at, _, guardian in sources(order):
        if guardian.setter == at and not guardian.is_write:
            yield Edit(guardian.removed(order))


def _read_board_changed(order: Order) -> Iterator[Edit]:
    """An access announces the reading of its sources by a scoreboard nobody waits for."""
    for at, writer, guardian in sources(order):
        if guardian.setter == at and not guardian.is_write:
            for board in unwaited(order, at + 1, writer):
                yield Edit({at: order[at].control.with_(read_sb=board)})


def _source_cover_removed(order: Order) -> Iterator[Edit]:
    """The later access whose read scoreboard covered earlier ones of the queue has none."""
    for at, _, guardian in sources(order):
        if guardian.setter != at and not guardian.is_write:
            yield Edit(guardian.removed(order))


def _result_cover_removed(order: Order) -> Iterator[Edit]:
    """The later load whose write scoreboard covered earlier results of the queue has none."""
    for at, _, guardian in results(order):
        if guardian.setter != at and order[at].base in SHARED_RESULTS:
            yield Edit(guardian.removed(order))


def _below_source_cover(order: Order) -> Iterator[Edit]:
    """An uncovered access moved behind the access that covered its sources."""
    for at, _, guardian in sources(order):
        if guardian.setter != at and not fenced(order, at, guardian.setter):
            yield Edit(move=(at, guardian.setter))


def _below_result_cover(order: Order) -> Iterator[Edit]:
    """An uncovered load moved behind the load that covered its result."""
    for at, _, guardian in results(order):
        if guardian.setter != at and not fenced(order, at, guardian.setter):
            yield Edit(move=(at, guardian.setter))


def _above_waiter(order: Order) -> Iterator[Edit]:
    """A reader that relied on an earlier instruction's wait moved in front of that wait."""
    for at, reader, guardian in results(order):
        waiter = guardian.waiters[0]
        if waiter < reader and waiter > at and not fenced(order, waiter, reader):
            yield Edit(move=(reader, waiter))


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


def _commit_board_changed(order: Order) -> Iterator[Edit]:
    """The commit of an asynchronous group counts on another scoreboard."""
    for at, instruction in enumerate(order):
        control = instruction.control
        if instruction.base == "LDGDEPBAR":
            for board in (*range(6), 7):
                if board != control.write_sb:
                    yield Edit({at: control.with_(write_sb=board)})


def _barrier_wait_dropped(order: Order) -> Iterator[Edit]:
    """A barrier issues before this warp's accesses are done."""
    for at, instruction in enumerate(order):
        if instruction.base in ("BAR", "WARPGROUP", "LDGDEPBAR", "MEMBAR"):
            for board in instruction.control.waits:
                yield Edit({at: _without(instruction.control, board)})


def _uncounted(order: Order) -> Iterator[Edit]:
    """DEPBAR waits until all but n of a scoreboard's texture accesses are done; so many of them
    now count elsewhere that only n are left, and the first is read before it is waited for (the
    others' scoreboard, which in order proves the first one too, is waited for after that)."""
    for at, wait in enumerate(order):
        if wait.base != "DEPBAR" or len(wait.operands) != 2:
            continue
        board, left = int(wait.operands[0].removeprefix("SB")), int(wait.operands[1], 16)
        setters = [k for k in range(at) if order[k].control.write_sb == board]
        proven = len(setters) - left
        if left == 0 or proven < 1 or any(order[k].base not in TEXTURE for k in setters):
            continue
        reader = first_reader(order, setters[0])
        if reader is None or reader <= at:
            continue
        later = next((k for k in range(reader + 1, len(order)) if order[k].base in ALU), None)
        if later is None:
            continue
        taken = {sb for i in order for sb in (*i.control.waits, i.control.write_sb)}
        if board in {sb for i in order[: reader + 1] for sb in i.control.waits}:
            continue
        after = order[later].control
        for other in set(range(6)) - taken:
            moved = setters[1 : proven + 1]
            edit = {k: order[k].control.with_(write_sb=other) for k in moved}
            yield Edit({**edit, later: after.with_(wait=after.wait | 1 << other)})


def _weaker_exit(_: Program, function: Function) -> Iterator[Edit]:
    """A block leaves a result in flight that its successor's wait no longer covers."""
    for start, at, board, order, reader in _crossing(function):
        if any(board in i.control.waits for i in order[: reader + 1]):
            control = function.instructions[start + at].control
            yield Edit({start + at: control.with_(write_sb=7)})
            for other in unwaited(order, 0, reader):
                yield Edit({start + at: control.with_(write_sb=other)})


def _weaker_entry(_: Program, function: Function) -> Iterator[Edit]:
    """A reader moved above the block's only wait for what its predecessor left in flight."""
    starts = {id(order[0]): start for start, order in blocks(function)}
    for _, _, board, order, reader in _crossing(function):
        waiters = [k for k in range(reader + 1) if board in order[k].control.waits]
        if len(waiters) == 1:
            waiter, base = waiters[0], starts[id(order[0])]
            if waiter < reader and not fenced(order, waiter, reader):
                yield Edit(move=(base + reader, base + waiter))
            control = order[waiter].control
            yield Edit({base + waiter: _without(control, board)})


def _crossing(function: Function) -> Iterator[tuple[int, int, int, Order, int]]:
    """(block, producer, its scoreboard, successor's instructions, first reader there) of results
    that only a wait in the successor makes safe to read."""
    for block in function.blocks:
        before = function.instructions[block.start : block.end]
        for at, first in enumerate(before):
            board = first.control.write_sb
            if unit(first) < 0 or board > 5 or first.base in FENCES or first.is_guarded:
                continue
            live, rest = set(first.defs), before[at + 1 :]
            if any(live & {*i.defs, *i.uses} or i.control.wait for i in rest):
                continue
            if any(unit(i) == unit(first) or i.base == "DEPBAR" for i in rest):
                continue
            for number in block.succ:
                into = function.blocks[number]
                after = function.instructions[into.start : into.end]
                reader = _first_touch(after, live, first)
                if reader is not None:
                    yield block.start, at, board, after, reader


def _first_touch(order: Order, live: set[int], first: Instruction) -> int | None:
    for at, instruction in enumerate(order):
        if instruction.base == "DEPBAR":
            return None
        if live & set(instruction.uses):
            return at if not instruction.is_guarded else None
        if live & set(instruction.defs) or unit(instruction) == unit(first):
            return None
    return None


CONTROLS = {
    "dropped wait": in_blocks(_dropped_wait),
    "dropped wait for sources": in_blocks(_dropped_source_wait),
    "wait one instruction late": in_blocks(_late_wait),
    "wait for the wrong scoreboard": in_blocks(_wrong_board),
    "write scoreboard removed": in_blocks(_write_board_removed),
    "write scoreboard changed": in_blocks(_write_board_changed),
    "read scoreboard removed": in_blocks(_read_board_removed),
    "read scoreboard changed": in_blocks(_read_board_changed),
    "cover of sources removed": in_blocks(_source_cover_removed),
    "cover of results removed": in_blocks(_result_cover_removed),
    "access moved below its cover": in_blocks(_below_source_cover),
    "load moved below its cover": in_blocks(_below_result_cover),
    "reader moved above its wait": in_blocks(_above_waiter),
    "wait right after the setter": in_blocks(_short_gap),
    "short stall": in_blocks(_short_stall),
    "short distance to an address": in_blocks(_short_address),
    "short distance to a guard": in_blocks(_short_guard),
    "short distance from uniform": in_blocks(_short_uniform),
    "short distance from a matrix product": in_blocks(_short_matrix),
    "stale reuse": in_blocks(_stale_reuse),
    "illegal encoding": in_blocks(_illegal_encoding),
    "scoreboard on fixed latency": in_blocks(_board_without_signal),
    "commit counts elsewhere": in_blocks(_commit_board_changed),
    "barrier without its wait": in_blocks(_barrier_wait_dropped),
    "partial wait counts too little": in_blocks(_uncounted),
    "weakened exit": mutation(_weaker_exit),
    "weakened entry": mutation(_weaker_entry),
}
