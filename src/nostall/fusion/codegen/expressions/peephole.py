"""In which form an operator is written: its own, or a shorter one that its neighbours allow."""

from __future__ import annotations

from collections.abc import Container, Sequence

from nostall.fusion.codegen.expressions import dropout_masks, one_plus
from nostall.fusion.codegen.expressions.quantize import rounding_cast
from nostall.fusion.codegen.expressions.softmax import softmax_template
from nostall.fusion.codegen.expressions.templates import Value, expression
from nostall.fusion.graph.graph import Graph


def operator_value(
    graph: Graph, index: int, operands: Sequence[Value], kept: Container[int]
) -> Value:
    """An operator, computed from its operands.

    ``kept``: nodes that somebody reads as they are, in another kernel or loop.
    """
    node = graph[index]
    return (
        one_plus.add_one(node, operands)
        or rounding_cast(graph, index, operands, kept)
        or dropout_masks.mask_expression(node, operands)
        or expression(node, operands, softmax_template(graph, index))
    )


def deferred_value(
    graph: Graph, index: int, operands: Sequence[Value], kept: Container[int], name: str
) -> tuple[str, Value] | None:
    """What is written as ``name`` ("": nothing) and what the operator is for those that read it,
    where they make something shorter of it; None where it is what :func:`operator_value` says."""
    if index in kept:
        return None
    if one_plus.is_deferred(graph, index):
        return "", one_plus.deferred_value(graph[index], operands)
    if dropout_masks.is_deferred_product(graph, index):
        return "", dropout_masks.deferred_product(operands)
    if dropout_masks.is_only_compared(graph, index):
        return dropout_masks.random_halves(operands), dropout_masks.half_value(name)
    return None
