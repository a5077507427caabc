"""Conversion of an FX graph's sizes to ints; a placeholder prime replaces its one dynamic size.

PyTorch writes a dynamic size as a SymPy symbol. A graph may have one symbol; each of its dynamic
sizes must be a multiple of it (:mod:`nostall.fusion.graph.dynamic_size`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from nostall.fusion.capture.call import Unsupported
from nostall.fusion.graph.dynamic_size import placeholder_prime
from nostall.fusion.graph.shapes import Shape


class Sizes:
    """Sizes of one graph: its symbols, and the placeholder prime if it has exactly one."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        hints: dict[Any, int] = {}
        static_sizes: set[int] = set()
        seen: Counter[Any] = Counter()
        for size in _sizes(nodes):
            if isinstance(size, int):
                static_sizes.add(size)
                continue
            symbols = size.node.expr.free_symbols
            seen.update(symbols)
            factor, symbol = _multiple(size)
            if symbol is not None and size.node.hint is not None:
                static_sizes.add(factor)
                hints.setdefault(symbol, size.node.hint // factor)
        self.symbols = frozenset(seen)
        self.symbol: Any = None
        self.varying: int | None = None
        if len(self.symbols) == 1 and hints:
            ((self.symbol, hint),) = hints.items()
            self.varying = placeholder_prime(hint, static_sizes)

    def layout(self, value: torch.Tensor) -> tuple[Shape, Shape]:
        """Shape and strides of a fake tensor as ints; raises :class:`Unsupported` if impossible."""
        shape = tuple(map(self._number, value.shape))
        if self.varying and math.prod(shape) and math.prod(shape) % self.varying**2 == 0:
            raise Unsupported("the dynamic dimension twice in a tensor")
        return shape, tuple(map(self._number, value.stride()))

    def _number(self, size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        if any(str(symbol).startswith("u") for symbol in size.node.expr.free_symbols):
            raise Unsupported("data-dependent shape")
        if len(self.symbols) > 1:
            raise Unsupported("several dynamic dimensions")
        factor, symbol = _multiple(size)
        if self.varying is None or symbol is None:
            raise Unsupported("a size that is no multiple of the dynamic dimension")
        return factor * self.varying


def _multiple(size: Any) -> tuple[int, Any]:
    """A size as (factor, symbol); the symbol is None if the size is no multiple of one symbol."""
    expression = size.node.expr
    symbols = expression.free_symbols
    if len(symbols) != 1:
        return 1, None
    (symbol,) = symbols
    ratio = expression / symbol
    return (int(ratio), symbol) if ratio.is_Integer else (1, None)


def _sizes(nodes: Iterable[Node]) -> Iterator[int | torch.SymInt]:
    """All sizes and strides of all strided tensors of the graph."""
    for node in nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(item, torch.Tensor) and item.layout == torch.strided:
                yield from (*item.shape, *item.stride())
