"""Eager execution of graph operators in PyTorch: the fallback for operators without a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nostall.fusion.codegen.expressions.templates import LARGEST_BELOW_ONE
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import Size
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import ELEMENTWISE, OPERATIONS


def run_operator(node: Node, operands: Sequence[Tensor]) -> Tensor:
    """The value of an operator, with the dtype and strides of ``node``.

    Raises :class:`BadFusion` for opaque nodes.
    """
    value = _compute(node, operands).to(getattr(torch, node.dtype))
    is_new = all(value is not operand for operand in operands)
    if is_new and value.shape == torch.Size(node.shape) and value.stride() == node.strides:
        return value
    result: Tensor = torch.empty_strided(
        node.shape, node.strides, dtype=value.dtype, device=value.device
    )
    return result.copy_(value)


def read_value(
    graph: Graph, index: int, computed: Mapping[int, Any], size: Size | None, device: torch.device
) -> Any:
    """The value of a node: a computed value, a view of one, or a constant.

    ``size``: the current dynamic sizes, if the graph has any.

    The function recurses by its global name.  A recursive closure would be a reference cycle that
    keeps ``computed`` alive until the next garbage collection.
    """
    if index in computed:
        return computed[index]
    node = graph[index].resized(graph.varying, size)
    if node.kind == "layout":
        return apply_view(node, read_value(graph, node.inputs[0], computed, size, device))
    return constant_value(node, device)


def apply_view(node: Node, below: Tensor) -> Tensor:
    """Apply a layout node to its input ``below``."""
    view: Tensor
    if node.op == "permute":
        view = below.permute(node.dims)
    elif node.op == "expand":
        view = below.expand(node.shape)
    elif node.op == "slice":
        dim, start, step = node["dim"], node["start"], node["step"]
        assert isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)
        stop = start + step * (node.shape[dim] - 1) + 1 if node.shape[dim] else start
        view = below[(slice(None),) * dim + (slice(start, stop, step),)]
    else:
        view = below.reshape(node.shape)
    return view


def constant_value(node: Node, device: torch.device) -> Tensor:
    """The value of a constant or a counter (``iota``)."""
    dtype = getattr(torch, node.dtype)
    value: Tensor
    if node.op == "iota":
        count = torch.arange(node.shape[0], device=device)
        value = (node["start"] + node["step"] * count).to(dtype)
    else:
        value = torch.full(node.shape, node["value"], dtype=dtype, device=device)
    return value


def uniform_numbers(seed: Tensor, size: Sequence[int], dtype: torch.dtype, words: int) -> Tensor:
    """Philox random numbers in [0, 1), bit-identical to those of kernels.

    ``seed``: a tensor of one element.  ``words``: random numbers for each counter: 4 or 8
    (:func:`~nostall.fusion.codegen.loops.addresses.counter_offsets`), or 1, the first word, as in
    ``tl.rand``.
    """
    size = tuple(size)
    if words == 1:
        (word, *_) = _philox(seed, math.prod(size))
        signed = torch.where(word > 0x7FFFFFFF, 0xFFFFFFFF - word, word)
        numbers = signed.to(torch.float32) * 4.6566127342e-10
    else:
        count = math.prod(size)
        word = torch.stack(_philox(seed, -(-count // words)), dim=1).reshape(-1)
        if words == 8:
            halves = torch.stack((word & 0xFFFF, word >> 16), dim=1).reshape(-1)
            numbers = (halves[:count].to(torch.float32) + 0.5) / 65536
        else:
            numbers = word[:count].to(torch.float32) * 2.3283062977608182e-10
    maximum = LARGEST_BELOW_ONE.get(str(dtype).removeprefix("torch."))
    numbers = numbers if maximum is None else numbers.clamp(max=maximum)
    return numbers.to(dtype).reshape(size)


def _philox(seed: Tensor, count: int) -> list[Tensor]:
    """The four output words of counters 0, 1, ..., ``count - 1``, as int64 tensors.

    This is Philox 4x32-10 (Salmon et al., SC 2011).
    """
    mask = 0xFFFFFFFF
    a = torch.arange(count, device=seed.device)
    b, c, d = torch.zeros_like(a), torch.zeros_like(a), torch.zeros_like(a)
    keys = [seed & mask, (seed >> 32) & mask]
    for _ in range(10):
        # Signed int64 products overflow, but bits 0 to 63 are those of the unsigned products.
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a = ((right >> 32) & mask) ^ b ^ keys[0]
        c = ((left >> 32) & mask) ^ d ^ keys[1]
        b, d = right & mask, left & mask
        keys = [(keys[0] + 0x9E3779B9) & mask, (keys[1] + 0xBB67AE85) & mask]
    return [a, b, c, d]


def _compute(node: Node, operands: Sequence[Tensor]) -> Tensor:
    """The value of an operator with PyTorch's own dtype and strides."""
    value: Tensor
    if node.op in _TORCH_NAMES:
        value = getattr(torch, node.op)(*operands)
    elif node.op in _TORCH_FUNCTIONS:
        value = _TORCH_FUNCTIONS[node.op](node, *operands)
    else:
        raise BadFusion(
            f"{node} is opaque and cannot run here; run it in the program that the graph was "
            "captured from"
        )
    return value


# All elementwise operators but these have the name of their PyTorch function.
_TORCH_NAMES = frozenset(row.name for row in OPERATIONS.values() if row.kind in ELEMENTWISE) - {
    "cast",
    "copy",
    "random",
    "checked_index",
}


def _reduce_by_axis(node: Node, value: Tensor, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A reduction over several axes, one after the other, if PyTorch reduces one axis at a time.

    16-bit floats are reduced in fp32, because an intermediate result could overflow.
    """
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    for axis in sorted(node.dims, reverse=True):
        value = function(value, axis)
    return value.reshape(node.shape)


def _checked_index(node: Node, index: Tensor) -> Tensor:
    """The index; PyTorch's assertion fails if an element is not in [0, size)."""
    size = node["size"]
    assert isinstance(size, int)
    torch._assert_async(
        ((index >= 0) & (index < size)).all(), f"index out of bounds: 0 <= index < {size}"
    )
    return index


_TORCH_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "random": lambda node, x: uniform_numbers(
        x, node.shape, getattr(torch, node.dtype), node["words"]
    ),
    "cast": lambda node, x: x.to(getattr(torch, node.dtype)),
    "copy": lambda node, x: x,
    "checked_index": lambda node, x: _checked_index(node, x),
    "dot": lambda node, a, b: torch.matmul(a, b),
    "sum": lambda node, x: x.sum(node.dims, keepdim=node.keepdim),
    "amax": lambda node, x: x.amax(node.dims, keepdim=node.keepdim),
    "amin": lambda node, x: x.amin(node.dims, keepdim=node.keepdim),
    "prod": lambda node, x: _reduce_by_axis(node, x, lambda v, axis: v.prod(axis)),
    "any": lambda node, x: _reduce_by_axis(node, x, lambda v, axis: v.any(axis)),
    "all": lambda node, x: _reduce_by_axis(node, x, lambda v, axis: v.all(axis)),
}
