"""Table of the operators that nostall can fuse: name, kind, number of operands, attributes.

The names are nostall's own. Capture lowers ATen calls to them; the code generator and the reference
interpreter have one template for each. The kinds are those of FusionStitching (arXiv:2009.10924):
light and heavy elementwise operators, reductions, and the small batched dots of arXiv:1911.11576.
Layout operators are views in PyTorch. They move no bytes, so each kernel that needs one repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["input", "constant", "layout", "light", "heavy", "reduce", "dot", "opaque"]
Attribute = int | float | bool | str | tuple[int, ...]

ELEMENTWISE: frozenset[Kind] = frozenset({"light", "heavy"})
COMPUTE: frozenset[Kind] = frozenset({"light", "heavy", "reduce", "dot"})
"""Kinds of the operators that kernels compute. Other nodes are read, are free, or are opaque."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the table."""

    name: str
    kind: Kind
    arity: int | None
    """Number of operands; None allows any number."""
    attributes: tuple[str, ...] = ()
    """Names of the attributes that a node of this operation has."""


def _rows(kind: Kind, arity: int, names: str) -> list[Operation]:
    return [Operation(name, kind, arity) for name in names.split()]


_TABLE = [
    Operation("input", "input", 0),
    # Known without reading memory: one value for all elements (an int, a float or a bool), or
    # start, start + step, ... along one axis.
    Operation("constant", "constant", 0, ("value",)),
    Operation("iota", "constant", 0, ("start", "step")),
    Operation("opaque", "opaque", None, ("target",)),
    # Views. `view` keeps the elements in row-major order, `expand` broadcasts as in numpy,
    # `permute` puts old axis dims[i] at i, `slice` takes start, start + step, ... of one axis.
    Operation("view", "layout", 1),
    Operation("expand", "layout", 1),
    Operation("permute", "layout", 1, ("dims",)),
    Operation("slice", "layout", 1, ("dim", "start", "step")),
    # Elementwise: operands broadcast as in numpy. `cast` rounds to the node's dtype; `copy` changes
    # nothing but the strides.
    *_rows("light", 1, "cast copy neg abs relu sign floor ceil round trunc square"),
    # The integer operand, which must be in [0, size): a kernel stops the process if it is not.
    Operation("checked_index", "light", 1, ("size",)),
    *_rows("light", 1, "logical_not bitwise_not isnan isinf"),
    *_rows("light", 2, "add sub mul maximum minimum eq ne lt le gt ge"),
    *_rows("light", 2, "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"),
    *_rows("light", 2, "bitwise_left_shift bitwise_right_shift"),
    *_rows("light", 3, "where"),
    *_rows("heavy", 1, "exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal"),
    *_rows("heavy", 1, "tanh sigmoid sin cos erf"),
    *_rows("heavy", 1, "acos acosh asin asinh atan atanh cosh sinh tan log10 erfc lgamma"),
    *_rows("heavy", 2, "atan2 hypot copysign"),
    # Uniform numbers in [0, 1) from one int64 seed by Philox 4x32-10; the counter follows the
    # row-major order of elements. `words` is the count of numbers made from each counter value:
    # 4 of 32 bits, 8 of 16 bits, or 1 of 32 bits (as Inductor's kernels do).
    Operation("random", "heavy", 1, ("words",)),
    # `remainder` has the sign of the divisor, `fmod` that of the dividend.
    *_rows("heavy", 2, "div pow remainder fmod"),
    # amax, amin, maximum and minimum return NaN if an operand is NaN, as in PyTorch.
    *[
        Operation(name, "reduce", 1, ("dims", "keepdim"))
        for name in ("sum", "prod", "amax", "amin", "any", "all")
    ],
    # (..., m, k) x (..., k, n), equal leading axes.
    Operation("dot", "dot", 2),
]

OPERATIONS: dict[str, Operation] = {row.name: row for row in _TABLE}
"""The table's rows by operator name."""

COMPARISONS = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "any", "all"}
    | {"logical_and", "logical_or", "logical_xor", "logical_not"}
)
"""Operators whose result is bool for operands of any dtype."""

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
"""Bytes of one element, for each dtype that a fused kernel can read or write."""
