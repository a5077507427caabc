"""Reaching definitions: who may have written a register last, and who may still be reading it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nostall.sass.program import Block, Instruction

Sets = dict[int, frozenset[int]]
_NONE: frozenset[int] = frozenset()


class Reaching:
    """Walks blocks with the fixpoint of both questions.

    ``late`` gives the registers that an instruction may read after its issue; a read ends with the
    next certain write of the register.
    """

    def __init__(
        self,
        order: Sequence[Instruction],
        blocks: Sequence[Block],
        late: Mapping[int, Sequence[int]],
    ) -> None:
        self._late = late
        self._written: Sets = {}
        self._read: Sets = {}
        self._at_entry = self._solve(order, blocks)

    def enter(self, block: int) -> None:
        """Go to the start of a block."""
        written, read = self._at_entry[block]
        self._written, self._read = dict(written), dict(read)

    def step(self, instruction: Instruction) -> None:
        """Go past an instruction."""
        here = frozenset((instruction.index,))
        for register in self._late.get(instruction.index, ()):
            self._read[register] = self._read.get(register, _NONE) | here
        for register in instruction.defs:
            if instruction.is_guarded:
                self._written[register] = self._written.get(register, _NONE) | here
            else:
                self._written[register] = here
                mine = register in self._late.get(instruction.index, ())
                self._read[register] = here if mine else _NONE

    def writers(self, register: int) -> Iterable[int]:
        """The instructions whose result may be in the register here."""
        return sorted(self._written.get(register, _NONE))

    def readers(self, register: int) -> Iterable[int]:
        """The instructions since the last certain write that read the register late."""
        return sorted(self._read.get(register, _NONE))

    def _solve(
        self, order: Sequence[Instruction], blocks: Sequence[Block]
    ) -> list[tuple[Sets, Sets]]:
        entries: list[tuple[Sets, Sets]] = [({}, {}) for _ in blocks]
        todo = list(range(len(blocks) - 1, -1, -1))
        waiting = set(todo)
        while todo:
            number = todo.pop()
            waiting.discard(number)
            self._written, self._read = dict(entries[number][0]), dict(entries[number][1])
            for at in range(blocks[number].start, blocks[number].end):
                self.step(order[at])
            for successor in blocks[number].succ:
                written = _merge(entries[successor][0], self._written)
                read = _merge(entries[successor][1], self._read)
                if (written or read) and successor not in waiting:
                    waiting.add(successor)
                    todo.append(successor)
        return entries


def _merge(into: Sets, other: Sets) -> bool:
    """Unite ``other`` into ``into``; True when that changed it."""
    changed = False
    for register, found in other.items():
        mine = into.get(register, _NONE)
        if not found <= mine:
            into[register] = mine | found
            changed = True
    return changed
