"""Lowering rules of the position of a maximum or minimum: a second reduction over the row."""

from __future__ import annotations

from typing import Any

import torch

from nostall.fusion.capture.call import Call, Unsupported, Value
from nostall.fusion.capture.reduction_rules import Rule


def extreme_index(op: str) -> Rule:
    """The rule of ``argmax`` or ``argmin`` along an axis: the first position."""

    def rule(call: Call) -> Value:
        x, dim = _rounded(call), call.argument(1, "dim")
        shape = call.shape(x)
        if not shape or (dim is None and len(shape) > 1):
            raise Unsupported("position among all elements")
        axis = call.axis(dim or 0, len(shape))
        extreme = call.add(op, x, dims=(axis,), keepdim=True)
        keepdim = bool(call.argument(2, "keepdim", False))
        return call.finish(
            "amin", _positions(call, x, extreme, axis), dims=(axis,), keepdim=keepdim
        )

    return rule


def extreme_and_index(op: str) -> Rule:
    """The rule of ``max`` or ``min`` along an axis, which returns value and position."""

    def rule(call: Call) -> Value:
        x = _rounded(call)
        shape = call.shape(x)
        if not shape:
            raise Unsupported("position among all elements")
        axis = call.axis(call.argument(1, "dim"), len(shape))
        extreme = call.add(op, x, dims=(axis,), keepdim=True)
        positions = _positions(call, x, extreme, axis)
        index = call.add("amin", positions, dims=(axis,), keepdim=True)
        results: Any = call.result
        kept = []
        for value, like in zip((extreme, index), results, strict=True):
            sizes, strides = call.layout(like)
            kept.append(call.build("view", value, shape=sizes, strides=strides))
        return tuple(kept)

    return rule


def _rounded(call: Call) -> int:
    """The operand as memory holds it: equal elements must be equal in the kernel."""
    if call.build.nodes[call.tensor(0)].dtype == "bool":
        raise Unsupported("position of a bool")
    return call.rounded(call.tensor(0))


def _positions(call: Call, x: int, extreme: int, axis: int) -> int:
    """The position of each element that is the extreme one or NaN; a large number elsewhere.

    If an element is NaN, the extreme is NaN and equals nothing, so only NaN has a position.
    """
    shape = call.shape(x)
    length = call.static_size(axis, shape)
    count = call.build("iota", shape=(length,), dtype="int64", start=0, step=1)
    broadcastable = (length,) + (1,) * (len(shape) - axis - 1)
    count = call.build("view", count, shape=broadcastable)
    found = call.add("eq", x, extreme)
    if getattr(torch, call.build.nodes[x].dtype).is_floating_point:
        found = call.add("logical_or", found, call.add("isnan", x))
    return call.add("where", found, count, call.number(2**31 - 1, "int64"), dtype="int64")
