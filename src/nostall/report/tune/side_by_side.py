"""Both schedules block by block: what moved, what was re-timed, what stayed."""

from __future__ import annotations

from dataclasses import dataclass

from nostall.sass.model.loops import natural_loops
from nostall.sass.program import Function
from nostall.sass.schedule.changes import out_of_order


@dataclass(frozen=True, slots=True)
class BlockLineup:
    """One basic block.  ``moved`` are the original indices that changed their place among the
    others; ``shifted`` counts positions that hold another instruction than before; ``retimed``
    are the instructions whose control word differs."""

    number: int
    start: int
    end: int
    succ: tuple[int, ...]
    loops: tuple[int, ...]
    moved: tuple[int, ...]
    shifted: int
    retimed: tuple[int, ...]

    @property
    def changed(self) -> bool:
        """Whether anything in the block differs."""
        return bool(self.shifted or self.retimed)


def lineup(original: Function, candidate: Function) -> list[BlockLineup]:
    """The blocks of two schedules of one function; instructions stay inside their block."""
    loops = natural_loops(original.blocks)
    before = {i.index: i.control for i in original.instructions}
    found: list[BlockLineup] = []
    for number, block in enumerate(original.blocks):
        old = [i.index for i in original.instructions[block.start : block.end]]
        new = candidate.instructions[block.start : block.end]
        place = {index: at for at, index in enumerate(old)}
        order = [i.index for i in new]
        found.append(
            BlockLineup(
                number=number,
                start=block.start,
                end=block.end,
                succ=block.succ,
                loops=tuple(loop.number for loop in loops if number in loop.body),
                moved=tuple(out_of_order(order, [place[i] for i in order])),
                shifted=sum(a != b for a, b in zip(old, order, strict=True)),
                retimed=tuple(i.index for i in new if i.control != before[i.index]),
            )
        )
    return found
