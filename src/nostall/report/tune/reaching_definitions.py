"""Reaching definitions and reads: which instructions may have last written or read a register."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nostall.sass.program import Block, Instruction

RegisterSets = dict[int, frozenset[int]]
"""Register number -> original indices of instructions."""
_NONE: frozenset[int] = frozenset()


class ReachingDefinitions:
    """Forward dataflow analysis of a function, and a cursor over its blocks.

    :meth:`enter` moves the cursor to the start of a block, :meth:`step` past an instruction;
    :meth:`writers` and :meth:`readers` answer for the cursor's position.
    """

    def __init__(
        self,
        order: Sequence[Instruction],
        blocks: Sequence[Block],
        late_sources: Mapping[int, Sequence[int]],
    ) -> None:
        """``late_sources``: registers that an instruction may still read after it is issued."""
        self._late_sources = late_sources
        self._written: RegisterSets = {}
        self._read: RegisterSets = {}
        self._entries = self._solve(order, blocks)

    def enter(self, block: int) -> None:
        """Move the cursor to the start of a block."""
        written, read = self._entries[block]
        self._written, self._read = dict(written), dict(read)

    def step(self, instruction: Instruction) -> None:
        """Move the cursor past an instruction.

        A write without a guard ends the earlier writes and reads of its register.
        """
        only_this = frozenset((instruction.index,))
        late_sources = self._late_sources.get(instruction.index, ())
        for register in late_sources:
            self._read[register] = self._read.get(register, _NONE) | only_this
        for register in instruction.defs:
            if instruction.is_guarded:
                self._written[register] = self._written.get(register, _NONE) | only_this
            else:
                self._written[register] = only_this
                self._read[register] = only_this if register in late_sources else _NONE

    def writers(self, register: int) -> Iterable[int]:
        """Instructions whose result may be in the register."""
        return sorted(self._written.get(register, _NONE))

    def readers(self, register: int) -> Iterable[int]:
        """Instructions that may still be reading the register."""
        return sorted(self._read.get(register, _NONE))

    def _solve(
        self, order: Sequence[Instruction], blocks: Sequence[Block]
    ) -> list[tuple[RegisterSets, RegisterSets]]:
        """(written, read) at the entry of each block, by a worklist until nothing changes."""
        entries: list[tuple[RegisterSets, RegisterSets]] = [({}, {}) for _ in blocks]
        worklist = list(range(len(blocks) - 1, -1, -1))
        queued = set(worklist)
        while worklist:
            number = worklist.pop()
            queued.discard(number)
            self._written, self._read = dict(entries[number][0]), dict(entries[number][1])
            for position in range(blocks[number].start, blocks[number].end):
                self.step(order[position])
            for successor in blocks[number].succ:
                written_grew = _merge(entries[successor][0], self._written)
                read_grew = _merge(entries[successor][1], self._read)
                if (written_grew or read_grew) and successor not in queued:
                    queued.add(successor)
                    worklist.append(successor)
        return entries


def _merge(into: RegisterSets, sets: RegisterSets) -> bool:
    """Add ``sets`` to ``into``; returns whether ``into`` grew."""
    changed = False
    for register, instructions in sets.items():
        known = into.get(register, _NONE)
        if not instructions <= known:
            into[register] = known | instructions
            changed = True
    return changed
