"""Lowering rules of gather and scatter of one element of each row, by a mask along the row."""

from __future__ import annotations

import math

import torch

from nostall.fusion.capture.call import Call, Unsupported, Value, dtype_name
from nostall.fusion.capture.reduction_rules import Rule


def one_hot(call: Call, x: int, dim: int, index: int) -> int:
    """Add a mask of the shape of ``x``: True where the position along ``dim`` equals ``index``.

    ``index`` must have the shape of ``x`` with length 1 along ``dim``.
    """
    shape = call.shape(x)
    if not shape or call.shape(index) != (*shape[:dim], 1, *shape[dim + 1 :]):
        raise Unsupported("gather or scatter of more than one element a row")
    positions = call.build("iota", shape=(shape[dim],), start=0, step=1)
    broadcastable = (shape[dim],) + (1,) * (len(shape) - dim - 1)
    return call.add("eq", call.build("view", positions, shape=broadcastable), index)


def _checked_index(call: Call, x: int, dim: int, place: int) -> int:
    """The index operand of a call; it has to be a position along ``dim`` of ``x``."""
    shape = call.shape(x)
    if not shape:
        raise Unsupported("gather or scatter of a tensor without axes")
    return call.add("checked_index", call.tensor(place), size=call.static_size(dim, shape))


def gather(call: Call) -> Value:
    """Lower a gather of one element a row (as in cross-entropy) to a masked maximum over the row.

    The maximum fuses with other reductions over the same row, such as those of a softmax. Unlike a
    sum it keeps the sign of -0.0.
    """
    x = call.tensor(0)
    dim = call.axis(call.argument(1, "dim"), len(call.shape(x)))
    mask = one_hot(call, x, dim, _checked_index(call, x, dim, 2))
    if call.result.dtype == torch.bool:
        return call.finish("any", call.add("logical_and", mask, x), dims=(dim,), keepdim=True)
    is_float = call.result.dtype.is_floating_point
    lowest = -math.inf if is_float else torch.iinfo(call.result.dtype).min
    masked = call.add("where", mask, x, call.number(lowest, call.build.nodes[x].dtype))
    return call.finish("amax", masked, dims=(dim,), keepdim=True)


def scatter(what: str) -> Rule:
    """The rule of a scatter of one element a row: a number, a tensor, or a tensor to be added."""

    def rule(call: Call) -> Value:
        x = call.tensor(0)
        dim = call.axis(call.argument(1, "dim"), len(call.shape(x)))
        index = _checked_index(call, x, dim, 2)
        mask = one_hot(call, x, dim, index)
        if what == "value":
            value = call.number(call.argument(3, "value"), dtype_name(call.result.dtype))
        else:
            value = call.tensor(3)
            if call.shape(value) != call.shape(index):
                raise Unsupported("a source that is larger than the indices")
        if what == "sum":
            value = call.add("add", x, value, dtype=call.dtype)
        return call.finish("where", mask, value, x)

    return rule
