"""Operators one by one in PyTorch: what a region falls back to where no kernel can be stitched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nostall.fusion.codegen.expressions.templates import LARGEST_BELOW_ONE
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import ELEMENTWISE, OPERATIONS


def run_operator(node: Node, operands: Sequence[Tensor]) -> Tensor:
    """The value of an operator, with the dtype and strides of ``node``.

    Raises :class:`BadFusion` for opaque nodes.
    """
    value = _compute(node, operands).to(getattr(torch, node.dtype))
    if value.shape == torch.Size(node.shape) and value.stride() == node.strides:
        return value
    result: Tensor = torch.empty_strided(
        node.shape, node.strides, dtype=value.dtype, device=value.device
    )
    return result.copy_(value)


def read_value(
    graph: Graph, index: int, computed: Mapping[int, Any], size: int | None, device: torch.device
) -> Any:
    """A value that is computed, a view of one, or a constant; ``size`` is what varies.

    It goes down to the value by calling itself by its name: a closure that calls itself is a cycle,
    and would keep what is computed until Python next looks for cycles.
    """
    if index in computed:
        return computed[index]
    node = graph[index].resized(graph.varying, size)
    if node.kind == "layout":
        return apply_view(node, read_value(graph, node.inputs[0], computed, size, device))
    return constant_value(node, device)


def apply_view(node: Node, below: Tensor) -> Tensor:
    """What a layout node shows of ``below``."""
    found: Tensor
    if node.op == "permute":
        found = below.permute(node.dims)
    elif node.op == "expand":
        found = below.expand(node.shape)
    elif node.op == "slice":
        dim, start, step = node["dim"], node["start"], node["step"]
        assert isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)
        stop = start + step * (node.shape[dim] - 1) + 1 if node.shape[dim] else start
        found = below[(slice(None),) * dim + (slice(start, stop, step),)]
    else:
        found = below.reshape(node.shape)
    return found


def constant_value(node: Node, device: torch.device) -> Tensor:
    """The value of a constant or a counter."""
    dtype = getattr(torch, node.dtype)
    found: Tensor
    if node.op == "iota":
        count = torch.arange(node.shape[0], device=device)
        found = (node["start"] + node["step"] * count).to(dtype)
    else:
        found = torch.full(node.shape, node["value"], dtype=dtype, device=device)
    return found


def uniform_numbers(seed: Tensor, size: Sequence[int], dtype: torch.dtype, words: int) -> Tensor:
    """Numbers in [0, 1) for a seed of one element, as kernels make them: four or eight of each
    counter (:mod:`~nostall.fusion.codegen.emit.philox`) or, as ``tl.rand`` does, its first word."""
    size = tuple(size)
    if words == 1:
        (word, *_) = _philox(seed, math.prod(size))
        signed = torch.where(word > 0x7FFFFFFF, 0xFFFFFFFF - word, word)
        found = signed.to(torch.float32) * 4.6566127342e-10
    else:
        count = math.prod(size)
        word = torch.stack(_philox(seed, -(-count // words)), dim=1).reshape(-1)
        if words == 8:
            halves = torch.stack((word & 0xFFFF, word >> 16), dim=1).reshape(-1)
            found = (halves[:count].to(torch.float32) + 0.5) / 65536
        else:
            found = word[:count].to(torch.float32) * 2.3283062977608182e-10
    most = LARGEST_BELOW_ONE.get(str(dtype).removeprefix("torch."))
    found = found if most is None else found.clamp(max=most)
    return found.to(dtype).reshape(size)


def _philox(seed: Tensor, count: int) -> list[Tensor]:
    """The four words of the counters 0, 1, ... by Philox 4x32-10 (Salmon et al., SC 2011)."""
    low = 0xFFFFFFFF
    one = torch.arange(count, device=seed.device)
    two, three, four = torch.zeros_like(one), torch.zeros_like(one), torch.zeros_like(one)
    keys = [seed & low, (seed >> 32) & low]
    for _ in range(10):
        # The middle of a 64-bit product is right although its sign is not.
        left, right = one * 0xD2511F53, three * 0xCD9E8D57
        one = ((right >> 32) & low) ^ two ^ keys[0]
        three = ((left >> 32) & low) ^ four ^ keys[1]
        two, four = right & low, left & low
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return [one, two, three, four]


def _compute(node: Node, operands: Sequence[Tensor]) -> Tensor:
    found: Tensor
    if node.op in _TORCH_NAMES:
        found = getattr(torch, node.op)(*operands)
    elif node.op in _TORCH_FUNCTIONS:
        found = _TORCH_FUNCTIONS[node.op](node, *operands)
    else:
        raise BadFusion(f"{node} cannot be run here; run opaque nodes where the graph comes from")
    return found


# Every other elementwise operator has PyTorch's own name.
_TORCH_NAMES = frozenset(row.name for row in OPERATIONS.values() if row.kind in ELEMENTWISE) - {
    "cast",
    "copy",
    "random",
}


def _reduce_by_axis(node: Node, value: Tensor, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """A reduction that PyTorch does along one axis, along several; narrow floats are not rounded in
    between, where they might overflow."""
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    for axis in sorted(node.dims, reverse=True):
        value = function(value, axis)
    return value.reshape(node.shape)


_TORCH_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "random": lambda node, x: uniform_numbers(
        x, node.shape, getattr(torch, node.dtype), node["words"]
    ),
    "cast": lambda node, x: x.to(getattr(torch, node.dtype)),
    "copy": lambda node, x: x,
    "dot": lambda node, a, b: torch.matmul(a, b),
    "sum": lambda node, x: x.sum(node.dims, keepdim=node.keepdim),
    "amax": lambda node, x: x.amax(node.dims, keepdim=node.keepdim),
    "amin": lambda node, x: x.amin(node.dims, keepdim=node.keepdim),
    "prod": lambda node, x: _reduce_by_axis(node, x, lambda v, axis: v.prod(axis)),
    "any": lambda node, x: _reduce_by_axis(node, x, lambda v, axis: v.any(axis)),
    "all": lambda node, x: _reduce_by_axis(node, x, lambda v, axis: v.all(axis)),
}
