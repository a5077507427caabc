"""Which operators nostall can fuse, as a table: name, kind, number of operands, attributes.

The names are nostall's own; capture lowers ATen to them, code generation and the reference
interpreter have one template for each.  The kinds are those of FusionStitching (arXiv:2009.10924):
light and heavy elementwise operators, reductions, and the small batched dots of arXiv:1911.11576.
Layout operators are views in PyTorch: they move no bytes, so any kernel may carry them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["input", "constant", "layout", "light", "heavy", "reduce", "dot", "opaque"]
Attribute = int | float | bool | str | tuple[int, ...]

ELEMENTWISE: frozenset[Kind] = frozenset({"light", "heavy"})
COMPUTE: frozenset[Kind] = frozenset({"light", "heavy", "reduce", "dot"})
"""What a kernel computes; everything else is read, or costs nothing, or is a border."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One row.  ``arity`` None: any number of operands."""

    name: str
    kind: Kind
    arity: int | None
    attributes: tuple[str, ...] = ()


def _rows(kind: Kind, arity: int, names: str) -> list[Operation]:
    return [Operation(name, kind, arity) for name in names.split()]


_TABLE = [
    Operation("input", "input", 0),
    # Known without reading memory: the same value everywhere (an int, a float or a bool), or
    # start, start + step, ... along one axis.
    Operation("constant", "constant", 0, ("value",)),
    Operation("iota", "constant", 0, ("start", "step")),
    Operation("opaque", "opaque", None, ("target",)),
    # Views.  `view` keeps the elements in row-major order, `expand` follows numpy's broadcasting,
    # `permute` puts old axis dims[i] at i, `slice` takes start, start + step, ... of one axis.
    Operation("view", "layout", 1),
    Operation("expand", "layout", 1),
    Operation("permute", "layout", 1, ("dims",)),
    Operation("slice", "layout", 1, ("dim", "start", "step")),
    # Elementwise: operands broadcast as numpy's do.  `cast` rounds to the node's dtype, `copy` only
    # changes strides.
    *_rows("light", 1, "cast copy neg abs relu sign floor ceil round trunc square"),
    *_rows("light", 1, "logical_not bitwise_not isnan isinf"),
    *_rows("light", 2, "add sub mul maximum minimum eq ne lt le gt ge"),
    *_rows("light", 2, "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"),
    *_rows("light", 3, "where"),
    *_rows("heavy", 1, "exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal"),
    *_rows("heavy", 1, "tanh sigmoid sin cos erf"),
    # Uniform in [0, 1) from one int64 seed by Philox 4x32-10, which counts elements in row-major
    # order.  `words` 8 or 4: so many numbers of each counter, of 16 or 32 bits; 1: Inductor's.
    Operation("random", "heavy", 1, ("words",)),
    # `remainder` has the sign of the divisor, `fmod` that of the dividend.
    *_rows("heavy", 2, "div pow remainder fmod"),
    # NaN wins in amax, amin, maximum and minimum, as in PyTorch.
    *[
        Operation(name, "reduce", 1, ("dims", "keepdim"))
        for name in ("sum", "prod", "amax", "amin", "any", "all")
    ],
    # (..., m, k) x (..., k, n), equal leading axes.
    Operation("dot", "dot", 2),
]

OPERATIONS: dict[str, Operation] = {row.name: row for row in _TABLE}
"""Every operator by its name."""

COMPARISONS = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "any", "all"}
    | {"logical_and", "logical_or", "logical_xor", "logical_not"}
)
"""Operators whose result is a bool, whatever they read."""

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Size of one element of every dtype that a fused kernel can read or write."""
