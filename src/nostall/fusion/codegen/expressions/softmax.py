"""Softmax, operator by operator: a maximum taken away, exp of that, its share of their sum.

What is known of these values allows for shorter forms than their operators alone have.
"""

from __future__ import annotations

import math

from nostall.fusion.graph.graph import Graph, Node

SUBTRACT = "libdevice.sub_rn({}, {})"
"""A difference that does not become one operation (FMA) with a product before it: the largest x
less itself has to be 0.  Of a product x = a b an FMA would give a b less its own rounding instead,
which for large numbers is anything."""
EXP = "libdevice.fast_expf({})"
"""exp without subnormals: what is below 2**-126 is 0, which beside the maximum's 1 is nothing.
In sm_90 code these are two instructions, ``tl.exp`` is five."""
NORMALIZE = "{} * (1.0 / {})"
"""A share of a sum that is at least 1 and at most the number of columns, with one reciprocal for a
row: off by 2.5 units in the last place at most, Triton's division by 2."""


def softmax_template(graph: Graph, index: int) -> str | None:
    """How a float operator of a softmax is written; None where it is none."""
    node = graph[index]
    if node.op == "sub" and _subtracted_extreme(graph, node, ("amax", "amin")) is not None:
        return SUBTRACT
    if node.op == "exp" and _softmax_maximum(graph, node) is not None:
        return EXP
    if node.op == "div" and _is_normalization(graph, node):
        return NORMALIZE
    return None


def _subtracted_extreme(graph: Graph, difference: Node, extremes: tuple[str, ...]) -> Node | None:
    """The maximum or minimum that is subtracted; None where something else is."""
    taken = graph[graph.base(difference.inputs[1])]
    if taken.op == "where":  # as logsumexp guards it
        taken = graph[graph.base(taken.inputs[-1])]
    return taken if taken.op in extremes else None


def _softmax_maximum(graph: Graph, power: Node) -> Node | None:
    """The m of exp(x - m), or of exp(x - m - log(sum)) as a log-softmax has it, where m is the
    maximum of the same x in the same row; None elsewhere."""
    difference = graph[power.inputs[0]]
    if difference.op == "sub" and _is_log_of_sum(graph, *difference.inputs):
        difference = graph[difference.inputs[0]]
    if difference.op != "sub":
        return None
    found = _subtracted_extreme(graph, difference, ("amax",))
    if found is None or found.inputs[0] != difference.inputs[0]:
        return None
    return found if _is_row_result(graph, difference.inputs[1], found) else None


def _is_log_of_sum(graph: Graph, difference: int, taken: int) -> bool:
    """Whether ``taken`` is log(sum(exp(difference)))."""
    log = graph[graph.base(taken)]
    if log.op != "log":
        return False
    total = graph[graph.base(log.inputs[0])]
    power = graph[total.inputs[0]] if total.op == "sum" else total
    return power.op == "exp" and power.inputs[0] == difference


def _is_normalization(graph: Graph, quotient: Node) -> bool:
    """Whether shares are divided by their sum, with the maximum's 1 among them."""
    power, total = graph[quotient.inputs[0]], graph[graph.base(quotient.inputs[1])]
    if power.op != "exp" or total.op != "sum" or total.inputs[0] != power.index:
        return False
    found = _softmax_maximum(graph, power)
    if found is None or graph[power.inputs[0]].inputs[0] != found.inputs[0]:
        return False
    return total.dims == found.dims and _is_row_result(graph, quotient.inputs[1], total)


def _is_row_result(graph: Graph, index: int, reduced: Node) -> bool:
    """Whether an operand is the result of a reduction, where its row is: along axes of 1."""
    whole = graph[reduced.inputs[0]].shape
    kept = tuple(1 if axis in reduced.dims else size for axis, size in enumerate(whole))
    gone = tuple(size for axis, size in enumerate(whole) if axis not in reduced.dims)
    while graph[index].op == "expand":
        index = graph[index].inputs[0]
    if graph[index].shape != kept:
        return False
    while index != reduced.index:
        node = graph[index]
        is_it = node.op == "view" or (node.op == "where" and _is_infinity_guard(graph, node))
        if not is_it or node.shape not in (kept, gone):
            return False
        index = node.inputs[-1]
    return True


def _is_infinity_guard(graph: Graph, chosen: Node) -> bool:
    """Whether a value is where(it is infinite, 0, it)."""
    told, zero, value = (graph[index] for index in chosen.inputs)
    if zero.op != "constant" or zero["value"] != 0:
        return False
    if told.op == "eq":
        size, limit = (graph[index] for index in told.inputs)
        is_size = size.op == "abs" and size.inputs[0] == value.index
        return is_size and limit.op == "constant" and limit["value"] == math.inf
    return told.op == "isinf" and told.inputs[0] == value.index
