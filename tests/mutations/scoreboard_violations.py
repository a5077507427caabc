"""Scoreboard violations: missing or wrong scoreboards and waits, inside and across blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.binary.encoding import Control
from nostall.sass.program import Function, Instruction, Program
from tests.mutations.edits import (
    ALU,
    BARRIERS,
    IN_ORDER_RESULTS,
    TEXTURE,
    Edit,
    ScoreboardProtection,
    block_mutation,
    blocks,
    find_protections,
    first_overwriter,
    first_reader,
    has_bar,
    has_barrier,
    has_depbar,
    mutation,
    unit_number,
    unused_scoreboards,
)

Order = Sequence[Instruction]


def protected_results(order: Order) -> Iterator[tuple[int, int, ScoreboardProtection]]:
    """(producer, reader, only protection) of loads whose result the block reads."""
    for at, instruction in enumerate(order):
        if unit_number(instruction) < 0 or not instruction.defs or instruction.base in BARRIERS:
            continue
        reader = first_reader(order, at)
        if reader is None or has_depbar(order, at + 1, reader):
            continue
        protections = find_protections(order, at, reader, of_sources=False)
        if len(protections) == 1:
            yield at, reader, protections[0]


def protected_sources(order: Order) -> Iterator[tuple[int, int, ScoreboardProtection]]:
    """(reader, overwriter, only protection) of accesses whose sources the block overwrites."""
    for at, instruction in enumerate(order):
        if (
            unit_number(instruction) != 0
            or instruction.base in BARRIERS
            or instruction.never_executes
        ):
            continue
        writer = first_overwriter(order, at)
        if writer is None or unit_number(order[writer]) >= 0:
            continue
        if has_depbar(order, at + 1, writer) or has_bar(order, at + 1, writer):
            continue
        protections = find_protections(order, at, writer, of_sources=True)
        if len(protections) == 1:
            yield at, writer, protections[0]


def _without_wait(control: Control, scoreboard: int) -> Control:
    return control.with_(wait=control.wait & ~(1 << scoreboard))


def _dropped_wait(order: Order) -> Iterator[Edit]:
    """The only wait between a load and the first reader of its result is removed."""
    for _, _, protection in protected_results(order):
        if len(protection.waiters) == 1:
            waiter = protection.waiters[0]
            yield Edit({waiter: _without_wait(order[waiter].control, protection.scoreboard)})


def _dropped_source_wait(order: Order) -> Iterator[Edit]:
    """The only wait between an access and the write to its sources is removed."""
    for _, _, protection in protected_sources(order):
        if len(protection.waiters) == 1 and order[protection.waiters[0]].base not in BARRIERS:
            waiter = protection.waiters[0]
            yield Edit({waiter: _without_wait(order[waiter].control, protection.scoreboard)})


def _late_wait(order: Order) -> Iterator[Edit]:
    """The wait moves from the reader to the next instruction."""
    for _, reader, protection in protected_results(order):
        if protection.waiters == (reader,) and reader + 1 < len(order):
            after = order[reader + 1].control
            yield Edit(
                {
                    reader: _without_wait(order[reader].control, protection.scoreboard),
                    reader + 1: after.with_(wait=after.wait | 1 << protection.scoreboard),
                }
            )


def _wrong_scoreboard(order: Order) -> Iterator[Edit]:
    """The only wait is for another scoreboard than the one that is set."""
    for at, reader, protection in protected_results(order):
        if len(protection.waiters) != 1:
            continue
        waiter = protection.waiters[0]
        control = _without_wait(order[waiter].control, protection.scoreboard)
        used = {
            sb for i in order[at : reader + 1] for sb in (i.control.write_sb, i.control.read_sb)
        }
        for other in set(range(6)) - used:
            yield Edit({waiter: control.with_(wait=control.wait | 1 << other)})


def _write_scoreboard_removed(order: Order) -> Iterator[Edit]:
    """A load sets no write scoreboard."""
    for at, _, protection in protected_results(order):
        if protection.setter == at and protection.is_write:
            yield Edit(protection.removed(order))


def _write_scoreboard_changed(order: Order) -> Iterator[Edit]:
    """A load sets a write scoreboard that its reader does not wait for."""
    for at, reader, protection in protected_results(order):
        if protection.setter == at and protection.is_write:
            for scoreboard in unused_scoreboards(order, at + 1, reader):
                yield Edit({at: order[at].control.with_(write_sb=scoreboard)})


def _read_scoreboard_removed(order: Order) -> Iterator[Edit]:
    """An access whose sources are overwritten later sets no read scoreboard."""
    for at, _, protection in protected_sources(order):
        if protection.setter == at and not protection.is_write:
            yield Edit(protection.removed(order))


def _read_scoreboard_changed(order: Order) -> Iterator[Edit]:
    """An access sets a read scoreboard that no instruction waits for."""
    for at, writer, protection in protected_sources(order):
        if protection.setter == at and not protection.is_write:
            for scoreboard in unused_scoreboards(order, at + 1, writer):
                yield Edit({at: order[at].control.with_(read_sb=scoreboard)})


def _source_cover_removed(order: Order) -> Iterator[Edit]:
    """The later access whose read scoreboard covers earlier ones of its queue sets none."""
    for at, _, protection in protected_sources(order):
        if protection.setter != at and not protection.is_write:
            yield Edit(protection.removed(order))


def _result_cover_removed(order: Order) -> Iterator[Edit]:
    """The later load whose write scoreboard covers earlier results of its queue sets none."""
    for at, _, protection in protected_results(order):
        if protection.setter != at and order[at].base in IN_ORDER_RESULTS:
            yield Edit(protection.removed(order))


def _below_source_cover(order: Order) -> Iterator[Edit]:
    """An access without a read scoreboard moves after the access that covers its sources."""
    for at, _, protection in protected_sources(order):
        if protection.setter != at and not has_barrier(order, at, protection.setter):
            yield Edit(move=(at, protection.setter))


def _below_result_cover(order: Order) -> Iterator[Edit]:
    """A load without a write scoreboard moves after the load that covers its result."""
    for at, _, protection in protected_results(order):
        if protection.setter != at and not has_barrier(order, at, protection.setter):
            yield Edit(move=(at, protection.setter))


def _above_waiter(order: Order) -> Iterator[Edit]:
    """A reader that relies on the wait of an earlier instruction moves before that wait."""
    for at, reader, protection in protected_results(order):
        waiter = protection.waiters[0]
        if waiter < reader and waiter > at and not has_barrier(order, waiter, reader):
            yield Edit(move=(reader, waiter))


def _commit_scoreboard_changed(order: Order) -> Iterator[Edit]:
    """The commit of an asynchronous group sets another scoreboard."""
    for at, instruction in enumerate(order):
        control = instruction.control
        if instruction.base == "LDGDEPBAR":
            for scoreboard in (*range(6), 7):
                if scoreboard != control.write_sb:
                    yield Edit({at: control.with_(write_sb=scoreboard)})


def _barrier_wait_dropped(order: Order) -> Iterator[Edit]:
    """A barrier does not wait for the accesses of its own warp."""
    for at, instruction in enumerate(order):
        if instruction.base in ("BAR", "WARPGROUP", "LDGDEPBAR", "MEMBAR"):
            for scoreboard in instruction.control.waits:
                yield Edit({at: _without_wait(instruction.control, scoreboard)})


def _partial_wait_uncounted(order: Order) -> Iterator[Edit]:
    """Texture accesses set another scoreboard, so that a DEPBAR with a count does not wait.

    The DEPBAR waits until all but n accesses of its scoreboard are done.  Only n accesses still
    set it, so the result of the first one is read before a wait.  A later instruction waits for
    the new scoreboard, which also proves the first access done, because they complete in order.
    """
    for at, wait in enumerate(order):
        if wait.base != "DEPBAR" or len(wait.operands) != 2:
            continue
        scoreboard, count = int(wait.operands[0].removeprefix("SB")), int(wait.operands[1], 16)
        setters = [k for k in range(at) if order[k].control.write_sb == scoreboard]
        proven = len(setters) - count
        if count == 0 or proven < 1 or any(order[k].base not in TEXTURE for k in setters):
            continue
        reader = first_reader(order, setters[0])
        if reader is None or reader <= at:
            continue
        later = next((k for k in range(reader + 1, len(order)) if order[k].base in ALU), None)
        if later is None:
            continue
        used = {sb for i in order for sb in (*i.control.waits, i.control.write_sb)}
        if scoreboard in {sb for i in order[: reader + 1] for sb in i.control.waits}:
            continue
        after = order[later].control
        for other in set(range(6)) - used:
            moved = setters[1 : proven + 1]
            edit = {k: order[k].control.with_(write_sb=other) for k in moved}
            yield Edit({**edit, later: after.with_(wait=after.wait | 1 << other)})


def _weaker_exit(_: Program, function: Function) -> Iterator[Edit]:
    """A block leaves a result in flight whose scoreboard its successor does not wait for."""
    for start, at, scoreboard, order, reader in _crossing(function):
        if any(scoreboard in i.control.waits for i in order[: reader + 1]):
            control = function.instructions[start + at].control
            yield Edit({start + at: control.with_(write_sb=7)})
            for other in unused_scoreboards(order, 0, reader):
                yield Edit({start + at: control.with_(write_sb=other)})


def _weaker_entry(_: Program, function: Function) -> Iterator[Edit]:
    """A reader moves before the block's only wait for what its predecessor leaves in flight."""
    starts = {id(order[0]): start for start, order in blocks(function)}
    for _, _, scoreboard, order, reader in _crossing(function):
        waiters = [k for k in range(reader + 1) if scoreboard in order[k].control.waits]
        if len(waiters) == 1:
            waiter, base = waiters[0], starts[id(order[0])]
            if waiter < reader and not has_barrier(order, waiter, reader):
                yield Edit(move=(base + reader, base + waiter))
            control = order[waiter].control
            yield Edit({base + waiter: _without_wait(control, scoreboard)})


