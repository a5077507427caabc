"""Masks of dropout: 16-bit random numbers compared with a number, and what is multiplied with them.

A random number of 16 bits is (h + 1/2) / 65536.  Which h pass a comparison with a number is known
when the kernel is written: all from a threshold on, or all below it.  So words of Philox are
compared as they are, and no number is made of them.
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
    """A comparison or a product of what was left to it; None of other values."""
    return half_comparison(node, operands) or scaled_product(node, operands)


# -- comparisons -----------------------------------------------------------------------------------


def is_only_compared(graph: Graph, index: int) -> bool:
    """Whether a node is a 16-bit random number that nothing reads but comparisons with numbers."""
    node, readers = graph[index], graph.users[index]
    if node.op != "random" or node["words"] != 8 or node.dtype != "float32":
        return False
    if index in graph.outputs or not readers:
        return False
    return all(
        graph[reader].op in _MIRRORED_COMPARISONS
        and any(graph[source].op == "constant" for source in graph[reader].inputs)
        for reader in readers
    )


def random_halves(operands: Sequence[Value]) -> str:
    """Such numbers as what :attr:`Value.half` names."""
    return random_call("_half", operands)


def half_value(name: str) -> Value:
    """What ``name``, where :func:`random_halves` are, is for those that read it."""
    return Value(f"_number_of({name})", "float32", half_text=name)


def half_comparison(node: Node, operands: Sequence[Value]) -> Value | None:
    """A comparison of 16-bit random numbers with a number; None of others."""
    if node.op not in _MIRRORED_COMPARISONS:
        return None
    for op, (value, other) in (
        (node.op, operands),
        (_MIRRORED_COMPARISONS[node.op], operands[::-1]),
    ):
        if value.half_text and other.number is not None:
            return Value(_comparison_text(op, value.half_text, float(other.number)), "bool")
    return None


def _comparison_text(op: str, name: str, number: float) -> str:
    if math.isnan(number):
        return f"{name} < 0"
    count, upper = count_below(number, op in ("le", "gt")), op in ("gt", "ge")
    if count == _HALF_VALUES:  # which is more than a word can be
        upper, count = not upper, 0
    return f"{name} {'>=' if upper else '<'} {count * _HALF_VALUES}"


def count_below(number: float, or_equal: bool) -> int:
    """How many of the 65,536 random numbers are less than a number rounded to fp32, or equal."""
    # All that is said here is exact: the number has 24 bits, and half of one more is added.
    place = float(np.float32(min(max(number, -1.0), 2.0))) * _HALF_VALUES
    count = math.floor(place + 0.5) if or_equal else math.ceil(place - 0.5)
    return min(max(count, 0), _HALF_VALUES)


# -- products --------------------------------------------------------------------------------------


def is_deferred_product(graph: Graph, index: int) -> bool:
    """Whether a node is a product of a mask and a float, and what reads it, once, multiplies it
    with a positive number."""
    readers = graph.users[index]
    if not _is_mask_product(graph, index) or index in graph.outputs or len(readers) != 1:
        return False
    reader = graph[readers[0]]
    numbers = [graph[i]["value"] for i in reader.inputs if graph[i].op == "constant"]
    wanted = reader.op == "mul" and compute_dtype(reader.dtype) == "float32" and len(numbers) == 1
    return wanted and _is_scale(numbers[0])


def _is_mask_product(graph: Graph, index: int) -> bool:
    node = graph[index]
    if node.op != "mul" or compute_dtype(node.dtype) != "float32":
        return False
    if any(graph[graph.base(source)].kind == "constant" for source in node.inputs):
        return False
    return sorted(graph[source].dtype == "bool" for source in node.inputs) == [False, True]


def _is_scale(number: object) -> bool:
    return isinstance(number, (int, float)) and 0 < number < math.inf


def deferred_product(operands: Sequence[Value]) -> Value:
    """What such a product is for what reads it: with k it is that of the value and k or 0."""
    mask, value = operands if operands[0].dtype == "bool" else operands[::-1]
    told, factor = convert(mask, "bool"), convert(value, "float32")
    product = f"{convert(mask, 'float32')} * {factor}"
    return Value(
        f"({product})", "float32", scaled_template=f"tl.where({told}, {{}}, 0.0) * {factor}"
    )


def scaled_product(node: Node, operands: Sequence[Value]) -> Value | None:
    """The product of a number and a value that was left to it in this loop; None of others.

    It is the same to the bit: (1 x) k and x k, (0 x) k and x 0, whatever x is.
    """
    if node.op == "mul":
        for value, number in (operands, operands[::-1]):
            if value.scaled_template and _is_scale(number.number):
                return Value(value.scaled_template.format(as_tensor(number, "float32")), "float32")
    return None
