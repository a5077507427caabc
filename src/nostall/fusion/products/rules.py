"""Which matrix products of a captured graph one kernel may compute: a table of rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node as FxNode

from nostall.fusion.codegen.tiling.product_config import DTYPE_BYTES
from nostall.fusion.graph.graph import MAX_ELEMENTS
from nostall.fusion.graph.shapes import span
from nostall.fusion.products.precision import allows_tf32

ADDED, PLAIN = "aten.addmm.default", "aten.mm.default"
"""The ATen calls that are products: with a tensor that is added to the sums, and without."""


@dataclass(frozen=True)
class ProductCall:
    """An ATen call of a product, with its operands in the FX graph."""

    node: FxNode
    left: FxNode
    right: FxNode
    added: FxNode | None
    """The tensor that is added to the sums before they are rounded."""

    @property
    def operands(self) -> tuple[FxNode, ...]:
        return (self.left, self.right, *((self.added,) if self.added is not None else ()))

    @property
    def values(self) -> list[Any]:
        """The fake tensors of the result and the operands."""
        return [node.meta["val"] for node in (self.node, *self.operands)]


def product_call(node: FxNode) -> ProductCall | None:
    """The product that a node computes; None for other nodes."""
    target = str(node.target)
    if node.op != "call_function" or target not in (ADDED, PLAIN):
        return None
    if target == PLAIN:
        return ProductCall(node, node.args[0], node.args[1], None)
    return ProductCall(node, node.args[1], node.args[2], node.args[0])


def _is_static(call: ProductCall) -> bool:
    values = call.values
    return all(isinstance(n, int) for v in values for n in (*v.shape, *v.stride()))


def _is_unscaled(call: ProductCall) -> bool:
    return all(call.node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))


def _has_one_dtype(call: ProductCall) -> bool:
    return len({value.dtype for value in call.values}) == 1


def _dtype(call: ProductCall) -> str:
    return str(call.left.meta["val"].dtype).removeprefix("torch.")


def _is_countable(call: ProductCall) -> bool:
    return all(
        0 < math.prod(v.shape) <= MAX_ELEMENTS and span(v.shape, v.stride()) <= MAX_ELEMENTS
        for v in call.values
    )


RULES: Sequence[tuple[Callable[[ProductCall], bool], str]] = (
    (_is_static, "a product of a dynamic size"),
    (_is_unscaled, "addmm with alpha or beta other than 1"),
    (_has_one_dtype, "operands of several dtypes"),
    (lambda call: _dtype(call) in DTYPE_BYTES, "a dtype other than bf16, fp16 and fp32"),
    (
        lambda call: _dtype(call) != "float32" or allows_tf32(),
        "a product in fp32, for which PyTorch's flags do not allow TF32",
    ),
    (_is_countable, "no elements, or more than 2^31 - 1"),
    (
        lambda call: min(call.node.meta["val"].shape) > 1,
        "a product of a matrix and a vector, which waits for memory alone",
    ),
)
"""What must hold of a product alone, and the reason against it if it does not."""

NO_READER = "no elementwise operator reads the product at its own elements"
PART = "elementwise operators read parts of the product, or its elements in another order"
CHANGED = "an operand is changed in place"
INSIDE_CALL = "a value inside of one ATen call crosses the border of the kernel"
"""Reasons that depend on the readers of a product."""


def refusal(call: ProductCall) -> str | None:
    """The first reason against a product alone; None if there is none."""
    return next((reason for holds, reason in RULES if not holds(call)), None)
