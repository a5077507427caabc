"""In which form an operator is written: its own, or a shorter one that its neighbours allow."""

from __future__ import annotations

from collections.abc import Container, Sequence

from nostall.fusion.codegen.expressions import dropout_masks, one_plus
from nostall.fusion.codegen.expressions.quantize import rounded
from nostall.fusion.codegen.expressions.softmax import template
from nostall.fusion.codegen.expressions.templates import Value, expression
from nostall.fusion.graph.graph import Graph


def written(graph: Graph, index: int, operands: Sequence[Value], kept: Container[int]) -> Value:
    """An operator, computed from its operands.

    ``kept``: nodes that somebody reads as they are, in another kernel or loop.
    """
    node = graph[index]
    return (
        one_plus.sum_with_one(node, operands)
        or rounded(graph, index, operands, kept)
        or dropout_masks.masked(node, operands)
        or expression(node, operands, template(graph, index))
    )


def left_to_readers(
    graph: Graph, index: int, operands: Sequence[Value], kept: Container[int], name: str
) -> tuple[str, Value] | None:
    """What is written as ``name`` ("": nothing) and what the operator is for those that read it,
    where they make something shorter of it; None where it is what :func:`written` says."""
    if index in kept:
        return None
    if one_plus.is_left_to_readers(graph, index):
        return "", one_plus.left_to_readers(graph[index], operands)
    if dropout_masks.is_left_to_scale(graph, index):
        return "", dropout_masks.left_to_scale(operands)
    if dropout_masks.is_only_compared(graph, index):
        return dropout_masks.halves(operands), dropout_masks.of_halves(name)
    return None
