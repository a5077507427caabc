"""Sequence tiling of small dots with vectors: a loop over tiles of a sequence (scheme ``turned``).

Attention of one query over a sequence needs all scores before it can normalize one, so scheme
``matrix`` keeps the whole sequence on chip.  With sequence tiling, a program loops over tiles of a
few positions each.  Reductions over positions keep an accumulator for each lane, and the lanes are
combined after the loop.  A softmax keeps a running maximum.  Every sum of exp(x - maximum), with or
without a factor, is rescaled when the maximum grows (online softmax, arXiv:1805.02867; the weighted
sum as in FlashAttention, arXiv:2205.14135).

Two kinds of softmax operators do nothing in the loop.  The division by the sum moves to the end.
A cast of an exponential or a normalized exponential (0 to 1) to 16 bits is left out.  It is the
only cast in any kernel that does not round, and results are closer to the exact ones for it.

If the maximum is NaN or infinite, all exponentials except those of +inf are NaN or 0.  The sum is
NaN then, and so is every weighted sum, as in operator-by-operator execution.  Values beyond 1e36
can overflow in a lane with low scores, because the lane's own maximum scales its exponentials;
operator by operator, the exponentials relative to the row's maximum would be small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from nostall.fusion.codegen.expressions.templates import compute_dtype
from nostall.fusion.codegen.loops.dot_axes import dot_loops, find_groups
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Node

MIN_TILE_POSITIONS = 8
"""Minimum positions of a tile: the fastest size of a hand-written kernel (queries of width 64)."""
_16_BIT_FLOATS = ("float16", "bfloat16")


@dataclass(frozen=True)
class SequenceTiling:
    """The operators of a pattern before, in and after the loop over tiles of a sequence."""

    group: int
    """The loop group that the positions of the sequence are (an index of
    :attr:`~nostall.fusion.codegen.loops.schedule.Schedule.loop_groups`)."""
    before_loop: tuple[int, ...]
    in_loop: tuple[int, ...]
    after_loop: tuple[int, ...]
    accumulated: tuple[int, ...]
    """Operators of ``in_loop`` whose results are complete after the loop only: reductions over
    positions."""
    softmax_sums: dict[int, int]
    """Running maximum -> the sum of its exponentials."""
    scaled_by: dict[int, int]
    """Value with the factor exp(-maximum) -> its running maximum."""
    needs_division: frozenset[int]
    """Values of ``scaled_by`` that have to be divided by the sum after the loop."""
    pass_through: frozenset[int]
    """Operators whose value in the loop is that of their first operand."""


@lru_cache(maxsize=32)
def find_sequence_tiling(schedule: Schedule) -> SequenceTiling | str:
    """The sequence tiling of a pattern with small dots, or the reason why there is none.

    The sequence is the loop group that most reductions remove, of those that can be tiled.
    """
    mapping = schedule.mapping
    for index in mapping.operators:
        if mapping.graph[index].kind == "dot" and all(dot_loops(mapping, index)):
            return (
                f"{mapping.graph[index]} is a product of matrices; sequence tiles are for products "
                "with a vector"
            )
    reduced = [find_groups(loops, schedule.loop_groups) for loops in mapping.reduced_loops.values()]
    counts = Counter(group for groups in reduced for group in groups)
    sizes = {group: schedule.count(schedule.loop_groups[group]) for group in counts}
    reasons = []
    for group in sorted(counts, key=lambda group: (-counts[group], -sizes[group])):
        if sizes[group] > MIN_TILE_POSITIONS:
            try:
                return _SequenceAnalysis(schedule, group).run()
            except BadFusion as error:
                reasons.append(str(error))
    return reasons[0] if reasons else f"no axis of more than {MIN_TILE_POSITIONS} is added up"


@dataclass
class _SequenceAnalysis:
    """One analysis of all operators in graph order; fields as in :class:`SequenceTiling`."""

    schedule: Schedule
    group: int
    before_loop: list[int] = field(default_factory=list)
    in_loop: list[int] = field(default_factory=list)
    after_loop: list[int] = field(default_factory=list)
    accumulated: list[int] = field(default_factory=list)
    softmax_sums: dict[int, int] = field(default_factory=dict)
    centered: dict[int, int] = field(default_factory=dict)  # x - maximum -> maximum
    exponentials: set[int] = field(default_factory=set)  # exp(x - maximum), values in [0, 1]
    scaled_by: dict[int, int] = field(default_factory=dict)
    needs_division: set[int] = field(default_factory=set)
    pass_through: set[int] = field(default_factory=set)

    def run(self) -> SequenceTiling:
        """The tiling.  Raises :class:`BadFusion` if an operator needs a second loop."""
        for index in self.schedule.mapping.operators:
            self._add(index)
        without_sum = set(self.centered.values()) - self.softmax_sums.keys()
        if without_sum:
            raise BadFusion(
                f"{self._node(min(without_sum))} is subtracted outside of a softmax: the "
                "exponentials have no sum"
            )
        return SequenceTiling(
            self.group,
            tuple(self.before_loop),
            tuple(self.in_loop),
            tuple(self.after_loop),
            tuple(self.accumulated),
            self.softmax_sums,
            self.scaled_by,
            frozenset(self.needs_division),
            frozenset(self.pass_through),
        )

    def _add(self, index: int) -> None:
        """Assign an operator to the code before, in or after the loop."""
        mapping, sequence = self.schedule.mapping, set(self.schedule.loop_groups[self.group])
        operands = mapping.operands[index]
        needs_result = any(
            o.source in self.accumulated or o.source in self.after_loop for o in operands
        )
        softmax_operands = [
            o for o in operands if o.source in self.scaled_by or o.source in self.centered
        ]
        if mapping.reduced_loops.get(index, frozenset()) & sequence:
            self._add_reduction(index, softmax_operands, needs_result)
            self.accumulated.append(index)
            self.in_loop.append(index)
        elif mapping.loops[index] & sequence:
            if needs_result or softmax_operands:
                self._add_softmax_operator(index, needs_result)
            self.in_loop.append(index)
        else:
            (self.after_loop if needs_result else self.before_loop).append(index)

    def _add_reduction(
        self, index: int, softmax_operands: list[Operand], needs_result: bool
    ) -> None:
        """A reduction over positions; with softmax operands it has to be a (weighted) sum."""
        node = self._node(index)
        if needs_result:
            raise self._second_loop_error(node)
        if not softmax_operands:
            return
        (first, *more) = softmax_operands
        if more or first.source not in self.scaled_by or node.op not in ("sum", "dot"):
            raise BadFusion(
                f"{node} is no sum of a value times a softmax; it needs all positions first"
            )
        maximum = self.scaled_by[index] = self.scaled_by[first.source]
        if (
            not self.schedule.mapping.reduced_loops[index]
            <= self.schedule.mapping.reduced_loops[maximum]
        ):
            raise BadFusion(
                f"{node} adds softmaxes of several rows; each has to be divided by its sum first"
            )
        if first.source in self.needs_division:
            self.needs_division.add(index)
        elif node.op == "sum" and first.source in self.exponentials:
            reduced_loops = self.schedule.mapping.reduced_loops
            if reduced_loops[index] == reduced_loops[maximum]:
                self.softmax_sums.setdefault(maximum, index)

    def _add_softmax_operator(self, index: int, needs_result: bool) -> None:
        """An operator along positions that needs a result of the loop or a softmax operand.

        Raises :class:`BadFusion` if it is none that the loop can compute with running values.
        """
        node, operands = self._node(index), self.schedule.mapping.operands[index]
        if index in self.schedule.mapping.outputs:
            raise BadFusion(
                f"{node} is an output that needs all positions first, which takes a second loop"
            )
        if (maximum := self._subtracted_maximum(index)) is not None:
            self.centered[index] = maximum
            return
        first = operands[0].source
        if node.op == "exp" and first in self.centered:
            self.scaled_by[index] = self.centered[first]
            self.exponentials.add(index)
            return
        if node.op == "mul" and not needs_result:
            scaled = [o.source for o in operands if o.source in self.scaled_by]
            if len(scaled) == 1 and not any(o.source in self.centered for o in operands):
                self._inherit_scale(index, scaled[0])
                return
        if self._is_normalization(index) or (
            first in self.scaled_by and self._is_pass_through(node, first)
        ):
            if node.op == "div":
                self.needs_division.add(index)
            if first in self.exponentials:
                # Between 0 and 1, like its operand.
                self.exponentials.add(index)
            self.pass_through.add(index)
            self._inherit_scale(index, first)
            return
        raise self._second_loop_error(node)

    def _subtracted_maximum(self, index: int) -> int | None:
        """The accumulated maximum of x in x - maximum; None for other operators."""
        node, operands = self._node(index), self.schedule.mapping.operands[index]
        if node.op != "sub" or compute_dtype(node.dtype) != "float32":
            return None
        x, maximum = operands[0], operands[1].source
        if maximum not in self.accumulated or self._node(maximum).op != "amax":
            return None
        return maximum if self.schedule.mapping.operands[maximum] == (x,) else None

    def _is_normalization(self, index: int) -> bool:
        """Whether an operator divides an exponential by the sum of all exponentials."""
        node, operands = self._node(index), self.schedule.mapping.operands[index]
        if node.op != "div" or operands[0].source not in self.exponentials:
            return False
        first = operands[0].source
        total = self.softmax_sums.get(self.scaled_by[first])
        return first not in self.needs_division and operands[1].source == total

    def _is_pass_through(self, node: Node, first: int) -> bool:
        """Whether an operator can be left out: a copy, a cast to fp32, or a cast of an exponential
        to 16 bits, which would only round a value between 0 and 1."""
        if node.op == "copy" or (node.op == "cast" and node.dtype == "float32"):
            return True
        return node.op == "cast" and node.dtype in _16_BIT_FLOATS and first in self.exponentials

    def _inherit_scale(self, index: int, first: int) -> None:
        self.scaled_by[index] = self.scaled_by[first]
        if first in self.needs_division:
            self.needs_division.add(index)

    def _second_loop_error(self, node: Node) -> BadFusion:
        return BadFusion(
            f"{node} needs all positions before it can compute one, which takes a second loop"
        )

    def _node(self, index: int) -> Node:
        return self.schedule.mapping.graph[index]


def has_positions(schedule: Schedule, group: int, operand: Operand) -> bool:
    """Whether an operand, computed here or in memory, varies along a loop group."""
    loops = schedule.mapping.loops.get(operand.source)
    return bool(
        (loops_used(operand.accesses) if loops is None else loops)
        & set(schedule.loop_groups[group])
    )


def tensor_loops_along(schedule: Schedule, group: int) -> Iterable[frozenset[int]]:
    """The loops of each tensor that varies along a loop group."""
    mapping, group_loops = schedule.mapping, set(schedule.loop_groups[group])
    for index in mapping.operators:
        tensors = [mapping.loops[index] | mapping.reduced_loops.get(index, frozenset())]
        tensors += [loops_used(operand.accesses) for operand in mapping.operands[index]]
        yield from (loops for loops in tensors if loops & group_loops)
