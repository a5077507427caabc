"""Rounding that the conversion to an integer does, as quantisation ends: round, clamp, cast.

The conversion rounds to the nearest even number as well, and clamping between whole numbers is the
same before that and after it.  So ``round`` is no instruction of its own: it is one of those that
an SM does a quarter as many of.
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
"""What a value has to be clamped to: the conversion is one to 32 bits, of which these are left."""
_CLAMPS = {"maximum": max, "minimum": min}


def rounding_cast(
    graph: Graph, index: int, operands: Sequence[Value], kept: Container[int]
) -> Value | None:
    """A ``round`` that is left to casts, or such a cast; None of other operators.

    ``kept``: nodes that somebody reads as they are, in another kernel or loop.
    """
    node = graph[index]
    if is_deferred_round(graph, index, kept):
        return Value(convert(operands[0], "float32"), "float32")
    if node.op == "cast" and node.dtype in _INTEGER_RANGES:
        source = graph[node.inputs[0]]
        while source.op in _CLAMPS:
            source = graph[next(i for i in source.inputs if graph[i].op != "constant")]
        if is_deferred_round(graph, source.index, kept):
            text = f"_rounded({as_tensor(operands[0], 'float32')})"
            return Value(f"{text}.to({TRITON_DTYPES[node.dtype]})", node.dtype)
    return None


def is_deferred_round(graph: Graph, index: int, kept: Container[int]) -> bool:
    """Whether a node rounds floats and whatever reads it clamps them and makes them integers."""
    node = graph[index]
    everything = float("-inf"), float("inf")
    return (
        node.op == "round"
        and compute_dtype(node.dtype) == "float32"
        and _all_users_are_casts(graph, index, kept, everything)
    )


def _all_users_are_casts(
    graph: Graph, index: int, kept: Container[int], within: tuple[float, float]
) -> bool:
    if index in kept or index in graph.outputs:
        return False
    readers = [graph[reader] for reader in graph.users[index]]
    return bool(readers) and all(_accepts_unrounded(graph, one, kept, within) for one in readers)


def _accepts_unrounded(
    graph: Graph, reader: Node, kept: Container[int], within: tuple[float, float]
) -> bool:
    """Whether a reader of values that lie ``within`` two whole numbers may get them unrounded."""
    least, most = within
    if reader.op == "cast" and reader.dtype in _INTEGER_RANGES:
        lowest, highest = _INTEGER_RANGES[reader.dtype]
        return lowest <= least and most <= highest
    bounds = [constant_value(graph[i]).number for i in reader.inputs if graph[i].op == "constant"]
    if reader.op not in _CLAMPS or compute_dtype(reader.dtype) != "float32" or len(bounds) != 1:
        return False
    bound, clamped = float(bounds[0] or 0.0), _CLAMPS[reader.op]
    if not bound.is_integer():
        return False
    within = clamped(least, bound), clamped(most, bound)
    return _all_users_are_casts(graph, reader.index, kept, within)
