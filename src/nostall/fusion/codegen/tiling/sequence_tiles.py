"""Small dots with vectors by turns: which places of a sequence are walked over, and what becomes of
each operator, in the loop and behind it.

A query over a sequence needs all scores before it knows a share, so ``matrix`` keeps the whole
sequence on chip.  Here a program takes a few places a turn.  What removes the places is kept for
each lane and put together at the end; a softmax keeps a running maximum, and all that is a sum of
exp(x - maximum) times something is scaled anew where the maximum grows (online softmax,
arXiv:1805.02867, with the weighed sum as in FlashAttention, arXiv:2205.14135).

Three operators of a softmax do nothing in the loop: the division by the sum comes at the very end,
and a cast of a power or a share (0 to 1) to 16 bits is left out.  That is the only cast of any
kernel which does not round; results are nearer to the exact ones for it.

If the maximum is NaN or infinite, all powers but those of +inf are NaN or 0, the sum is NaN, and so
is every sum over places of something times a power, as it is one by one.  Values beyond 1e36 may
overflow in a lane whose scores are low; elsewhere their powers would have made them small first.
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
"""Places of a turn at least: what a kernel by hand was fastest with, of a query 64 wide."""
_16_BIT_FLOATS = ("float16", "bfloat16")


@dataclass(frozen=True)
class SequenceTiling:
    """A pattern by turns along one ``group``, its operators in three parts.

    ``accumulated``: those ``in_loop`` the turns that end behind them.  ``softmax_sums``: of each maximum that
    runs along with powers the sum of these.  ``scaled_by``: of what is in units of a running maximum's
    power that maximum, ``needs_division``: those of it that are still to be divided by the sum, ``pass_through``:
    operators that leave their first operand as it is.
    """

    group: int
    before_loop: tuple[int, ...]
    in_loop: tuple[int, ...]
    after_loop: tuple[int, ...]
    accumulated: tuple[int, ...]
    softmax_sums: dict[int, int]
    scaled_by: dict[int, int]
    needs_division: frozenset[int]
    pass_through: frozenset[int]


@lru_cache(maxsize=32)
def find_sequence_tiling(schedule: Schedule) -> SequenceTiling | str:
    """The turns of a pattern with small dots, along the group that most reductions remove of those
    that allow for it; else the reason why there are none."""
    mapping = schedule.mapping
    for index in mapping.operators:
        if mapping.graph[index].kind == "dot" and all(dot_loops(mapping, index)):
            return f"{mapping.graph[index]} is a product of matrices; turns are for vectors"
    gone = [find_groups(loops, schedule.loop_groups) for loops in mapping.reduced_loops.values()]
    times = Counter(at for groups in gone for at in groups)
    reasons = []
    for at in sorted(times, key=lambda at: (-times[at], -schedule.count(schedule.loop_groups[at]))):
        if schedule.count(schedule.loop_groups[at]) > MIN_TILE_POSITIONS:
            try:
                return _SequenceAnalysis(schedule, at).run()
            except BadFusion as error:
                reasons.append(str(error))
    return reasons[0] if reasons else f"no axis of more than {MIN_TILE_POSITIONS} is added up"


@dataclass
class _SequenceAnalysis:
    """What is known of the operators that were read so far, in their order."""

    schedule: Schedule
    group: int
    before_loop: list[int] = field(default_factory=list)
    in_loop: list[int] = field(default_factory=list)
    after_loop: list[int] = field(default_factory=list)
    accumulated: list[int] = field(default_factory=list)
    softmax_sums: dict[int, int] = field(default_factory=dict)
    centered: dict[int, int] = field(default_factory=dict)
    exponentials: set[int] = field(default_factory=set)
    scaled_by: dict[int, int] = field(default_factory=dict)
    needs_division: set[int] = field(default_factory=set)
    pass_through: set[int] = field(default_factory=set)

    def run(self) -> SequenceTiling:
        for index in self.schedule.mapping.operators:
            self._add(index)
        alone = set(self.centered.values()) - self.softmax_sums.keys()
        if alone:
            raise BadFusion(
                f"{self._node(min(alone))} is taken away from what is not a softmax: its powers "
                "have no sum"
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
        mapping, along = self.schedule.mapping, set(self.schedule.loop_groups[self.group])
        operands = mapping.operands[index]
        waits = any(o.source in self.accumulated or o.source in self.after_loop for o in operands)
        special = [o for o in operands if o.source in self.scaled_by or o.source in self.centered]
        if mapping.reduced_loops.get(index, frozenset()) & along:
            self._add_reduction(index, special, waits)
            self.accumulated.append(index)
            self.in_loop.append(index)
        elif mapping.loops[index] & along:
            if waits or special:
                self._add_softmax_operator(index, waits)
            self.in_loop.append(index)
        else:
            (self.after_loop if waits else self.before_loop).append(index)

    def _add_reduction(self, index: int, special: list[Operand], waits: bool) -> None:
        node = self._node(index)
        if waits:
            raise self._second_loop_error(node)
        if not special:
            return
        (first, *others) = special
        if others or first.source not in self.scaled_by or node.op not in ("sum", "dot"):
            raise BadFusion(f"{node} is no sum of something times a softmax; it needs all places")
        maximum = self.scaled_by[index] = self.scaled_by[first.source]
        if (
            not self.schedule.mapping.reduced_loops[index]
            <= self.schedule.mapping.reduced_loops[maximum]
        ):
            raise BadFusion(f"{node} adds up softmaxes of several rows; each is divided before")
        if first.source in self.needs_division:
            self.needs_division.add(index)
        elif node.op == "sum" and first.source in self.exponentials:
            same = self.schedule.mapping.reduced_loops
            if same[index] == same[maximum]:
                self.softmax_sums.setdefault(maximum, index)

    def _add_softmax_operator(self, index: int, waits: bool) -> None:
        """An operator that has places, and needs a result of all turns or what is scaled by one."""
        node, operands = self._node(index), self.schedule.mapping.operands[index]
        if index in self.schedule.mapping.outputs:
            raise BadFusion(f"{node} is an output that needs all places first: a second walk")
        if (maximum := self._subtracted_maximum(index)) is not None:
            self.centered[index] = maximum
            return
        first = operands[0].source
        if node.op == "exp" and first in self.centered:
            self.scaled_by[index] = self.centered[first]
            self.exponentials.add(index)
            return
        if node.op == "mul" and not waits:
            found = [o.source for o in operands if o.source in self.scaled_by]
            if len(found) == 1 and not any(o.source in self.centered for o in operands):
                self._inherit_scale(index, found[0])
                return
        if self._is_normalization(index) or (
            first in self.scaled_by and self._is_pass_through(node, first)
        ):
            if node.op == "div":
                self.needs_division.add(index)
            if first in self.exponentials:
                # Between 0 and 1, as the power was.
                self.exponentials.add(index)
            self.pass_through.add(index)
            self._inherit_scale(index, first)
            return
        raise self._second_loop_error(node)

    def _subtracted_maximum(self, index: int) -> int | None:
        """The maximum of x in an x - maximum; None for other operators."""
        node, operands = self._node(index), self.schedule.mapping.operands[index]
        if node.op != "sub" or compute_dtype(node.dtype) != "float32":
            return None
        x, maximum = operands[0], operands[1].source
        if maximum not in self.accumulated or self._node(maximum).op != "amax":
            return None
        return maximum if self.schedule.mapping.operands[maximum] == (x,) else None

    def _is_normalization(self, index: int) -> bool:
        """Whether a power is divided by the sum of all."""
        node, operands = self._node(index), self.schedule.mapping.operands[index]
        if node.op != "div" or operands[0].source not in self.exponentials:
            return False
        first = operands[0].source
        total = self.softmax_sums.get(self.scaled_by[first])
        return first not in self.needs_division and operands[1].source == total

    def _is_pass_through(self, node: Node, first: int) -> bool:
        """Whether a value is as good as its operand: a copy, or a cast that would only round what
        is between 0 and 1."""
        if node.op == "copy" or (node.op == "cast" and node.dtype == "float32"):
            return True
        return node.op == "cast" and node.dtype in _16_BIT_FLOATS and first in self.exponentials

    def _inherit_scale(self, index: int, first: int) -> None:
        self.scaled_by[index] = self.scaled_by[first]
        if first in self.needs_division:
            self.needs_division.add(index)

    def _second_loop_error(self, node: Node) -> BadFusion:
        return BadFusion(f"{node} needs all places before it has any: a second walk")

    def _node(self, index: int) -> Node:
        return self.schedule.mapping.graph[index]


def has_positions(schedule: Schedule, group: int, operand: Operand) -> bool:
    """Whether an operand, made here or in memory, changes along a group."""
    loops = schedule.mapping.loops.get(operand.source)
    return bool(
        (loops_used(operand.accesses) if loops is None else loops)
        & set(schedule.loop_groups[group])
    )


def tensor_loops_along(schedule: Schedule, group: int) -> Iterable[frozenset[int]]:
    """The loops of all tensors that change along a group."""
    mapping, along = schedule.mapping, set(schedule.loop_groups[group])
    for index in mapping.operators:
        found = [mapping.loops[index] | mapping.reduced_loops.get(index, frozenset())]
        found += [loops_used(operand.accesses) for operand in mapping.operands[index]]
        yield from (loops for loops in found if loops & along)