def _crossing(function: Function) -> Iterator[tuple[int, int, int, Order, int]]:
    """Results that only a wait in a successor block makes safe to read.

    Yields (start of the block, position of the producer in it, its scoreboard, instructions of the
    successor, position of the first reader in it).
    """
    for block in function.blocks:
        before = function.instructions[block.start : block.end]
        for at, first in enumerate(before):
            scoreboard = first.control.write_sb
            if (
                unit_number(first) < 0
                or scoreboard > 5
                or first.base in BARRIERS
                or first.is_guarded
            ):
                continue
            live, rest = set(first.defs), before[at + 1 :]
            if any(live & {*i.defs, *i.uses} or i.control.wait for i in rest):
                continue
            if any(unit_number(i) == unit_number(first) or i.base == "DEPBAR" for i in rest):
                continue
            for number in block.succ:
                into = function.blocks[number]
                after = function.instructions[into.start : into.end]
                reader = _first_touch(after, live, first)
                if reader is not None:
                    yield block.start, at, scoreboard, after, reader


def _first_touch(order: Order, live: set[int], first: Instruction) -> int | None:
    """Position of the first reader of ``live``, or None if it is guarded or protected otherwise."""
    for at, instruction in enumerate(order):
        if instruction.base == "DEPBAR":
            return None
        if live & set(instruction.uses):
            return at if not instruction.is_guarded else None
        if live & set(instruction.defs) or unit_number(instruction) == unit_number(first):
            return None
    return None


SCOREBOARDS = {
    "dropped wait": block_mutation(_dropped_wait),
    "dropped wait for sources": block_mutation(_dropped_source_wait),
    "wait one instruction late": block_mutation(_late_wait),
    "wait for the wrong scoreboard": block_mutation(_wrong_scoreboard),
    "write scoreboard removed": block_mutation(_write_scoreboard_removed),
    "write scoreboard changed": block_mutation(_write_scoreboard_changed),
    "read scoreboard removed": block_mutation(_read_scoreboard_removed),
    "read scoreboard changed": block_mutation(_read_scoreboard_changed),
    "cover of sources removed": block_mutation(_source_cover_removed),
    "cover of results removed": block_mutation(_result_cover_removed),
    "access moved below its cover": block_mutation(_below_source_cover),
    "load moved below its cover": block_mutation(_below_result_cover),
    "reader moved above its wait": block_mutation(_above_waiter),
    "commit counts elsewhere": block_mutation(_commit_scoreboard_changed),
    "barrier without its wait": block_mutation(_barrier_wait_dropped),
    "partial wait counts too little": block_mutation(_partial_wait_uncounted),
    "weakened exit": mutation(_weaker_exit),
    "weakened entry": mutation(_weaker_entry),
}
