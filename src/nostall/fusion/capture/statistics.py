"""ATen's reductions in terms of nostall's: sums and their like, means, variances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nostall.fusion.capture.call import Call, Unfit, Value, dtype_name, wide

Rule = Callable[[Call], Value]


def _axes(call: Call, x: int, place: int = 1) -> tuple[int, ...]:
    """The axes of a reduction; all of them where none are said."""
    rank = len(call.shape(x))
    said = call.argument(place, "dim")
    said = [said] if isinstance(said, int) else said
    return tuple(sorted(call.axis(axis, rank) for axis in (said or range(rank))))


def reduction(op: str) -> Rule:
    """The rule of a reduction that nostall has, too."""

    def rule(call: Call) -> Value:
        x = call.tensor(0)
        axes = _axes(call, x)
        wanted = dtype_name(call.result.dtype)
        given = call.build.nodes[x].dtype
        if op in ("any", "all") and (not axes or wanted != "bool"):
            return _truth(call, op, x, axes)
        if not axes:
            return call.finish("copy" if wanted == given else "cast", x)
        if op in ("sum", "prod") and wanted != given:
            x = call.add("cast", x, dtype=wanted)
        return call.finish(op, x, dims=axes, keepdim=bool(call.argument(2, "keepdim", False)))

    return rule


def _truth(call: Call, op: str, x: int, axes: tuple[int, ...]) -> Value:
    """``any`` or ``all`` of a single number, or of bytes, which ATen gives bytes of."""
    if axes:
        keepdim = bool(call.argument(2, "keepdim", False))
        return call.finish("cast", call.add(op, x, dims=axes, keepdim=keepdim))
    zero = call.number(0, call.build.nodes[x].dtype)
    return call.finish("cast", call.add("ne", x, zero))


def _count(call: Call, x: int, axes: Sequence[int]) -> int:
    count = math.prod(call.fixed(axis, call.shape(x)) for axis in axes)
    if not count:
        raise Unfit("mean of nothing")
    return count


def _average(call: Call, x: int, axes: tuple[int, ...], keepdim: bool, divisor: float) -> int:
    """Sum over axes divided by a number, in the precision that ATen sums in."""
    dtype = wide(getattr(torch, call.build.nodes[x].dtype))
    total = call.add("sum", x, dims=axes, keepdim=keepdim, dtype=dtype)
    return call.add("mul", total, call.number(1.0 / divisor, dtype), dtype=dtype)


def mean(call: Call) -> Value:
    """A sum times a number, in the precision that ATen sums in."""
    x = call.tensor(0)
    axes = _axes(call, x)
    if not axes:
        return call.finish("copy", x)
    keepdim = bool(call.argument(2, "keepdim", False))
    dtype = wide(call.result.dtype)
    total = call.add("sum", x, dims=axes, keepdim=keepdim, dtype=dtype)
    return call.finish("mul", total, call.number(1.0 / _count(call, x, axes), dtype))


def _variance(call: Call, x: int) -> tuple[int, int, tuple[int, ...], bool]:
    """Variance and mean, both with the reduced axes kept, in the wide dtype."""
    axes = _axes(call, x)
    if not axes:
        raise Unfit("variance of one number")
    correction = call.argument(2, "correction")
    count = _count(call, x, axes)
    divisor = count - (1 if correction is None else correction)
    if divisor <= 0:
        raise Unfit("variance of one number")
    middle = _average(call, x, axes, True, count)
    away = call.add("sub", x, middle, dtype=call.build.nodes[middle].dtype)
    variance = _average(call, call.add("square", away), axes, True, divisor)
    return variance, middle, axes, bool(call.argument(3, "keepdim", False))


def _narrowed(call: Call, index: int, axes: tuple[int, ...], keepdim: bool, like: Any) -> int:
    """A statistic in the dtype and shape that ATen gives it."""
    dtype = dtype_name(like.dtype)
    if call.build.nodes[index].dtype != dtype:
        index = call.add("cast", index, dtype=dtype)
    if keepdim:
        return index
    kept = tuple(s for axis, s in enumerate(call.shape(index)) if axis not in axes)
    return call.build("view", index, shape=kept)


def var(call: Call) -> Value:
    """The squares of what is left without the mean."""
    variance, _, axes, keepdim = _variance(call, call.tensor(0))
    return _narrowed(call, variance, axes, keepdim, call.result)


def var_mean(call: Call) -> Value:
    """Both, from one mean."""
    results: Any = call.result
    variance, middle, axes, keepdim = _variance(call, call.tensor(0))
    return tuple(
        _narrowed(call, index, axes, keepdim, like)
        for index, like in zip((variance, middle), results, strict=True)
    )
