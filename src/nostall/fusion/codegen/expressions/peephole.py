"""Peephole rewrites: an operator and its users in a shorter form than one by one.

A node is *deferred* if its users take over its computation; the kernel has no variable with its own
value then.

The rewrite of 1 + tanh(x) and 1 + erf(x), which both forms of GELU have, to one function.

Both sums are 2 / (1 + exp(-y)): with y = 2x for tanh (exact), and with a fitted odd y(x) for erf.
So the function needs no case distinction near 0 and no clamp.  If the sum is nearly 0, the tanh
form keeps the digits that an addition would cancel; the erf form is about as accurate as an
addition.

The rewrite of quantization (round, clamp, cast to integer): the cast does the rounding.

The conversion to an integer rounds to nearest even, too, and a clamp between integers commutes with
rounding.  So ``round`` needs no instruction.  It would be a conversion instruction, which an SM
executes at a quarter of the usual rate.

The rewrites for dropout: masks from integer comparisons, and mask and scale as one product.

A 16-bit random number is (h + 1/2) / 65536 for a 16-bit integer h.  The h that pass a comparison
with a constant are known at code generation: all from a threshold on, or all below it.  So the
kernel compares the Philox words as integers and converts none of them to a float.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from nostall.fusion.codegen.expressions.softmax import softmax_template
from nostall.fusion.codegen.expressions.templates import (
    TRITON_DTYPES,
    Value,
    as_tensor,
    compute_dtype,
    constant_value,
    convert,
    expression,
    random_call,
)
from nostall.fusion.graph.graph import Graph, Node

_ONE_PLUS_TEMPLATES = {"tanh": "_tanh_plus_1({})", "erf": "_erf_plus_1({})"}


def is_deferred_term(graph: Graph, index: int) -> bool:
    """Whether a node is tanh or erf and all its users add 1.

    If another user needs the function itself (tanh's derivative needs its square), the kernel
    computes it anyway, and adding 1 to it is cheapest.
    """
    users = graph.users[index]
    has_rewrite = (
        graph[index].op in _ONE_PLUS_TEMPLATES and index not in graph.outputs and bool(users)
    )
    return has_rewrite and all(_adds_one(graph, user) for user in users)


def _adds_one(graph: Graph, index: int) -> bool:
    node = graph[index]
    ones = [i for i in node.inputs if graph[i].op == "constant" and graph[i]["value"] == 1]
    return node.op == "add" and compute_dtype(node.dtype) == "float32" and len(ones) == 1


def deferred_term(node: Node, operands: Sequence[Value]) -> Value:
    """The value of a deferred node: its own text, and the text of 1 + the value."""
    text = _ONE_PLUS_TEMPLATES[node.op].format(as_tensor(operands[0], "float32"))
    return replace(expression(node, operands), plus_one=text)


def add_one(node: Node, operands: Sequence[Value]) -> Value | None:
    """The sum of 1 and a deferred value; None for other operators."""
    if node.op == "add":
        for value, constant in (operands, operands[::-1]):
            if value.plus_one and constant.number == 1:
                return Value(value.plus_one, "float32")
    return None


_INTEGER_RANGES = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767)}
"""The range that a value has to be clamped to before the cast.

The conversion yields 32 bits and the cast truncates them to the width of the type.
"""
_CLAMPS = {"maximum": max, "minimum": min}


def rounding_cast(
    graph: Graph, index: int, operands: Sequence[Value], materialized: Container[int]
) -> Value | None:
    """The value of a deferred ``round`` or of a cast that rounds; None for other operators.

    ``materialized``: nodes whose exact value another kernel or loop reads.
    """
    node = graph[index]
    if is_deferred_round(graph, index, materialized):
        return Value(convert(operands[0], "float32"), "float32")
    if node.op == "cast" and node.dtype in _INTEGER_RANGES:
        source = graph[node.inputs[0]]
        while source.op in _CLAMPS:
            source = graph[next(i for i in source.inputs if graph[i].op != "constant")]
        if is_deferred_round(graph, source.index, materialized):
            text = f"_rounded({as_tensor(operands[0], 'float32')})"
            return Value(f"{text}.to({TRITON_DTYPES[node.dtype]})", node.dtype)
    return None


def is_deferred_round(graph: Graph, index: int, materialized: Container[int]) -> bool:
    """Whether a node rounds floats and all its users clamp them and cast them to integers."""
    node = graph[index]
    unbounded = float("-inf"), float("inf")
    return (
        node.op == "round"
        and compute_dtype(node.dtype) == "float32"
        and _all_users_are_casts(graph, index, materialized, unbounded)
    )


def _all_users_are_casts(
    graph: Graph, index: int, materialized: Container[int], bounds: tuple[float, float]
) -> bool:
    """Whether all users of a node with values in ``bounds`` are casts, directly or after clamps."""
    if index in materialized or index in graph.outputs:
        return False
    users = [graph[user] for user in graph.users[index]]
    return bool(users) and all(
        _accepts_unrounded(graph, user, materialized, bounds) for user in users
    )


def _accepts_unrounded(
    graph: Graph, user: Node, materialized: Container[int], bounds: tuple[float, float]
) -> bool:
    """Whether a user of values in ``bounds`` gives the same result without rounding.

    ``bounds`` are integers or infinite.
    """
    lower, upper = bounds
    if user.op == "cast" and user.dtype in _INTEGER_RANGES:
        type_min, type_max = _INTEGER_RANGES[user.dtype]
        return type_min <= lower and upper <= type_max
    limits = [constant_value(graph[i]).number for i in user.inputs if graph[i].op == "constant"]
    if user.op not in _CLAMPS or compute_dtype(user.dtype) != "float32" or len(limits) != 1:
        return False
    limit, clamp = float(limits[0] or 0.0), _CLAMPS[user.op]
    if not limit.is_integer():
        return False
    bounds = clamp(lower, limit), clamp(upper, limit)
    return _all_users_are_casts(graph, user.index, materialized, bounds)


_HALF_VALUES = 2**16
_MIRRORED_COMPARISONS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


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


def half_value(name: str) -> Value:
    """The value of a 16-bit random number; the upper halves of the words in ``name`` are h."""
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


def operator_value(
    graph: Graph, index: int, operands: Sequence[Value], materialized: Container[int]
) -> Value:
    """The expression of an operator.

    ``materialized``: nodes whose exact value another kernel or loop reads.
    """
    node = graph[index]
    return (
        add_one(node, operands)
        or rounding_cast(graph, index, operands, materialized)
        or half_comparison(node, operands)
        or scaled_product(node, operands)
        or expression(node, operands, softmax_template(graph, index))
    )


def deferred_value(
    graph: Graph, index: int, operands: Sequence[Value], materialized: Container[int], name: str
) -> tuple[str, Value] | None:
    """Code of a deferred operator: the text to assign to ``name``, and the value for users.

    The text is "" if nothing is to be assigned.  None if the operator is not deferred; then
    :func:`operator_value` is its value.
    """
    if index in materialized:
        return None
    if is_deferred_term(graph, index):
        return "", deferred_term(graph[index], operands)
    if is_deferred_product(graph, index):
        return "", deferred_product(operands)
    if is_only_compared(graph, index):
        return random_call("_half", operands), half_value(name)
    return None
