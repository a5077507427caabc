"""Passes over the columns: the operators to compute at each reduction level.

Pass k finishes all reductions that need a chain of k earlier ones.  A value that several passes
need is kept on chip by an earlier pass, or recomputed.  A maximum and the sum of exp(x - maximum)
can be in one pass (:mod:`nostall.fusion.codegen.loops.online_reductions`), and so can a sum and the
sum of (x - mean)^2 (:mod:`nostall.fusion.codegen.loops.online_reductions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from nostall.fusion.codegen.loops.mapping import Operand
from nostall.fusion.codegen.loops.online_reductions import (
    OnlinePair,
    OnlineVariance,
    online_pairs,
    online_variances,
    pair_sums,
)
from nostall.fusion.codegen.loops.schedule import Schedule

ValueKey = int | Operand
"""A value of a kernel: an operator (its node), or an operand in memory at one index."""


class Pass:
    """The work of one pass over the columns: reductions, outputs, and the operators they need.

    Attributes, all in graph order:
        reductions: reductions that this pass finishes
        column_outputs, row_outputs: outputs with a value for each column, or one for each row
        column_operators, row_operators: operators to compute, for each column or once for each row
        finished_reductions: reductions of earlier passes whose results this pass uses
        reduced_pairs, reduced_variances: reductions with a common loop that this pass reduces
        accumulators: reductions that have an accumulator from which ``reductions`` follow
        finished_accumulators: the same for ``finished_reductions``
    """

    def __init__(
        self,
        schedule: Schedule,
        level: int,
        on_chip: frozenset[ValueKey] = frozenset(),
        online_pairs: tuple[OnlinePair, ...] = (),
        online_variances: tuple[OnlineVariance, ...] = (),
    ) -> None:
        """``on_chip``: values that earlier passes keep on chip.  ``online_pairs`` and
        ``online_variances``: reductions that share a loop."""
        self.schedule = schedule
        self.on_chip = on_chip
        self.online_pairs = online_pairs
        self.online_variances = online_variances
        mapping = schedule.mapping
        merged_sums = pair_sums(online_pairs) | {v.squares for v in online_variances}
        levels = schedule.reduction_levels(merged_sums)
        self.reductions = tuple(
            i for i in schedule.body if schedule.removes_columns(i) and levels[i] == level + 1
        )
        outputs = [i for i in schedule.body if i in mapping.outputs and levels[i] == level]
        self.column_outputs = tuple(i for i in outputs if schedule.has_columns(i))
        self.row_outputs = tuple(i for i in outputs if not schedule.has_columns(i))
        needed: set[int] = set()
        # A merged sum reads the x of the reduction before it, so it needs no operands of its own.
        reading = [i for i in self.reductions if i not in merged_sums]
        worklist = [o.source for i in reading for o in mapping.operands[i]] + outputs
        while worklist:
            index = worklist.pop()
            if index in mapping.accesses and index not in needed:
                needed.add(index)
                if not schedule.removes_columns(index) and index not in on_chip:
                    worklist.extend(o.source for o in mapping.operands[index])
        self.column_operators = tuple(
            sorted(i for i in needed if schedule.has_columns(i) and i not in on_chip)
        )
        self.row_operators = tuple(
            sorted(
                i for i in needed if not schedule.has_columns(i) and not schedule.removes_columns(i)
            )
        )
        self.finished_reductions = tuple(sorted(filter(schedule.removes_columns, needed)))
        self.reduced_pairs = tuple(p for p in online_pairs if p.first_maximum in self.reductions)
        self.reduced_variances = tuple(v for v in online_variances if v.squares in self.reductions)
        self.accumulators = self._accumulators(self.reductions)
        self.finished_accumulators = self._accumulators(self.finished_reductions)

    @property
    def has_columns(self) -> bool:
        """Whether the pass loops over the columns at all."""
        return bool(self.reductions or self.column_outputs)

    def _accumulators(self, reductions: Iterable[int]) -> tuple[int, ...]:
        pairs = {index: pair for pair in self.online_pairs for index in pair.members}
        totals = {v.squares: v.total for v in self.online_variances}
        accumulated: set[int] = set()
        for index in reductions:
            pair = pairs.get(index)
            accumulated |= {pair.first_maximum, pair.first_sum} if pair else {index}
            accumulated |= {totals[index]} if index in totals else set()
        return tuple(sorted(accumulated))

    @cached_property
    def operands(self) -> tuple[ValueKey, ...]:
        """The values that the pass reads: operands in memory, then values on chip."""
        mapping = self.schedule.mapping
        operands = [
            o for i in (*self.column_operators, *self.reductions) for o in mapping.operands[i]
        ]
        in_memory = dict.fromkeys(o for o in operands if mapping.is_in_memory(o))
        computed = {o.source for o in operands} | {*self.column_outputs}
        return (*in_memory, *sorted(i for i in computed if i in self.on_chip))


def passes(schedule: Schedule) -> tuple[Pass, ...]:
    """The passes of a schedule that keeps nothing on chip; the last one has no reductions."""
    pairs, variances = online_pairs(schedule), online_variances(schedule)
    merged = pair_sums(pairs) | {v.squares for v in variances}
    levels = max(schedule.reduction_levels(merged).values(), default=0)
    return tuple(
        Pass(schedule, level, online_pairs=pairs, online_variances=variances)
        for level in range(levels + 1)
    )
