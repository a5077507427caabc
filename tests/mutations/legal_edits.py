"""Edits that are safe by construction, so the verifier must accept all of them.

Registers and mnemonics decide whether a place is free of dependences.  If an instruction moves,
stalls grow so that no pair comes closer than in the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.program import Function, Instruction, Program
from tests.mutations.edits import (
    ALU,
    Edit,
    Mutation,
    block_mutation,
    find_protections,
    first_reader,
    has_barrier,
    mutation,
    unit_number,
)

Order = Sequence[Instruction]


def _no_change(_: Program, function: Function) -> Iterator[Edit]:
    """No change."""
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
    """An instruction keeps no operand in the reuse cache."""
    for at, instruction in enumerate(order):
        if instruction.control.reuse and instruction.base in ALU:
            yield Edit({at: instruction.control.with_(reuse=0)})


def _wait_added(order: Order) -> Iterator[Edit]:
    """An additional wait, for a scoreboard that was not set in the last two cycles."""
    for at, instruction in enumerate(order):
        if instruction.base not in ALU or at == 0:
            continue
        recent = order[max(at - 4, 0) : at]
        busy = {sb for i in recent for sb in (i.control.write_sb, i.control.read_sb)}
        for scoreboard in set(range(6)) - busy - set(instruction.control.waits):
            if sum(i.control.stall for i in recent) >= 2:
                control = instruction.control
                yield Edit({at: control.with_(wait=control.wait | 1 << scoreboard)})


def _independent_swap(order: Order) -> Iterator[Edit]:
    """Two neighbouring arithmetic instructions without a common register are exchanged."""
    yield from _slides(order, 1)


def _long_slide(order: Order) -> Iterator[Edit]:
    """An arithmetic instruction moves past three later ones without a common register."""
    yield from _slides(order, 3)


def _slides(order: Order, by: int) -> Iterator[Edit]:
    """Moves by ``by`` positions, with stalls raised so that no two instructions come closer.

    The passed instructions issue no earlier than before, and neither do those after the mover.
    """
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
    """Whether ``mover`` and ``passed`` are arithmetic without waits or common registers."""
    group = (mover, *passed)
    if any(i.base not in ALU or i.control.wait for i in group) or has_barrier(
        group, 0, len(passed)
    ):
        return False
    return not any(
        set(mover.defs) & {*other.defs, *other.uses} or set(mover.uses) & set(other.defs)
        for other in passed
    )


def _scoreboard_renamed(order: Order) -> Iterator[Edit]:
    """A load sets a scoreboard that the block does not use, and its only waiter waits for that.

    The waiter waits for the old scoreboard, too.
    """
    used = {sb for i in order for sb in (i.control.write_sb, i.control.read_sb, *i.control.waits)}
    free = set(range(6)) - used
    if any(i.base in ("DEPBAR", "LDGDEPBAR") for i in order):
        return
    for at, instruction in enumerate(order):
        scoreboard = instruction.control.write_sb
        if unit_number(instruction) < 0 or scoreboard > 5 or not instruction.defs:
            continue
        reader = first_reader(order, at)
        if reader is None or reader > at + 40:
            continue
        protections = find_protections(order, at, reader, of_sources=True)
        if len(protections) != 1 or protections[0].setter != at or len(protections[0].waiters) != 1:
            continue
        waiter = protections[0].waiters[0]
        control = order[waiter].control
        sets_no_read_scoreboard = instruction.control.read_sb > 5
        for new in free:
            if sets_no_read_scoreboard and not _covers_earlier(order, at):
                yield Edit(
                    {
                        at: instruction.control.with_(write_sb=new),
                        waiter: control.with_(wait=control.wait | 1 << new),
                    }
                )


def _covers_earlier(order: Order, at: int) -> bool:
    """Whether an earlier instruction of the unit may rely on the scoreboard of this one."""
    return any(unit_number(i) == unit_number(order[at]) for i in order[:at])


LEGAL: dict[str, Mutation] = {
    "no change": mutation(_no_change),
    "larger stall": block_mutation(_larger_stall, frozen=False),
    "yield flipped": block_mutation(_yield_flipped, frozen=False),
    "reuse cleared": block_mutation(_reuse_cleared, frozen=False),
    "wait added": block_mutation(_wait_added, frozen=False),
    "independent swap": block_mutation(_independent_swap, frozen=False),
    "slide by three": block_mutation(_long_slide, frozen=False),
    "scoreboard renamed": block_mutation(_scoreboard_renamed, frozen=False),
}
