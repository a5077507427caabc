"""Lowering rules for views: calls that rearrange or select elements and compute nothing."""

from __future__ import annotations

from typing import Any

from nostall.fusion.capture.call import Call, Unsupported, Value
from nostall.fusion.graph.dynamic_size import varies


def identity(call: Call) -> Value:
    return call.tensor(0)


def view(call: Call) -> Value:
    return call.finish("view", call.tensor(0))


def expand(call: Call) -> Value:
    return call.finish("expand", call.tensor(0))


def permute(call: Call) -> Value:
    x = call.tensor(0)
    rank = len(call.shape(x))
    order = [call.axis(axis, rank) for axis in call.argument(1, "dims")]
    return call.finish("permute", x, dims=tuple(order))


def transpose(call: Call) -> Value:
    x = call.tensor(0)
    order = list(range(len(call.shape(x))))
    if not order:
        return call.finish("view", x)
    first, second = (call.axis(call.argument(place, ""), len(order)) for place in (1, 2))
    order[first], order[second] = order[second], order[first]
    return call.finish("permute", x, dims=tuple(order))


def slice(call: Call) -> Value:
    x = call.tensor(0)
    shape = call.shape(x)
    dim = call.axis(call.argument(1, "dim", 0), len(shape))
    start, step = call.argument(2, "start") or 0, call.argument(4, "step", 1)
    if start:
        length = call.static_size(dim, shape)
        start = min(max(start + length if start < 0 else start, 0), length)
    return call.finish("slice", x, dim=dim, start=start, step=step)


def select(call: Call) -> Value:
    x = call.tensor(0)
    shape = call.shape(x)
    dim = call.axis(call.argument(1, "dim"), len(shape))
    index = call.argument(2, "index")
    index = call.axis(index, call.static_size(dim, shape) if index else 1)
    sizes = (*shape[:dim], 1, *shape[dim + 1 :])
    return call.finish("view", call.build("slice", x, shape=sizes, dim=dim, start=index, step=1))


def split(call: Call) -> Value:
    x = call.tensor(0)
    results: Any = call.result
    shape = call.shape(x)
    dim = call.axis(call.argument(2, "dim", 0), len(shape))
    parts, start = [], 0
    for part in results:
        sizes, strides = call.layout(part)
        if varies(start, call.build.varying):
            raise Unsupported("a number that is known at run time only")
        parts.append(
            call.build("slice", x, shape=sizes, strides=strides, dim=dim, start=start, step=1)
        )
        start += sizes[dim]
    return tuple(parts)


def unbind(call: Call) -> Value:
    x = call.tensor(0)
    results: Any = call.result
    shape = call.shape(x)
    dim = call.axis(call.argument(1, "dim", 0), len(shape))
    slice_shape = (*shape[:dim], 1, *shape[dim + 1 :])
    parts = []
    for at, part in enumerate(results):
        single = call.build("slice", x, shape=slice_shape, dim=dim, start=at, step=1)
        sizes, strides = call.layout(part)
        parts.append(call.build("view", single, shape=sizes, strides=strides))
    return tuple(parts)


def repeat(call: Call) -> Value:
    """Lower copies of a tensor side by side to a view of a broadcast."""
    x = call.tensor(0)
    counts = call.argument(1, "repeats")
    shape = (1,) * (len(counts) - len(call.shape(x))) + call.shape(x)
    pairs = [size for each in shape for size in (1, each)]
    wide = [size for count, each in zip(counts, shape, strict=True) for size in (count, each)]
    spread = call.build("expand", call.build("view", x, shape=tuple(pairs)), shape=tuple(wide))
    result, _ = call.layout(call.result)
    return call.finish("copy", call.build("view", spread, shape=result))


MAX_PARTS = 4
"""Parts of a concatenation that is fused: a kernel reads each part once for each part."""


def cat(call: Call) -> Value:
    """Lower a concatenation of equal parts to a selection by the number of the part.

    The result is viewed as (..., parts, size, ...), and each part is broadcast along the axis of
    parts. So rotary embeddings (two halves) need no address arithmetic with bounds.
    """
    tensors = call.argument(0, "tensors")
    values = [call.values[tensor] for tensor in tensors]
    parts = [value for value in values if isinstance(value, int)]
    shapes = {call.shape(part) for part in parts}
    if len(parts) < len(values) or len(shapes) > 1 or not 2 <= len(parts) <= MAX_PARTS:
        raise Unsupported(f"concatenation of other than 2 to {MAX_PARTS} equal parts")
    (shape,) = shapes
    dim = call.axis(call.argument(1, "dim", 0), len(shape))
    call.static_size(dim, shape)
    kept = (*shape[:dim], 1, *shape[dim:])
    views = [call.build("view", part, shape=kept) for part in parts]
    if any(call.build.nodes[part].dtype != call.dtype for part in parts):
        views = [call.add("cast", view, dtype=call.dtype) for view in views]
    number = _part_number(call, len(parts), len(shape) - dim)
    result = views[-1]
    for at in reversed(range(len(parts) - 1)):
        is_part = call.add("eq", number, call.number(at, "int64"))
        result = call.add("where", is_part, views[at], result, dtype=call.dtype)
    sizes, _ = call.layout(call.result)
    return call.finish("copy", call.build("view", result, shape=sizes))


def _part_number(call: Call, parts: int, axes: int) -> int:
    """Add the numbers of equal parts, 0, 1, ..., as an axis with ``axes`` axes behind it."""
    number = call.build("iota", shape=(parts,), dtype="int64", start=0, step=1)
    return call.build("view", number, shape=(parts,) + (1,) * axes)


def slice_scatter(call: Call) -> Value:
    """Lower a copy of a tensor in which one of several equal parts has other values.

    Such copies are the gradients of ``chunk`` and of ``x[..., ::2]``: a selection by the number of
    the part, as in :func:`cat`.  The parts are adjacent or alternate.  Their number is not limited,
    because every part is read once.
    """
    x, source = call.tensor(0), call.tensor(1)
    shape = call.shape(x)
    dim = call.axis(call.argument(2, "dim", 0), len(shape))
    length, size = call.static_size(dim, shape), call.static_size(dim, call.shape(source))
    start, step = call.argument(3, "start") or 0, call.argument(5, "step", 1)
    if not isinstance(start, int):
        raise Unsupported("a number that is known at run time only")
    start = min(max(start + length if start < 0 else start, 0), length)
    parts = length // size if size else 0
    alternate = step == parts > 1
    if not size or length % size or not (alternate or (step == 1 and start % size == 0)):
        raise Unsupported("a part of a result that is not one of several equal parts")
    split, one, at = (parts, size), (1, size), start // size
    if alternate:
        split, one, at = (size, parts), (size, 1), start
    whole = call.build("view", x, shape=(*shape[:dim], *split, *shape[dim + 1 :]))
    part = call.build("view", source, shape=(*shape[:dim], *one, *shape[dim + 1 :]))
    number = _part_number(call, parts, len(shape) - dim - alternate)
    is_part = call.add("eq", number, call.number(at, "int64"))
    result = call.add("where", is_part, part, whole, dtype=call.dtype)
    return call.finish("copy", call.build("view", result, shape=shape))
