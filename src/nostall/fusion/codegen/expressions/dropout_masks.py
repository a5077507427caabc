"""Peephole rewrites for dropout: masks from integer comparisons, and mask and scale as one product.

A 16-bit random number is (h + 1/2) / 65536 for a 16-bit integer h.  The h that pass a comparison
with a constant are known at code generation: all from a threshold on, or all below it.  So the
kernel compares the Philox words as integers and converts none of them to a float.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nostall.fusion.codegen.expressions.templates import (
    Value,
    as_tensor,
    compute_dtype,
    convert,
    random_call,
)
from nostall.fusion.graph.graph import Graph, Node

_HALF_VALUES = 2**16
_MIRRORED_COMPARISONS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def mask_expression(node: Node, operands: Sequence[Value]) -> Value | None:
    """A comparison or product that consumes a deferred operand; None for other operators."""
    return half_comparison(node, operands) or scaled_product(node, operands)


# -- comparisons -----------------------------------------------------------------------------------


def is_only_compared(graph: Graph, index: int) -> bool:
    """Whether a node is a 16-bit random number with no users but comparisons with constants."""
    node, users = graph[index], graph.users[index]
    if node.op != "random" or node["words"] != 8 or node.dtype != "float32":
        return False
    if index in graph.outputs or not users:
        return False
    return all(
        graph[user].op in _MIRRORED_COMPARISONS
        and any(graph[source].op == "constant" for source in graph[user].inputs)
        for user in users
    )


def random_halves(operands: Sequence[Value]) -> str:
    """The call that computes 32-bit words whose upper halves are the random integers h."""
    return random_call("_half", operands)


def half_value(name: str) -> Value:
    """The value of a 16-bit random number; variable ``name`` holds :func:`random_halves`."""
    return Value(f"_number_of({name})", "float32", half_text=name)


def half_comparison(node: Node, operands: Sequence[Value]) -> Value | None:
    """A comparison of a 16-bit random number with a constant; None for other operators."""
    if node.op not in _MIRRORED_COMPARISONS:
        return None
    for op, (value, limit) in (
        (node.op, operands),
        (_MIRRORED_COMPARISONS[node.op], operands[::-1]),
    ):
        if value.half_text and limit.number is not None:
            return Value(_comparison_text(op, value.half_text, float(limit.number)), "bool")
    return None


def _comparison_text(op: str, name: str, limit: float) -> str:
    if math.isnan(limit):
        return f"{name} < 0"  # always false: words are unsigned
    count, is_lower_bound = count_below(limit, op in ("le", "gt")), op in ("gt", "ge")
    if count == _HALF_VALUES:  # the threshold would be 2**32, which no 32-bit literal holds
        is_lower_bound, count = not is_lower_bound, 0
    return f"{name} {'>=' if is_lower_bound else '<'} {count * _HALF_VALUES}"


def count_below(number: float, or_equal: bool) -> int:
    """Number of the 65,536 random numbers that are below ``number`` rounded to fp32.

    ``or_equal`` counts numbers that are equal to it, too.
    """
    # Exact in fp64: an fp32 number has 24 significant bits.
    scaled = float(np.float32(min(max(number, -1.0), 2.0))) * _HALF_VALUES
    count = math.floor(scaled + 0.5) if or_equal else math.ceil(scaled - 0.5)
    return min(max(count, 0), _HALF_VALUES)


# -- products --------------------------------------------------------------------------------------


def is_deferred_product(graph: Graph, index: int) -> bool:
    """Whether a node is mask * float and its only user multiplies it with a positive constant."""
    users = graph.users[index]
    if not _is_mask_product(graph, index) or index in graph.outputs or len(users) != 1:
        return False
    user = graph[users[0]]
    constants = [graph[i]["value"] for i in user.inputs if graph[i].op == "constant"]
    is_scaling = user.op == "mul" and compute_dtype(user.dtype) == "float32" and len(constants) == 1
    return is_scaling and _is_scale(constants[0])


def _is_mask_product(graph: Graph, index: int) -> bool:
    node = graph[index]
    if node.op != "mul" or compute_dtype(node.dtype) != "float32":
        return False
    if any(graph[graph.base(source)].kind == "constant" for source in node.inputs):
        return False
    return sorted(graph[source].dtype == "bool" for source in node.inputs) == [False, True]


def _is_scale(number: object) -> bool:
    """Whether a number is positive and finite."""
    return isinstance(number, (int, float)) and 0 < number < math.inf


def deferred_product(operands: Sequence[Value]) -> Value:
    """The value mask * x, with a template for its product with a constant k: (k or 0) * x."""
    mask, value = operands if operands[0].dtype == "bool" else operands[::-1]
    condition, factor = convert(mask, "bool"), convert(value, "float32")
    product = f"{convert(mask, 'float32')} * {factor}"
    return Value(
        f"({product})", "float32", scaled_template=f"tl.where({condition}, {{}}, 0.0) * {factor}"
    )


def scaled_product(node: Node, operands: Sequence[Value]) -> Value | None:
    """The product of a constant k and a deferred mask * x; None for other operators.

    It is bit-identical for every x: (1 * x) * k = x * k, and (0 * x) * k = x * 0.
    """
    if node.op == "mul":
        for value, number in (operands, operands[::-1]):
            if value.scaled_template and _is_scale(number.number):
                return Value(value.scaled_template.format(as_tensor(number, "float32")), "float32")
    return None
