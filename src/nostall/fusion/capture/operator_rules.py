"""Rules that lower operators of an FX graph which have no elementwise operation of their own.

Views (slices, joins, reshapes), indices, minima and maxima with their positions, and random values.
:mod:`~nostall.fusion.capture.lowering` has the table of all rules.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from nostall.fusion.capture.call import Call, Unsupported, Value, dtype_name
from nostall.fusion.capture.randomness import numbers_depend_on_kernels
from nostall.fusion.capture.reduction_rules import Rule
from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.operations import OPERATIONS


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


ALIGNED_SEEDS = 2
"""Seeds (8 bytes each) in 16 bytes: kernels assume that tensors start at multiples of 16 bytes."""


def inductor_seed(call: Call) -> Value:
    """Lower ``inductor_lookup_seed``: one of the seeds that Inductor draws for the whole graph.

    The seed is lowered as an element of a pair that starts at a multiple of 16 bytes. Each pair has
    the alignment that kernels assume, so any pair can be the input of the same kernel.
    """
    seeds, index = call.tensor(0), call.argument(1, "index")
    (count,) = call.shape(seeds)
    first = index - index % ALIGNED_SEEDS
    size = min(ALIGNED_SEEDS, count - first)
    pair = call.build("slice", seeds, shape=(size,), dim=0, start=first, step=1)
    seed = call.build("slice", pair, shape=(1,), dim=0, start=index - first, step=1)
    return call.finish("view", seed)


def inductor_random(call: Call) -> Value:
    """Lower ``inductor_random`` to the numbers that Inductor's own kernels make."""
    on_gpu = call.result.device.type == "cuda"
    if call.argument(2, "mode") != "rand" or not on_gpu or numbers_depend_on_kernels():
        raise Unsupported("random numbers")
    return call.finish("random", call.build("view", call.tensor(1), shape=(1,)), words=1)


def uniform(call: Call) -> Value:
    """Lower ``nostall::uniform``: 4 or 8 numbers from each counter value of Philox."""
    words = call.argument(3, "words")
    if words not in (4, 8):
        raise Unsupported("random numbers")
    return call.finish("random", call.tensor(0), words=words)


def comparison(op: str) -> Rule:
    """The rule of a comparison: of values in their common dtype, rounded to it.

    It reads Inductor's random numbers without their rounding: Inductor's kernels compare random
    numbers in fp32, before the cast to the program's dtype.
    """

    def rule(call: Call) -> Value:
        places = range(OPERATIONS[op].arity or 0)
        unrounded = [_unrounded(call, call.operand(place)) for place in places]
        if any(call.build.nodes[index].op == "random" for index in unrounded):
            return call.finish(op, *unrounded)
        common = _common_dtype(call, len(places))
        rounded = (call.rounded(call.rounded_operand(place)) for place in places)
        return call.finish(op, *(call.rounded_to(index, common) for index in rounded))

    return rule


def _common_dtype(call: Call, operands: int) -> str:
    """The dtype in which ATen compares the operands."""
    values = [x.meta["val"] if isinstance(x, Node) else x for x in call.node.args[:operands]]
    return dtype_name(torch.result_type(*values)) if operands == 2 else ""


def _unrounded(call: Call, index: int) -> int:
    """The random number that a cast rounds, if ``index`` is a cast of one of Inductor's."""
    node = call.build.nodes[index]
    source = call.build.nodes[node.inputs[0]] if node.op == "cast" else node
    return source.index if source.op == "random" and source["words"] == 1 else index
