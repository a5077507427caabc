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

from nostall.fusion.codegen.expressions.templates import computed
from nostall.fusion.codegen.loops.dot_axes import groups_of, sides
from nostall.fusion.codegen.loops.mapping import Operand, used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Node

LEAST = 8
"""Places of a turn at least: what a kernel by hand was fastest with, of a query 64 wide."""
_NARROW = ("float16", "bfloat16")


@dataclass(frozen=True)
class Walk:
    """A pattern by turns along one ``group``, its operators in three parts.

    ``results``: those ``during`` the turns that end behind them.  ``totals``: of each maximum that
    runs along with powers the sum of these.  ``scaled``: of what is in units of a running maximum's
    power that maximum, ``shared``: those of it that are still to be divided by the sum, ``bare``:
    operators that leave their first operand as it is.
    """

    group: int
    before: tuple[int, ...]
    during: tuple[int, ...]
    after: tuple[int, ...]
    results: tuple[int, ...]
    totals: dict[int, int]
    scaled: dict[int, int]
    shared: frozenset[int]
    bare: frozenset[int]


@lru_cache(maxsize=32)
def walk(of: Schedule) -> Walk | str:
    """The turns of a pattern with small dots, along the group that most reductions remove of those
    that allow for it; else the reason why there are none."""
    mapping = of.mapping
    for index in mapping.operators:
        if mapping.graph[index].kind == "dot" and all(sides(mapping, index)):
            return f"{mapping.graph[index]} is a product of matrices; turns are for vectors"
    gone = [groups_of(loops, of.groups) for loops in mapping.reduced.values()]
    times = Counter(at for groups in gone for at in groups)
    reasons = []
    for at in sorted(times, key=lambda at: (-times[at], -of.count(of.groups[at]))):
        if of.count(of.groups[at]) > LEAST:
            try:
                return _Reading(of, at).walk()
            except BadFusion as error:
                reasons.append(str(error))
    return reasons[0] if reasons else f"no axis of more than {LEAST} is added up"


@dataclass
class _Reading:
    """What is known of the operators that were read so far, in their order."""

    of: Schedule
    group: int
    before: list[int] = field(default_factory=list)
    during: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    totals: dict[int, int] = field(default_factory=dict)
    centred: dict[int, int] = field(default_factory=dict)
    powers: set[int] = field(default_factory=set)
    scaled: dict[int, int] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    bare: set[int] = field(default_factory=set)

    def walk(self) -> Walk:
        for index in self.of.mapping.operators:
            self._read(index)
        alone = set(self.centred.values()) - self.totals.keys()
        if alone:
            raise BadFusion(
                f"{self._node(min(alone))} is taken away from what is not a softmax: its powers "
                "have no sum"
            )
        return Walk(
            self.group,
            tuple(self.before),
            tuple(self.during),
            tuple(self.after),
            tuple(self.results),
            self.totals,
            self.scaled,
            frozenset(self.shared),
            frozenset(self.bare),
        )

    def _read(self, index: int) -> None:
        mapping, along = self.of.mapping, set(self.of.groups[self.group])
        operands = mapping.operands[index]
        waits = any(o.source in self.results or o.source in self.after for o in operands)
        special = [o for o in operands if o.source in self.scaled or o.source in self.centred]
        if mapping.reduced.get(index, frozenset()) & along:
            self._reduced(index, special, waits)
            self.results.append(index)
            self.during.append(index)
        elif mapping.loops[index] & along:
            if waits or special:
                self._of_softmax(index, waits)
            self.during.append(index)
        else:
            (self.after if waits else self.before).append(index)

    def _reduced(self, index: int, special: list[Operand], waits: bool) -> None:
        node = self._node(index)
        if waits:
            raise self._too_late(node)
        if not special:
            return
        (first, *others) = special
        if others or first.source not in self.scaled or node.op not in ("sum", "dot"):
            raise BadFusion(f"{node} is no sum of something times a softmax; it needs all places")
        maximum = self.scaled[index] = self.scaled[first.source]
        if not self.of.mapping.reduced[index] <= self.of.mapping.reduced[maximum]:
            raise BadFusion(f"{node} adds up softmaxes of several rows; each is divided before")
        if first.source in self.shared:
            self.shared.add(index)
        elif node.op == "sum" and first.source in self.powers:
            same = self.of.mapping.reduced
            if same[index] == same[maximum]:
                self.totals.setdefault(maximum, index)

    def _of_softmax(self, index: int, waits: bool) -> None:
        """An operator that has places, and needs a result of all turns or what is scaled by one."""
        node, operands = self._node(index), self.of.mapping.operands[index]
        if index in self.of.mapping.outputs:
            raise BadFusion(f"{node} is an output that needs all places first: a second walk")
        if (maximum := self._taken_away(index)) is not None:
            self.centred[index] = maximum
            return
        first = operands[0].source
        if node.op == "exp" and first in self.centred:
            self.scaled[index] = self.centred[first]
            self.powers.add(index)
            return
        if node.op == "mul" and not waits:
            found = [o.source for o in operands if o.source in self.scaled]
            if len(found) == 1 and not any(o.source in self.centred for o in operands):
                self._inherit(index, found[0])
                return
        if self._is_share(index) or (first in self.scaled and self._leaves(node, first)):
            if node.op == "div":
                self.shared.add(index)
            if first in self.powers:
                # Between 0 and 1, as the power was.
                self.powers.add(index)
            self.bare.add(index)
            self._inherit(index, first)
            return
        raise self._too_late(node)

    def _taken_away(self, index: int) -> int | None:
        """The maximum of x in an x - maximum; None for other operators."""
        node, operands = self._node(index), self.of.mapping.operands[index]
        if node.op != "sub" or computed(node.dtype) != "float32":
            return None
        x, maximum = operands[0], operands[1].source
        if maximum not in self.results or self._node(maximum).op != "amax":
            return None
        return maximum if self.of.mapping.operands[maximum] == (x,) else None

    def _is_share(self, index: int) -> bool:
        """Whether a power is divided by the sum of all."""
        node, operands = self._node(index), self.of.mapping.operands[index]
        if node.op != "div" or operands[0].source not in self.powers:
            return False
        first = operands[0].source
        total = self.totals.get(self.scaled[first])
        return first not in self.shared and operands[1].source == total

    def _leaves(self, node: Node, first: int) -> bool:
        """Whether a value is as good as its operand: a copy, or a cast that would only round what
        is between 0 and 1."""
        if node.op == "copy" or (node.op == "cast" and node.dtype == "float32"):
            return True
        return node.op == "cast" and node.dtype in _NARROW and first in self.powers

    def _inherit(self, index: int, first: int) -> None:
        self.scaled[index] = self.scaled[first]
        if first in self.shared:
            self.shared.add(index)

    def _too_late(self, node: Node) -> BadFusion:
        return BadFusion(f"{node} needs all places before it has any: a second walk")

    def _node(self, index: int) -> Node:
        return self.of.mapping.graph[index]


def has_places(of: Schedule, group: int, operand: Operand) -> bool:
    """Whether an operand, made here or in memory, changes along a group."""
    loops = of.mapping.loops.get(operand.source)
    return bool((used(operand.places) if loops is None else loops) & set(of.groups[group]))


def touching(of: Schedule, group: int) -> Iterable[frozenset[int]]:
    """The loops of all tensors that change along a group."""
    mapping, along = of.mapping, set(of.groups[group])
    for index in mapping.operators:
        found = [mapping.loops[index] | mapping.reduced.get(index, frozenset())]
        found += [used(operand.places) for operand in mapping.operands[index]]
        yield from (loops for loops in found if loops & along)
