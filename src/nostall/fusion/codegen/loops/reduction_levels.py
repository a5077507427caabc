"""What is done at each level of reductions, in a pass over the columns.

In pass k all reductions are finished that need k others before them; what the reductions of the
next level and the outputs need is there from an earlier pass, or computed again.  A maximum and the
sum of exp(x - maximum) may be of one level (:mod:`nostall.fusion.codegen.loops.online_softmax`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from nostall.fusion.codegen.loops.mapping import Operand
from nostall.fusion.codegen.loops.online_softmax import OnlinePair, online_pairs, pair_sums
from nostall.fusion.codegen.loops.schedule import Schedule

ValueKey = int | Operand
"""What an operator computes, or what is read from memory, at its place."""


class Pass:
    """What is done in pass ``level``: reductions, outputs, and the operators these need; ``on_chip``
    is what earlier passes left on chip, ``online_pairs`` are the pairs of reductions with one walk."""

    def __init__(
        self,
        schedule: Schedule,
        level: int,
        on_chip: frozenset[ValueKey] = frozenset(),
        online_pairs: tuple[OnlinePair, ...] = (),
    ) -> None:
        self.schedule = schedule
        self.on_chip = on_chip
        self.online_pairs = online_pairs
        mapping = schedule.mapping
        beside = pair_sums(online_pairs)
        levels = schedule.reduction_levels(beside)
        self.reductions = tuple(
            i for i in schedule.body if mapping.reduced_loops.get(i) and levels[i] == level + 1
        )
        outputs = [i for i in schedule.body if i in mapping.outputs and levels[i] == level]
        self.column_outputs = tuple(i for i in outputs if schedule.has_columns(i))
        self.row_outputs = tuple(i for i in outputs if not schedule.has_columns(i))
        needed: set[int] = set()
        # A sum of a pair takes the x of its maximum.
        taking = [i for i in self.reductions if i not in beside]
        ask = [o.source for i in taking for o in mapping.operands[i]] + outputs
        while ask:
            index = ask.pop()
            if index in mapping.accesses and index not in needed:
                needed.add(index)
                if not mapping.reduced_loops.get(index) and index not in on_chip:
                    ask.extend(o.source for o in mapping.operands[index])
        self.column_operators = tuple(
            sorted(i for i in needed if schedule.has_columns(i) and i not in on_chip)
        )
        self.row_operators = tuple(
            sorted(
                i
                for i in needed
                if not schedule.has_columns(i) and not mapping.reduced_loops.get(i)
            )
        )
        self.finished_reductions = tuple(sorted(i for i in needed if mapping.reduced_loops.get(i)))
        """Reductions of earlier passes whose results are used."""

    @property
    def has_columns(self) -> bool:
        return bool(self.reductions or self.column_outputs)

    @property
    def reduced_pairs(self) -> tuple[OnlinePair, ...]:
        """The pairs that are reduced in this pass."""
        return tuple(pair for pair in self.online_pairs if pair.first_maximum in self.reductions)

    def accumulators(self, reductions: Iterable[int]) -> tuple[int, ...]:
        """The reductions whose running values give these ones."""
        shared = {index: pair for pair in self.online_pairs for index in pair.members}
        found: set[int] = set()
        for index in reductions:
            pair = shared.get(index)
            found |= {pair.first_maximum, pair.first_sum} if pair else {index}
        return tuple(sorted(found))

    @cached_property
    def operands(self) -> tuple[ValueKey, ...]:
        """What the pass reads: from memory, or from the chip where it is ``on_chip``."""
        mapping = self.schedule.mapping
        operands = [
            o for i in (*self.column_operators, *self.reductions) for o in mapping.operands[i]
        ]
        outside = dict.fromkeys(o for o in operands if mapping.is_in_memory(o))
        inside = {o.source for o in operands} | {*self.column_outputs}
        return (*outside, *sorted(i for i in inside if i in self.on_chip))


def passes(schedule: Schedule) -> tuple[Pass, ...]:
    """The passes of a schedule that keeps nothing on chip, the last one without reductions."""
    online = online_pairs(schedule)
    levels = max(schedule.reduction_levels(pair_sums(online)).values(), default=0)
    return tuple(Pass(schedule, level, online_pairs=online) for level in range(levels + 1))
