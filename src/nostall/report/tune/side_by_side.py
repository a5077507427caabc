"""Comparison of two schedules block by block: moved and retimed instructions."""

from __future__ import annotations

from dataclasses import dataclass

from nostall.sass.model.loops import natural_loops
from nostall.sass.program import Function
from nostall.sass.schedule.changes import out_of_order


@dataclass(frozen=True, slots=True)
class BlockDiff:
    """Differences in one basic block.  Instructions are named by original index."""

    number: int
    start: int
    """Position of the first instruction in the function."""
    end: int
    """Position after the last instruction."""
    successors: tuple[int, ...]
    """Numbers of the blocks that may follow."""
    loops: tuple[int, ...]
    """Numbers of the loops that contain the block."""
    moved: tuple[int, ...]
    """The fewest instructions whose move explains the new order."""
    num_shifted: int
    """Positions that hold another instruction than in the original."""
    retimed: tuple[int, ...]
    """Instructions with another control word."""

    @property
    def changed(self) -> bool:
        """Whether anything in the block differs."""
        return bool(self.num_shifted or self.retimed)


def compare_blocks(original: Function, candidate: Function) -> list[BlockDiff]:
    """The differences of two schedules of one function; instructions stay in their block."""
    loops = natural_loops(original.blocks)
    controls = {i.index: i.control for i in original.instructions}
    diffs: list[BlockDiff] = []
    for number, block in enumerate(original.blocks):
        old_order = [i.index for i in original.instructions[block.start : block.end]]
        instructions = candidate.instructions[block.start : block.end]
        position = {index: at for at, index in enumerate(old_order)}
        order = [i.index for i in instructions]
        diffs.append(
            BlockDiff(
                number=number,
                start=block.start,
                end=block.end,
                successors=block.succ,
                loops=tuple(loop.number for loop in loops if number in loop.body),
                moved=tuple(out_of_order(order, [position[i] for i in order])),
                num_shifted=sum(a != b for a, b in zip(old_order, order, strict=True)),
                retimed=tuple(i.index for i in instructions if i.control != controls[i.index]),
            )
        )
    return diffs
