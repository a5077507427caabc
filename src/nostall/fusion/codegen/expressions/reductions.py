"""Templates of reductions, and the check that an operator has a template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.fusion.codegen.expressions.templates import (
    DOT_DTYPES,
    TRITON_DTYPES,
    Value,
    as_tensor,
    compute_dtype,
    constant_value,
    convert,
    expression,
)
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Node


@dataclass(frozen=True)
class Reduction:
    """Templates for the partial results of a reduction, with their dtype and neutral element."""

    node: Node
    dtype: str  # of partial results
    neutral: str  # literal that masked lanes hold
    reduce_template: str  # reduces one axis of a tensor
    combine_template: str  # combines two partial results

    def reduce(self, text: str, axis: int) -> str:
        """Reduce one axis of a tensor, which stays as an axis of size 1."""
        return self.reduce_template.format(text, axis, keep=", keep_dims=True")

    def reduce_all(self, text: str) -> str:
        """Reduce a one-dimensional tensor to a tensor of one element, through a scalar.

        All threads hold a scalar alike.  A tensor with a reduced axis would need a layout
        conversion in operations with other tensors, for which Triton 3.6 uses shared memory.
        """
        scalar = self.reduce_template.format(text, 0, keep="")
        return f"tl.full((1, 1), {scalar}, {TRITON_DTYPES[self.dtype]})"

    def combine(self, left: str, right: str) -> str:
        """Combine two partial results."""
        return self.combine_template.format(left, right)

    def to_partial(self, operand: Value) -> str:
        """Convert an operand to a partial result."""
        if self.node.op in ("any", "all"):
            operand = Value(as_tensor(operand, "bool"), "bool")
        return as_tensor(operand, self.dtype)

    def from_partial(self, text: str) -> Value:
        """Convert the final partial result to the value of the node."""
        dtype = compute_dtype(self.node.dtype)
        return Value(convert(Value(text, self.dtype), dtype), dtype)


def make_reduction(node: Node) -> Reduction:
    """The reduction of ``node``; a dot is accumulated as a sum.

    Raises :class:`BadFusion` if there is no template.
    """
    if node.kind == "dot":
        return Reduction(node, "float32", "0.0", "tl.sum({}, {}{keep})", "{} + {}")
    dtype = compute_dtype(node.dtype)
    # Triton adds and compares narrower integers in 32 bits.
    partial_dtype = dtype if dtype in ("float32", "int64") else "int32"
    if node.op in ("any", "all"):
        extreme, neutral = ("max", "0") if node.op == "any" else ("min", "1")
        reduce_template = f"tl.{extreme}({{}}, {{}}{{keep}})"
        combine_template = f"tl.{extreme}imum({{}}, {{}})"
        return Reduction(node, "int32", neutral, reduce_template, combine_template)
    if dtype == "bool":
        raise BadFusion(f"{node}: there is no {node.op} of bools; use any or all")
    if node.op == "sum":
        return Reduction(node, partial_dtype, "0", "tl.sum({}, {}{keep})", "{} + {}")
    helper = {"prod": "_mul", "amax": "_max", "amin": "_min"}[node.op]
    neutral = (
        "1" if node.op == "prod" else _extreme_literal(partial_dtype, lowest=node.op == "amax")
    )
    reduce_template = f"tl.reduce({{}}, {{}}, {helper}{{keep}})"
    return Reduction(node, partial_dtype, neutral, reduce_template, f"{helper}({{}}, {{}})")


def _extreme_literal(dtype: str, lowest: bool) -> str:
    if dtype == "float32":
        return 'float("-inf")' if lowest else 'float("inf")'
    bits = 64 if dtype == "int64" else 32
    return str(-(2 ** (bits - 1))) if lowest else str(2 ** (bits - 1) - 1)


def check_template(node: Node, operands: Sequence[Node]) -> None:
    """Raises :class:`BadFusion` if there is no template for ``node``."""
    if node.kind == "reduce":
        make_reduction(node)
        return
    if node.kind == "dot":
        if bad := [o.dtype for o in (node, *operands) if o.dtype not in DOT_DTYPES]:
            raise BadFusion(f"{node}: small dots are of {', '.join(DOT_DTYPES)}, not of {bad[0]}")
        return
    if node.op == "random":
        return
    values = [
        constant_value(o) if o.op == "constant" else Value("x", compute_dtype(o.dtype))
        for o in operands
    ]
    expression(node, values)
