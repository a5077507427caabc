"""Edits that are safe by construction; the verifier has to accept every one.

Where a place must be free of dependences, that is decided here from registers and mnemonics; where
instructions move, stalls grow so that no pair comes closer than it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.program import Function, Instruction, Program
from tests.mutations.edits import (
    ALU,
    Edit,
    Mutation,
    fenced,
    first_reader,
    guardians,
    in_blocks,
    mutation,
    unit,
)

Order = Sequence[Instruction]


def _nothing(_: Program, function: Function) -> Iterator[Edit]:
    """The original itself."""
    del function
    yield Edit()


def _larger_stall(order: Order) -> Iterator[Edit]:
    """An arithmetic instruction stalls longer."""
    for at, instruction in enumerate(order):
        control = instruction.control
        if instruction.base in ALU and control.stall < 11:
            yield Edit({at: control.with_(stall=control.stall + 1)})
            yield Edit({at: control.with_(stall=11)})


def _yield_flipped(order: Order) -> Iterator[Edit]:
    """The yield flag flipped where both forms exist."""
    for at, instruction in enumerate(order):
        control = instruction.control
        if instruction.base in ALU and not control.reuse and 1 <= control.stall <= 11:
            yield Edit({at: control.with_(yields=not control.yields)})


def _reuse_cleared(order: Order) -> Iterator[Edit]:
    """An operand is no longer kept in the operand cache."""
    for at, instruction in enumerate(order):
        if instruction.control.reuse and instruction.base in ALU:
            yield Edit({at: instruction.control.with_(reuse=0)})


def _wait_added(order: Order) -> Iterator[Edit]:
    """One more wait, for a scoreboard that nothing set in the last two cycles."""
    for at, instruction in enumerate(order):
        if instruction.base not in ALU or at == 0:
            continue
        recent = order[max(at - 4, 0) : at]
        busy = {sb for i in recent for sb in (i.control.write_sb, i.control.read_sb)}
        for board in set(range(6)) - busy - set(instruction.control.waits):
            if sum(i.control.stall for i in recent) >= 2:
                control = instruction.control
                yield Edit({at: control.with_(wait=control.wait | 1 << board)})


def _independent_swap(order: Order) -> Iterator[Edit]:
    """Two neighbouring arithmetic instructions that touch nothing in common."""
    yield from _slides(order, 1)


def _long_slide(order: Order) -> Iterator[Edit]:
    """An arithmetic instruction moved down past three that touch nothing of it."""
    yield from _slides(order, 3)


def _slides(order: Order, by: int) -> Iterator[Edit]:
    """Slides whose stalls are raised so that no two instructions come closer than they were: the
    mover is followed by what it passed, and what is passed starts no earlier than before."""
    for at in range(1, len(order) - by - 1):
        mover, passed, before = order[at], order[at + 1 : at + by + 1], order[at - 1]
        if not _independent(mover, passed) or before.base not in ALU:
            continue
        controls = {k: order[k].control.with_(reuse=0) for k in range(at - 1, at + by + 1)}
        first = before.control.stall + mover.control.stall
        last = mover.control.stall + sum(i.control.stall for i in passed)
        if first <= 11 and last <= 11:
            controls[at - 1] = controls[at - 1].with_(stall=first)
            controls[at] = controls[at].with_(stall=last)
            end = controls[at + by]  # compilers leave two cycles between neighbours of one unit
            controls[at + by] = end.with_(stall=max(2, end.stall))
            yield Edit(controls, (at, at + by))


def _independent(mover: Instruction, passed: Order) -> bool:
    """Whether ``mover`` has nothing in common with arithmetic instructions without waits."""
    group = (mover, *passed)
    if any(i.base not in ALU or i.control.wait for i in group) or fenced(group, 0, len(passed)):
        return False
    return not any(
        set(mover.defs) & {*other.defs, *other.uses} or set(mover.uses) & set(other.defs)
        for other in passed
    )


def _renamed(order: Order) -> Iterator[Edit]:
    """A load's scoreboard replaced by one unused in the block, and its only waiter follows.

    The waiter keeps waiting for the old scoreboard too."""
    used = {sb for i in order for sb in (i.control.write_sb, i.control.read_sb, *i.control.waits)}
    free = set(range(6)) - used
    if any(i.base in ("DEPBAR", "LDGDEPBAR") for i in order):
        return
    for at, instruction in enumerate(order):
        board = instruction.control.write_sb
        if unit(instruction) < 0 or board > 5 or not instruction.defs:
            continue
        reader = first_reader(order, at)
        if reader is None or reader > at + 40:
            continue
        found = guardians(order, at, reader, of_sources=True)
        if len(found) != 1 or found[0].setter != at or len(found[0].waiters) != 1:
            continue
        waiter = found[0].waiters[0]
        control = order[waiter].control
        gone = instruction.control.read_sb > 5
        for other in free:
            if gone and not _covers_others(order, at):
                yield Edit(
                    {
                        at: instruction.control.with_(write_sb=other),
                        waiter: control.with_(wait=control.wait | 1 << other),
                    }
                )


def _covers_others(order: Order, at: int) -> bool:
    """Whether an earlier instruction of the unit may rely on this one's scoreboard."""
    return any(unit(i) == unit(order[at]) for i in order[:at])


LEGAL: dict[str, Mutation] = {
    "no change": mutation(_nothing),
    "larger stall": in_blocks(_larger_stall, frozen=False),
    "yield flipped": in_blocks(_yield_flipped, frozen=False),
    "reuse cleared": in_blocks(_reuse_cleared, frozen=False),
    "wait added": in_blocks(_wait_added, frozen=False),
    "independent swap": in_blocks(_independent_swap, frozen=False),
    "slide by three": in_blocks(_long_slide, frozen=False),
    "scoreboard renamed": in_blocks(_renamed, frozen=False),
}
