"""Lowering rules for ATen's reductions: sum and the like, mean, variance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nostall.fusion.capture.call import Call, Unsupported, Value, compute_dtype, dtype_name

Rule = Callable[[Call], Value]
SOFTMAX_STATISTICS = "prims.prepare_softmax_online.default"


def _axes(call: Call, x: int) -> tuple[int, ...]:
    """The axes that a call reduces, ascending; all axes of ``x`` if the call names none.

    A tensor without axes has none, although calls name its axes 0 and -1.
    """
    rank = len(call.shape(x))
    if not rank:
        return ()
    dim = call.argument(1, "dim")
    dims = [dim] if isinstance(dim, int) else dim
    return tuple(sorted(call.axis(axis, rank) for axis in (dims or range(rank))))


def reduction(op: str) -> Rule:
    """The rule of an ATen reduction that is one operator of nostall."""

    def rule(call: Call) -> Value:
        x = call.tensor(0)
        axes = _axes(call, x)
        result_dtype = dtype_name(call.result.dtype)
        dtype = call.build.nodes[x].dtype
        if op in ("any", "all"):
            x = call.rounded(x)
        if op in ("any", "all") and (not axes or result_dtype != "bool"):
            return _any_or_all(call, op, x, axes)
        if not axes:
            return call.finish("copy" if result_dtype == dtype else "cast", x)
        if op in ("sum", "prod") and result_dtype != dtype:
            x = call.add("cast", x, dtype=result_dtype)
        return call.finish(op, x, dims=axes, keepdim=bool(call.argument(2, "keepdim", False)))

    return rule


def _any_or_all(call: Call, op: str, x: int, axes: tuple[int, ...]) -> Value:
    """``any`` or ``all`` of a scalar, or of uint8 (for which ATen returns uint8)."""
    if axes:
        keepdim = bool(call.argument(2, "keepdim", False))
        return call.finish("cast", call.add(op, x, dims=axes, keepdim=keepdim))
    zero = call.number(0, call.build.nodes[x].dtype)
    return call.finish("cast", call.add("ne", x, zero))


def _count(call: Call, x: int, axes: Sequence[int]) -> int:
    """The number of elements that are reduced to one; raises :class:`Unsupported` if it is 0."""
    count = math.prod(call.static_size(axis, call.shape(x)) for axis in axes)
    if not count:
        raise Unsupported("mean of nothing")
    return count


def _average(call: Call, x: int, axes: tuple[int, ...], keepdim: bool, divisor: float) -> int:
    """Add a sum over axes divided by a number, in the precision in which ATen sums."""
    dtype = compute_dtype(getattr(torch, call.build.nodes[x].dtype))
    total = call.add("sum", x, dims=axes, keepdim=keepdim, dtype=dtype)
    return call.add("mul", total, call.number(1.0 / divisor, dtype), dtype=dtype)


def softmax_statistics(call: Call) -> Value:
    """Lower :data:`SOFTMAX_STATISTICS`: the maximum m of a row and the sum of exp(x - m).

    Inductor puts it in place of both reductions, and keeps its own ``x - m`` and ``exp``.
    """
    x = call.tensor(0)
    axes = _axes(call, x)
    if not axes:
        raise Unsupported("softmax of one number")
    largest = call.add("amax", x, dims=axes, keepdim=True)
    power = call.add("exp", call.add("sub", x, largest))
    return largest, call.add("sum", power, dims=axes, keepdim=True)


def mean(call: Call) -> Value:
    """Lower a mean to a sum times a constant, in the precision in which ATen sums."""
    x = call.tensor(0)
    axes = _axes(call, x)
    if not axes:
        return call.finish("copy", x)
    keepdim = bool(call.argument(2, "keepdim", False))
    dtype = compute_dtype(call.result.dtype)
    total = call.add("sum", x, dims=axes, keepdim=keepdim, dtype=dtype)
    return call.finish("mul", total, call.number(1.0 / _count(call, x, axes), dtype))


def _variance(call: Call, x: int) -> tuple[int, int, tuple[int, ...], bool]:
    """Variance and mean (reduced axes kept, compute dtype), the axes, and the call's keepdim."""
    axes = _axes(call, x)
    if not axes:
        raise Unsupported("variance of one number")
    correction = call.argument(2, "correction")
    count = _count(call, x, axes)
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        raise Unsupported("variance of one number")
    average = _average(call, x, axes, True, count)
    centered = call.add("sub", x, average, dtype=call.build.nodes[average].dtype)
    variance = _average(call, call.add("square", centered), axes, True, divisor)
    return variance, average, axes, bool(call.argument(3, "keepdim", False))


def _converted(call: Call, index: int, axes: tuple[int, ...], keepdim: bool, like: Any) -> int:
    """A statistic in the dtype and shape of ATen's result."""
    dtype = dtype_name(like.dtype)
    if call.build.nodes[index].dtype != dtype:
        index = call.add("cast", index, dtype=dtype)
    if keepdim:
        return index
    shape = tuple(s for axis, s in enumerate(call.shape(index)) if axis not in axes)
    return call.build("view", index, shape=shape)


def var(call: Call) -> Value:
    """Lower a variance: the mean square of the differences from the mean."""
    variance, _, axes, keepdim = _variance(call, call.tensor(0))
    return _converted(call, variance, axes, keepdim, call.result)


def var_mean(call: Call) -> Value:
    """Lower a call that returns variance and mean; both use one mean."""
    results: Any = call.result
    variance, average, axes, keepdim = _variance(call, call.tensor(0))
    return tuple(
        _converted(call, index, axes, keepdim, like)
        for index, like in zip((variance, average), results, strict=True)
    )
