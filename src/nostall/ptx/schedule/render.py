"""The text of a module with blocks in another order.

A block has one slot for each unit: the place of the unit in the original text. What stands between
slots (labels, directives, comments on lines of their own) stays. A unit that moved takes a line of
its own, together with the comment that ends its line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nostall.ptx.program.blocks import Block
from nostall.ptx.schedule.edits import EditedText


class Renderer:
    """Writes ranges of an edited text, with new orders of blocks by the offset of the block."""

    def __init__(
        self, original: str, edited: EditedText, orders: Mapping[int, Sequence[int]]
    ) -> None:
        self._original = original
        self._edited = edited
        self._orders = orders

    def render(self, start: int, end: int, blocks: Sequence[Block]) -> str:
        """The range of the original text, which has ``blocks`` as its outermost blocks."""
        pieces: list[str] = []
        at = start
        for block in blocks:
            order = self._orders.get(block.start, range(len(block)))
            for slot, number in zip(block.units, order, strict=True):
                unit = block.units[number]
                pieces.append(self._edited.piece(at, slot.start))
                content = self.render(unit.start, unit.end, unit.blocks)
                if unit is slot:
                    pieces.append(content)
                else:
                    pieces += (
                        "" if self._begins_line(slot.start) else "\n\t",
                        content,
                        "" if self._ends_line(slot.end) else "\n",
                    )
                at = slot.end
        pieces.append(self._edited.piece(at, end))
        return "".join(pieces)

    def _begins_line(self, offset: int) -> bool:
        """Whether only white space stands between the line's start and ``offset``."""
        line_start = self._original.rfind("\n", 0, offset) + 1
        return not self._original[line_start:offset].strip()

    def _ends_line(self, offset: int) -> bool:
        """Whether only white space stands between ``offset`` and the line's end."""
        line_end = self._original.find("\n", offset)
        line_end = len(self._original) if line_end < 0 else line_end
        return not self._original[offset:line_end].strip()
