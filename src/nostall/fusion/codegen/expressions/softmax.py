"""Recognition of softmax operators (x - max, exp, division by the sum), and cheaper forms for them.

The known ranges of these values allow forms that are shorter than those of the operators alone.
"""

from __future__ import annotations

import math

from nostall.fusion.graph.graph import Graph, Node

SUBTRACT = "libdevice.sub_rn({}, {})"
"""A subtraction that the compiler cannot contract to an FMA with a product before it.

The maximum minus itself has to be 0.  If x is a product a * b, an FMA would yield the rounding
error of a * b instead, which can be arbitrarily large for large numbers.
"""
EXP = "libdevice.fast_expf({})"
"""exp that flushes results below 2**-126 to 0; they do not matter in a sum with exp(0) = 1.

It takes two instructions in sm_90 code; ``tl.exp`` takes five.
"""
NORMALIZE = "{} * (1.0 / {})"
"""Division by the sum with one reciprocal for each row.

The sum is between 1 and the number of columns.  The error is at most 2.5 units in the last place;
that of Triton's division is at most 2.
"""


def softmax_template(graph: Graph, index: int) -> str | None:
    """The template of a float operator of a softmax; None for other operators."""
    node = graph[index]
    if node.op == "sub" and _subtracted_extreme(graph, node, ("amax", "amin")) is not None:
        return SUBTRACT
    if node.op == "exp" and _softmax_maximum(graph, node) is not None:
        return EXP
    if node.op == "div" and _is_normalization(graph, node):
        return NORMALIZE
    return None


def _subtracted_extreme(graph: Graph, difference: Node, extremes: tuple[str, ...]) -> Node | None:
    """The maximum or minimum that is subtracted; None if another value is."""
    subtrahend = graph[graph.base(difference.inputs[1])]
    if subtrahend.op == "where":  # the infinity guard of logsumexp
        subtrahend = graph[graph.base(subtrahend.inputs[-1])]
    return subtrahend if subtrahend.op in extremes else None


def _softmax_maximum(graph: Graph, exponential: Node) -> Node | None:
    """The m of exp(x - m) or exp(x - m - log(sum)), if m is the maximum of x in the same row.

    The second form is that of a log-softmax.  None for other operators.
    """
    difference = graph[exponential.inputs[0]]
    if difference.op == "sub" and _is_log_of_sum(graph, *difference.inputs):
        difference = graph[difference.inputs[0]]
    if difference.op != "sub":
        return None
    maximum = _subtracted_extreme(graph, difference, ("amax",))
    if maximum is None or maximum.inputs[0] != difference.inputs[0]:
        return None
    return maximum if _is_row_result(graph, difference.inputs[1], maximum) else None


def _is_log_of_sum(graph: Graph, difference: int, subtrahend: int) -> bool:
    """Whether ``subtrahend`` is log(sum(exp(difference)))."""
    log = graph[graph.base(subtrahend)]
    if log.op != "log":
        return False
    total = graph[graph.base(log.inputs[0])]
    exponential = graph[total.inputs[0]] if total.op == "sum" else total
    return exponential.op == "exp" and exponential.inputs[0] == difference


def _is_normalization(graph: Graph, quotient: Node) -> bool:
    """Whether a quotient is exp(x - max) / sum(exp(x - max)), so the sum is at least 1."""
    exponential, total = graph[quotient.inputs[0]], graph[graph.base(quotient.inputs[1])]
    if exponential.op != "exp" or total.op != "sum" or total.inputs[0] != exponential.index:
        return False
    maximum = _softmax_maximum(graph, exponential)
    if maximum is None or graph[exponential.inputs[0]].inputs[0] != maximum.inputs[0]:
        return False
    return total.dims == maximum.dims and _is_row_result(graph, quotient.inputs[1], total)


def _is_row_result(graph: Graph, index: int, reduced: Node) -> bool:
    """Whether node ``index`` is the result of reduction ``reduced``, broadcast along its own row.

    Views that add or drop axes of size 1, expansions and infinity guards may be in between.
    """
    input_shape = graph[reduced.inputs[0]].shape
    keepdim_shape = tuple(
        1 if axis in reduced.dims else size for axis, size in enumerate(input_shape)
    )
    reduced_shape = tuple(size for axis, size in enumerate(input_shape) if axis not in reduced.dims)
    while graph[index].op == "expand":
        index = graph[index].inputs[0]
    if graph[index].shape != keepdim_shape:
        return False
    while index != reduced.index:
        node = graph[index]
        passes_row = node.op == "view" or (node.op == "where" and _is_infinity_guard(graph, node))
        if not passes_row or node.shape not in (keepdim_shape, reduced_shape):
            return False
        index = node.inputs[-1]
    return True


def _is_infinity_guard(graph: Graph, node: Node) -> bool:
    """Whether a ``where`` is where(isinf(x), 0, x)."""
    condition, zero, value = (graph[index] for index in node.inputs)
    if zero.op != "constant" or zero["value"] != 0:
        return False
    if condition.op == "eq":
        magnitude, limit = (graph[index] for index in condition.inputs)
        is_magnitude = magnitude.op == "abs" and magnitude.inputs[0] == value.index
        return is_magnitude and limit.op == "constant" and limit["value"] == math.inf
    return condition.op == "isinf" and condition.inputs[0] == value.index
