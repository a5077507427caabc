"""Reductions of one operand that share a loop over the columns: online softmax and variance.

Online softmax: a maximum and the sum of exp(x - maximum) in one loop over the columns.

Softmax, log-softmax and log-sum-exp reduce the same x twice: first to its maximum, then to a sum
that needs the maximum.  A kernel that loops over the columns of a row would need two loops.
Instead, every lane keeps a running maximum and the sum relative to it, and rescales the sum when
the maximum grows (Milakov and Gimelshein, arXiv:1805.02867).  The lanes are combined after the
loop.  The maximum is bit-identical to that of two loops; the sum differs by fp32 rounding.

The sum of a lane is 0 if all its elements are -inf, and at least 1 otherwise.  So a sum of 0 marks
rows of -inf, for which exp(-inf - -inf) has to be NaN.

Online variance: the sum of (x - mean)^2 in the loop over the columns that sums x.

A variance reduces the same x twice: first to its mean, then to a sum that needs the mean.  A
kernel that loops over the columns of a row would need two loops.  Instead, every lane keeps the
sum of its elements, the sum of their squared differences from the lane's own mean, and their
number, and updates all three with each element (Youngs and Cramer, Technometrics 13, 1971).  The
lanes are combined after the loop (Chan, Golub and LeVeque, 1983).  Unlike the difference of the
sums of x^2 and x, this is exact to rounding for rows whose mean is far from 0.  The sum of x is
bit-identical to that of two loops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from nostall.fusion.codegen.expressions.templates import compute_dtype
from nostall.fusion.codegen.loops.mapping import LoopMapping, Operand
from nostall.fusion.codegen.loops.schedule import Schedule


@dataclass(frozen=True)
class OnlinePair:
    """Reductions of one operand x that share one loop over the columns.

    Only the first maximum and the first sum have accumulators; all others have the same values.
    """

    operand: Operand  # x
    maxima: tuple[int, ...]  # reductions to the maximum of x
    sums: tuple[int, ...]  # reductions to the sum of exp(x - maximum)
    guarded_sums: frozenset[int]
    """Sums that subtract 0 instead of an infinite maximum, as logsumexp does."""

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
    """The pairs that save a pass over the columns, alone or together.

    A pair without which the number of passes stays the same is left out.
    """
    pairs = tuple(_pair_candidates(schedule)) if schedule.allow_online_softmax else ()
    min_passes = count_passes(schedule, pairs)
    for pair in pairs:
        rest = tuple(p for p in pairs if p is not pair)
        if count_passes(schedule, rest) <= min_passes:
            pairs = rest
    return pairs


def pair_sums(pairs: Iterable[OnlinePair]) -> frozenset[int]:
    """The sums that are reduced in the same loop as the maximum that they need."""
    return frozenset(index for pair in pairs for index in pair.sums)


def count_passes(
    schedule: Schedule, pairs: Iterable[OnlinePair], others: Iterable[int] = ()
) -> int:
    """The number of passes over the columns that reduce or write.

    ``others``: other reductions that share the loop of the reduction that they need.
    """
    level, outputs = (
        schedule.reduction_levels({*pair_sums(pairs), *others}),
        schedule.mapping.outputs,
    )
    reducing = {level[i] - 1 for i in schedule.body if schedule.removes_columns(i)}
    return len(
        reducing | {level[i] for i in schedule.body if i in outputs and schedule.has_columns(i)}
    )


def _pair_candidates(schedule: Schedule) -> Iterator[OnlinePair]:
    maxima: dict[Operand, list[int]] = {}
    for index in schedule.body:
        is_maximum = _is_float_operator(schedule.mapping, index, "amax")
        if is_maximum and schedule.removes_columns(index):
            maxima.setdefault(schedule.mapping.operands[index][0], []).append(index)
    for x, maxima_of_x in maxima.items():
        is_guarded = {
            i: guarded
            for i in schedule.body
            if (guarded := _is_guarded_sum(schedule, i, x, maxima_of_x)) is not None
        }
        if is_guarded:
            guarded_sums = frozenset(i for i in is_guarded if is_guarded[i])
            yield OnlinePair(x, tuple(maxima_of_x), tuple(is_guarded), guarded_sums)


def _is_guarded_sum(schedule: Schedule, index: int, x: Operand, maxima: list[int]) -> bool | None:
    """Whether a sum of exp(x - maximum) is guarded; None if the operator is no such sum."""
    found = _nested_operands(schedule.mapping, index, "sum", "exp", "sub")
    if found is None or found[0] != x or not schedule.removes_columns(index):
        return None
    maximum = found[1].source
    if maximum in maxima:
        return False
    return True if _guarded_maximum(schedule.mapping, maximum) in maxima else None


def _nested_operands(mapping: LoopMapping, index: int, *ops: str) -> tuple[Operand, ...] | None:
    """The operands of the last of nested float operators, such as of ``sub`` in sum(exp(sub)).

    None if an operator is another one.
    """
    operands: tuple[Operand, ...] | None = None
    for op in ops:
        if not _is_float_operator(mapping, index, op):
            return None
        operands = mapping.operands[index]
        index = operands[0].source
    return operands


def _guarded_maximum(mapping: LoopMapping, index: int) -> int | None:
    """The m of where(abs(m) == inf, 0, m); None for other values."""
    if not _is_float_operator(mapping, index, "where"):
        return None
    condition, zero, value = mapping.operands[index]
    if not _is_constant(mapping, zero, 0.0) or not _is_infinity_test(
        mapping, condition.source, value
    ):
        return None
    return value.source


def _is_infinity_test(mapping: LoopMapping, index: int, value: Operand) -> bool:
    """Whether an operator computes isinf(value) or abs(value) == inf."""
    if index not in mapping.accesses:
        return False
    operands = mapping.operands[index]
    if mapping.graph[index].op == "isinf":
        return operands == (value,)
    if mapping.graph[index].op != "eq":
        return False
    left, right = operands
    magnitude_operands = mapping.operands.get(left.source, ())
    is_magnitude = _is_float_operator(mapping, left.source, "abs") and (
        magnitude_operands == (value,)
    )
    return is_magnitude and _is_constant(mapping, right, float("inf"))


def _is_float_operator(mapping: LoopMapping, index: int, op: str) -> bool:
    """Whether a node is the operator ``op`` of the pattern, with a float result."""
    node = mapping.graph[index]
    return index in mapping.accesses and node.op == op and compute_dtype(node.dtype) == "float32"


def _is_constant(mapping: LoopMapping, operand: Operand, number: float) -> bool:
    node = mapping.graph[operand.source]
    return node.op == "constant" and node["value"] == number


_MEAN_TOLERANCE = 1e-6
"""Relative difference from 1 / N of a factor that makes a sum the mean: fp32 rounds 1 / N."""


@dataclass(frozen=True)
class OnlineVariance:
    """Two reductions of one operand x that share one loop over the columns."""

    total: int  # the sum of x
    squares: int  # the sum of (x - mean)^2


@lru_cache(maxsize=32)
def online_variances(schedule: Schedule) -> tuple[OnlineVariance, ...]:
    """The variances that save a pass over the columns, alone or together."""
    if not schedule.allow_online_variance:
        return ()
    pairs = online_pairs(schedule)
    variances = tuple(_candidates(schedule))
    least = count_passes(schedule, pairs, (v.squares for v in variances))
    for variance in variances:
        rest = tuple(v for v in variances if v is not variance)
        if count_passes(schedule, pairs, (v.squares for v in rest)) <= least:
            variances = rest
    return variances


def _candidates(schedule: Schedule) -> Iterator[OnlineVariance]:
    mapping = schedule.mapping
    for index in schedule.body:
        total = _centred_sum(mapping, index)
        if total is not None and mapping.reduced_loops.get(index) == frozenset(schedule.columns):
            yield OnlineVariance(total, index)


def _centred_sum(mapping: LoopMapping, index: int) -> int | None:
    """The sum of x, if a node is the sum of (x - mean)^2 of the same elements."""
    found = _nested_operands(mapping, index, "sum", "square", "sub")
    if found is None:
        return None
    x, mean = found
    total = _sum_of_mean(mapping, mean.source)
    if total is None or mapping.operands[total] != (x,):
        return None
    is_same_row = mapping.reduced_loops.get(total) == mapping.reduced_loops.get(index)
    return total if is_same_row else None


def _sum_of_mean(mapping: LoopMapping, index: int) -> int | None:
    """The sum that a node divides by the number of its elements; None for other nodes."""
    is_product = _is_float_operator(mapping, index, "mul")
    if not is_product and not _is_float_operator(mapping, index, "div"):
        return None
    total, number = mapping.operands[index]
    factor = mapping.graph[number.source]
    if factor.op != "constant" or not _is_float_operator(mapping, total.source, "sum"):
        return None
    count = math.prod(mapping.loop_sizes[loop] for loop in mapping.reduced_loops[total.source])
    value = factor["value"]
    if not isinstance(value, float | int):
        return None
    share = count * value if is_product else value / count
    return total.source if abs(share - 1) <= _MEAN_TOLERANCE else None
