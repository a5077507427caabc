"""FLOP and bytes of matrix products, from the shapes that ``record_shapes=True`` leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import msgspec

MATMULS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that launch a product themselves, and the position of its left factor."""

_PRECISIONS = {
    "float": ("fp32", 4),
    "c10::Half": ("fp16", 2),
    "c10::BFloat16": ("bf16", 2),
    "double": ("fp64", 8),
}

_SHAPES = msgspec.json.Decoder(list[object])


@dataclass(frozen=True, slots=True)
class Product:
    """``flops``: 2 m n k, times the batch; ``size``: bytes of both factors and the product."""

    flops: float
    size: float
    precision: str


@lru_cache(maxsize=4096)  # every step repeats the shapes of the one before
def product(operator: str, shapes: bytes, types: bytes) -> Product | None:
    """The product that an operator computes; None where its arguments are not those of one.

    Convolutions are not counted: their strides and paddings are not part of the shapes.
    """
    at = MATMULS[operator]
    try:
        factors = _SHAPES.decode(shapes)[at : at + 2]
        dtypes = _SHAPES.decode(types)[at : at + 2]
    except msgspec.DecodeError:
        return None
    if len(factors) != 2 or len(dtypes) != 2 or dtypes[0] != dtypes[1]:
        return None
    left, right = (_shape(f) for f in factors)
    known = _PRECISIONS.get(str(dtypes[0]))
    if known is None or len(left) < 2 or len(left) != len(right) or right[-2] != left[-1]:
        return None
    batch, m, k, n = math.prod(left[:-2]), left[-2], left[-1], right[-1]
    precision, width = known
    elements = batch * (m * k + k * n + m * n)
    return Product(2.0 * batch * m * n * k, float(elements * width), precision)


def _shape(value: object) -> list[int]:
    """A list of sizes; empty where it is something else."""
    if isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value):
        return value
    return []
