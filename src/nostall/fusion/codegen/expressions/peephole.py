"""Peephole rewrites: an operator and its users in a shorter form than one by one.

A node is *deferred* if its users take over its computation; the kernel has no variable with its own
value then.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from nostall.fusion.codegen.expressions import dropout_masks, one_plus
from nostall.fusion.codegen.expressions.quantize import rounding_cast
from nostall.fusion.codegen.expressions.softmax import softmax_template
from nostall.fusion.codegen.expressions.templates import Value, expression
from nostall.fusion.graph.graph import Graph


def operator_value(
    graph: Graph, index: int, operands: Sequence[Value], materialized: Container[int]
) -> Value:
    """The expression of an operator.

    ``materialized``: nodes whose exact value another kernel or loop reads.
    """
    node = graph[index]
    return (
        one_plus.add_one(node, operands)
        or rounding_cast(graph, index, operands, materialized)
        or dropout_masks.mask_expression(node, operands)
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
    if one_plus.is_deferred(graph, index):
        return "", one_plus.deferred_value(graph[index], operands)
    if dropout_masks.is_deferred_product(graph, index):
        return "", dropout_masks.deferred_product(operands)
    if dropout_masks.is_only_compared(graph, index):
        return dropout_masks.random_halves(operands), dropout_masks.half_value(name)
    return None
