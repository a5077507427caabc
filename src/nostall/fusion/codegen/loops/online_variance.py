"""Online variance: the sum of (x - mean)^2 in the loop over the columns that sums x.

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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from nostall.fusion.codegen.expressions.templates import compute_dtype
from nostall.fusion.codegen.loops.mapping import LoopMapping
from nostall.fusion.codegen.loops.online_softmax import count_passes, online_pairs
from nostall.fusion.codegen.loops.schedule import Schedule

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
    if not _is_fp32(mapping, index, "sum"):
        return None
    (square,) = mapping.operands[index]
    if not _is_fp32(mapping, square.source, "square"):
        return None
    (difference,) = mapping.operands[square.source]
    if not _is_fp32(mapping, difference.source, "sub"):
        return None
    x, mean = mapping.operands[difference.source]
    total = _sum_of_mean(mapping, mean.source)
    if total is None or mapping.operands[total] != (x,):
        return None
    is_same_row = mapping.reduced_loops.get(total) == mapping.reduced_loops.get(index)
    return total if is_same_row else None


def _sum_of_mean(mapping: LoopMapping, index: int) -> int | None:
    """The sum that a node divides by the number of its elements; None for other nodes."""
    is_product = _is_fp32(mapping, index, "mul")
    if not is_product and not _is_fp32(mapping, index, "div"):
        return None
    total, number = mapping.operands[index]
    factor = mapping.graph[number.source]
    if factor.op != "constant" or not _is_fp32(mapping, total.source, "sum"):
        return None
    count = math.prod(mapping.loop_sizes[loop] for loop in mapping.reduced_loops[total.source])
    value = factor["value"]
    if not isinstance(value, float | int):
        return None
    share = count * value if is_product else value / count
    return total.source if abs(share - 1) <= _MEAN_TOLERANCE else None


def _is_fp32(mapping: LoopMapping, index: int, op: str) -> bool:
    """Whether a node is the operator ``op``, computed here in fp32."""
    node = mapping.graph[index]
    return index in mapping.accesses and node.op == op and compute_dtype(node.dtype) == "float32"
