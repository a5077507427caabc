"""A maximum and the sum of exp(x - maximum) in one walk over the columns: online softmax.

Softmax, log-softmax and log-sum-exp reduce the same x twice: first its maximum, then a sum that
needs it.  Kernels that walk over a row would walk twice.  Instead every lane keeps a running
maximum and the sum relative to it, scaled anew where the maximum grows (Milakov and Gimelshein,
arXiv:1805.02867); lanes are put together behind the walk.  The maximum is the same to the bit, the
sum within the rounding of fp32.

A lane that has seen nothing above -inf holds the sum 0 and every other one at least 1, so 0 tells
rows of -inf, where exp(-inf - -inf) has to be NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from nostall.fusion.codegen.expressions.templates import compute_dtype
from nostall.fusion.codegen.loops.mapping import LoopMapping, Operand
from nostall.fusion.codegen.loops.schedule import Schedule


@dataclass(frozen=True)
class OnlinePair:
    """Reductions of one ``operand`` with one walk: equal ``maxima``, and ``sums`` of exp(x - maximum).

    ``guarded_sums``: those sums that subtract 0 where the maximum is infinite, as logsumexp does.  The
    first maximum and the first sum have the running values of all.
    """

    operand: Operand
    maxima: tuple[int, ...]
    sums: tuple[int, ...]
    guarded_sums: frozenset[int]

    @property
    def first_maximum(self) -> int:
        return self.maxima[0]

    @property
    def first_sum(self) -> int:
        return self.sums[0]

    @property
    def members(self) -> tuple[int, ...]:
        return *self.maxima, *self.sums


@lru_cache(maxsize=32)
def online_pairs(schedule: Schedule) -> tuple[OnlinePair, ...]:
    """The pairs that save a walk over the columns, by themselves or together."""
    kept = tuple(_pair_candidates(schedule)) if schedule.allow_online_softmax else ()
    fewest = _count_passes(schedule, kept)
    for pair in kept:
        others = tuple(other for other in kept if other is not pair)
        if _count_passes(schedule, others) <= fewest:
            kept = others
    return kept


def pair_sums(found: Iterable[OnlinePair]) -> frozenset[int]:
    """The reductions that end in the walk of the maximum that they need."""
    return frozenset(index for pair in found for index in pair.sums)


def _count_passes(schedule: Schedule, found: Iterable[OnlinePair]) -> int:
    """How many passes over the columns there are: those that reduce, and those that write."""
    level, mapping = schedule.reduction_levels(pair_sums(found)), schedule.mapping
    reducing = {level[i] - 1 for i in schedule.body if mapping.reduced_loops.get(i)}
    return len(
        reducing
        | {level[i] for i in schedule.body if i in mapping.outputs and schedule.has_columns(i)}
    )


def _pair_candidates(schedule: Schedule) -> Iterator[OnlinePair]:
    maxima: dict[Operand, list[int]] = {}
    for index in schedule.body:
        if _is_float_operator(
            schedule.mapping, index, "amax"
        ) and schedule.mapping.reduced_loops.get(index):
            maxima.setdefault(schedule.mapping.operands[index][0], []).append(index)
    for x, alike in maxima.items():
        found = {
            i: guarded
            for i in schedule.body
            if (guarded := _is_guarded_sum(schedule, i, x, alike)) is not None
        }
        if found:
            yield OnlinePair(x, tuple(alike), tuple(found), frozenset(i for i in found if found[i]))


def _is_guarded_sum(schedule: Schedule, index: int, x: Operand, maxima: list[int]) -> bool | None:
    """Whether a sum of exp(x - maximum) is guarded; None where an operator is no such sum."""
    mapping = schedule.mapping
    if not (_is_float_operator(mapping, index, "sum") and mapping.reduced_loops.get(index)):
        return None
    (power,) = mapping.operands[index]
    if not _is_float_operator(mapping, power.source, "exp"):
        return None
    (difference,) = mapping.operands[power.source]
    if not _is_float_operator(mapping, difference.source, "sub"):
        return None
    left, right = mapping.operands[difference.source]
    if left != x:
        return None
    if right.source in maxima:
        return False
    return True if _guarded_maximum(mapping, right.source) in maxima else None


def _guarded_maximum(mapping: LoopMapping, index: int) -> int | None:
    """The m of where(abs(m) == inf, 0, m); None for other values."""
    if not _is_float_operator(mapping, index, "where"):
        return None
    told, zero, value = mapping.operands[index]
    if not _is_constant(mapping, zero, 0.0) or not _is_infinite(mapping, told.source, value):
        return None
    return value.source


def _is_infinite(mapping: LoopMapping, index: int, value: Operand) -> bool:
    """Whether an operator tells if a value is infinite."""
    if index not in mapping.accesses:
        return False
    operands = mapping.operands[index]
    if mapping.graph[index].op == "isinf":
        return operands == (value,)
    if mapping.graph[index].op != "eq":
        return False
    left, right = operands
    size = mapping.operands.get(left.source, ())
    is_size = _is_float_operator(mapping, left.source, "abs") and size == (value,)
    return is_size and _is_constant(mapping, right, float("inf"))


def _is_float_operator(mapping: LoopMapping, index: int, op: str) -> bool:
    """Whether a node is such an operator of the pattern, on floats."""
    node = mapping.graph[index]
    return index in mapping.accesses and node.op == op and compute_dtype(node.dtype) == "float32"


def _is_constant(mapping: LoopMapping, operand: Operand, number: float) -> bool:
    node = mapping.graph[operand.source]
    return node.op == "constant" and node["value"] == number
