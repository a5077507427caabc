"""Violations in scoreboards: what is set, who waits, and what crosses a block's boundary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    guardians,
    in_blocks,
    mutation,
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


SCOREBOARDS = {
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
    "commit counts elsewhere": in_blocks(_commit_board_changed),
    "barrier without its wait": in_blocks(_barrier_wait_dropped),
    "partial wait counts too little": in_blocks(_uncounted),
    "weakened exit": mutation(_weaker_exit),
    "weakened entry": mutation(_weaker_entry),
}
