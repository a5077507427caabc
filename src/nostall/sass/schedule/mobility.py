"""Mobility of a kernel: the number of instructions that can move, and why the others cannot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nostall.sass.schedule.moves import Slide
from nostall.sass.schedule.space import ScheduleSpace


@dataclass(frozen=True)
class Mobility:
    """Counts of movable and pinned instructions in a kernel's start schedule."""

    total: int
    """All instructions."""
    movable: int
    """Instructions with at least one legal slide."""
    slides: int
    """Legal slides of all instructions."""
    pins: dict[str, int]
    """Cause -> number of instructions that it keeps from moving."""

    @property
    def share(self) -> float:
        """Share of the instructions that can move, 0 to 1."""
        return self.movable / self.total if self.total else 0.0


def mobility(space: ScheduleSpace) -> Mobility:
    """Try each slide of each instruction of the start schedule."""
    state = space.start()
    slides = [move for move in space.moves(state) if isinstance(move, Slide)]
    movable = {move.index for move in slides}
    pins: Counter[str] = Counter()
    for instruction in space.function.instructions:
        if instruction.index in movable:
            continue
        if instruction.index in space.function.pinned:
            pins["offset recorded in an unknown layout"] += 1
        elif instruction.index in space.function.frozen:
            pins["next to code that cannot be seen (calls)"] += 1
        elif not instruction.is_known_opcode:
            pins["opcode without a row"] += 1
        elif instruction.base == "NOP" or instruction.text == "NOP":
            pins["padding and NOP"] += 1
        elif instruction.is_barrier:
            pins["barrier, branch or asynchronous operation"] += 1
        else:
            pins["held by dependences and latencies"] += 1
    return Mobility(len(space.function.instructions), len(movable), len(slides), dict(pins))
