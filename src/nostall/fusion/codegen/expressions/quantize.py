"""Peephole rewrite of quantization (round, clamp, cast to integer): the cast does the rounding.

The conversion to an integer rounds to nearest even, too, and a clamp between integers commutes with
rounding.  So ``round`` needs no instruction.  It would be a conversion instruction, which an SM
executes at a quarter of the usual rate.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from nostall.fusion.codegen.expressions.templates import (
    TRITON_DTYPES,
    Value,
    as_tensor,
    compute_dtype,
    constant_value,
    convert,
)
from nostall.fusion.graph.graph import Graph, Node

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
