"""What is done at each level of reductions, in a pass over the columns.

In pass k all reductions are finished that need k others before them; what the reductions of the
next level and the outputs need is there from an earlier pass, or computed again.
"""

from __future__ import annotations

from functools import cached_property

from nostall.fusion.codegen.mapping import Operand
from nostall.fusion.codegen.schedule import Schedule

Value = int | Operand
"""What an operator computes, or what is read from memory, at its place."""


class Pass:
    """What is done in pass ``level``: reductions, outputs, and the operators these need; ``there``
    is what earlier passes left on chip."""

    def __init__(self, of: Schedule, level: int, there: frozenset[Value] = frozenset()) -> None:
        self.of = of
        self.there = there
        mapping = of.mapping
        self.reductions = tuple(
            i for i in of.body if mapping.reduced.get(i) and of.level[i] == level + 1
        )
        outputs = [i for i in of.body if i in mapping.outputs and of.level[i] == level]
        self.wide_outputs = tuple(i for i in outputs if of.is_wide(i))
        self.narrow_outputs = tuple(i for i in outputs if not of.is_wide(i))
        needed: set[int] = set()
        ask = [o.source for i in self.reductions for o in mapping.operands[i]] + outputs
        while ask:
            index = ask.pop()
            if index in mapping.places and index not in needed:
                needed.add(index)
                if not mapping.reduced.get(index) and index not in there:
                    ask.extend(o.source for o in mapping.operands[index])
        self.wide = tuple(sorted(i for i in needed if of.is_wide(i) and i not in there))
        self.narrow = tuple(
            sorted(i for i in needed if not of.is_wide(i) and not mapping.reduced.get(i))
        )
        self.finished = tuple(sorted(i for i in needed if mapping.reduced.get(i)))
        """Reductions of earlier passes whose results are used."""

    @property
    def has_columns(self) -> bool:
        return bool(self.reductions or self.wide_outputs)

    @cached_property
    def taken(self) -> tuple[Value, ...]:
        """What the pass reads: from memory, or from the chip where it is ``there``."""
        mapping = self.of.mapping
        operands = [o for i in (*self.wide, *self.reductions) for o in mapping.operands[i]]
        outside = dict.fromkeys(o for o in operands if mapping.is_outside(o))
        inside = {o.source for o in operands} | {*self.wide_outputs}
        return (*outside, *sorted(i for i in inside if i in self.there))


def passes(of: Schedule) -> tuple[Pass, ...]:
    """The passes of a schedule, the last one without reductions."""
    return tuple(Pass(of, level) for level in range(max(of.level.values(), default=0) + 1))
