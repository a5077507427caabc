"""What is done at each level of reductions, in a pass over the columns.

In pass k all reductions are finished that need k others before them; what the reductions of the
next level and the outputs need is there from an earlier pass, or computed again.  A maximum and the
sum of exp(x - maximum) may be of one level (:mod:`nostall.fusion.codegen.loops.online_softmax`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from nostall.fusion.codegen.loops.mapping import Operand
from nostall.fusion.codegen.loops.online_softmax import Pair, pairs, sums_of
from nostall.fusion.codegen.loops.schedule import Schedule

Value = int | Operand
"""What an operator computes, or what is read from memory, at its place."""


class Pass:
    """What is done in pass ``level``: reductions, outputs, and the operators these need; ``there``
    is what earlier passes left on chip, ``online`` are the pairs of reductions with one walk."""

    def __init__(
        self,
        of: Schedule,
        level: int,
        there: frozenset[Value] = frozenset(),
        online: tuple[Pair, ...] = (),
    ) -> None:
        self.of = of
        self.there = there
        self.online = online
        mapping = of.mapping
        beside = sums_of(online)
        levels = of.levels(beside)
        self.reductions = tuple(
            i for i in of.body if mapping.reduced.get(i) and levels[i] == level + 1
        )
        outputs = [i for i in of.body if i in mapping.outputs and levels[i] == level]
        self.wide_outputs = tuple(i for i in outputs if of.is_wide(i))
        self.narrow_outputs = tuple(i for i in outputs if not of.is_wide(i))
        needed: set[int] = set()
        # A sum of a pair takes the x of its maximum.
        taking = [i for i in self.reductions if i not in beside]
        ask = [o.source for i in taking for o in mapping.operands[i]] + outputs
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

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The pairs that are reduced in this pass."""
        return tuple(pair for pair in self.online if pair.maximum in self.reductions)

    def running(self, reductions: Iterable[int]) -> tuple[int, ...]:
        """The reductions whose running values give these ones."""
        shared = {index: pair for pair in self.online for index in pair.members}
        found: set[int] = set()
        for index in reductions:
            pair = shared.get(index)
            found |= {pair.maximum, pair.total} if pair else {index}
        return tuple(sorted(found))

    @cached_property
    def taken(self) -> tuple[Value, ...]:
        """What the pass reads: from memory, or from the chip where it is ``there``."""
        mapping = self.of.mapping
        operands = [o for i in (*self.wide, *self.reductions) for o in mapping.operands[i]]
        outside = dict.fromkeys(o for o in operands if mapping.is_outside(o))
        inside = {o.source for o in operands} | {*self.wide_outputs}
        return (*outside, *sorted(i for i in inside if i in self.there))


def passes(of: Schedule) -> tuple[Pass, ...]:
    """The passes of a schedule that keeps nothing on chip, the last one without reductions."""
    online = pairs(of)
    levels = max(of.levels(sums_of(online)).values(), default=0)
    return tuple(Pass(of, level, online=online) for level in range(levels + 1))
