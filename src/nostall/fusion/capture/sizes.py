"""Sizes of an FX graph as numbers, where one of them may be known at run time only.

PyTorch writes such a size as a symbol.  One symbol is taken, with a prime in its place
(:mod:`nostall.fusion.graph.dynamic_size`); sizes must be multiples of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from nostall.fusion.capture.call import Unfit
from nostall.fusion.graph.dynamic_size import stand_in
from nostall.fusion.graph.shapes import Shape


class Sizes:
    """The sizes of one graph; ``varying`` stands for its symbol, None where it has none."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        hints: dict[Any, int] = {}
        known: set[int] = set()
        seen: Counter[Any] = Counter()
        for size in _sizes(nodes):
            if isinstance(size, int):
                known.add(size)
                continue
            symbols = size.node.expr.free_symbols
            seen.update(symbols)
            factor, symbol = _multiple(size)
            if symbol is not None and size.node.hint is not None:
                known.add(factor)
                hints.setdefault(symbol, size.node.hint // factor)
        self.symbols = frozenset(seen)
        self.symbol: Any = None
        self.varying: int | None = None
        if len(self.symbols) == 1 and hints:
            ((self.symbol, hint),) = hints.items()
            self.varying = stand_in(hint, known)

    def layout(self, value: torch.Tensor) -> tuple[Shape, Shape]:
        """Shape and strides of a fake tensor; raises :class:`Unfit`."""
        shape = tuple(map(self._number, value.shape))
        if self.varying and math.prod(shape) and math.prod(shape) % self.varying**2 == 0:
            raise Unfit("the dynamic dimension twice in a tensor")
        return shape, tuple(map(self._number, value.stride()))

    def _number(self, size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        if any(str(symbol).startswith("u") for symbol in size.node.expr.free_symbols):
            raise Unfit("data-dependent shape")
        if len(self.symbols) > 1:
            raise Unfit("several dynamic dimensions")
        factor, symbol = _multiple(size)
        if self.varying is None or symbol is None:
            raise Unfit("a size that is no multiple of the dynamic dimension")
        return factor * self.varying


def _multiple(size: Any) -> tuple[int, Any]:
    """A size as factor and symbol; symbol None where it is something else."""
    expression = size.node.expr
    symbols = expression.free_symbols
    if len(symbols) != 1:
        return 1, None
    (symbol,) = symbols
    ratio = expression / symbol
    return (int(ratio), symbol) if ratio.is_Integer else (1, None)


def _sizes(nodes: Iterable[Node]) -> Iterator[int | torch.SymInt]:
    """Every size and stride of every tensor."""
    for node in nodes:
        value = node.meta.get("val")
        for one in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(one, torch.Tensor) and one.layout == torch.strided:
                yield from (*one.shape, *one.stride())
