"""Random numbers as operators: Inductor's, and our own (``randomness``)."""

from __future__ import annotations

from nostall.fusion.capture.call import Call, Unfit, Value
from nostall.fusion.capture.randomness import numbers_depend_on_kernels
from nostall.fusion.capture.statistics import Rule
from nostall.fusion.graph.operations import OPERATIONS

SEEDS_TOGETHER = 2
"""Of 8 bytes each: tensors begin at multiples of 16."""


def seed(call: Call) -> Value:
    """One of the seeds that Inductor's graph draws at once, out of those whose memory begins where
    kernels suppose that tensors begin: every pair of them can be given to the same kernel."""
    drawn, at = call.tensor(0), call.argument(1, "index")
    (count,) = call.shape(drawn)
    first = at - at % SEEDS_TOGETHER
    together = min(SEEDS_TOGETHER, count - first)
    some = call.build("slice", drawn, shape=(together,), dim=0, start=first, step=1)
    one = call.build("slice", some, shape=(1,), dim=0, start=at - first, step=1)
    return call.finish("view", one)


def drawn(call: Call) -> Value:
    """The same numbers that Inductor's kernels make for these elements."""
    on_gpu = call.result.device.type == "cuda"
    if call.argument(2, "mode") != "rand" or not on_gpu or numbers_depend_on_kernels():
        raise Unfit("random numbers")
    return call.finish("random", call.build("view", call.tensor(1), shape=(1,)), words=1)


def uniform(call: Call) -> Value:
    """So many numbers of each counter as the call says."""
    words = call.argument(3, "words")
    if words not in (4, 8):
        raise Unfit("random numbers")
    return call.finish("random", call.tensor(0), words=words)


def compared(op: str) -> Rule:
    """Inductor compares its random numbers before it rounds them, so that is what is dropped."""

    def rule(call: Call) -> Value:
        places = range(OPERATIONS[op].arity or 0)
        return call.finish(op, *(_unrounded(call, call.operand(place)) for place in places))

    return rule


def _unrounded(call: Call, index: int) -> int:
    node = call.build.nodes[index]
    drawn = call.build.nodes[node.inputs[0]] if node.op == "cast" else node
    return drawn.index if drawn.op == "random" and drawn["words"] == 1 else index
