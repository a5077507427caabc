"""Lowering rules for random numbers: those of Inductor's graphs and of ``nostall::uniform``."""

from __future__ import annotations

import torch
from torch.fx import Node

from nostall.fusion.capture.call import Call, Unsupported, Value, dtype_name
from nostall.fusion.capture.randomness import numbers_depend_on_kernels
from nostall.fusion.capture.reduction_rules import Rule
from nostall.fusion.graph.operations import OPERATIONS

ALIGNED_SEEDS = 2
"""Seeds (8 bytes each) in 16 bytes: kernels assume that tensors start at multiples of 16 bytes."""


def inductor_seed(call: Call) -> Value:
    """Lower ``inductor_lookup_seed``: one of the seeds that Inductor draws for the whole graph.

    The seed is lowered as an element of a pair that starts at a multiple of 16 bytes. Each pair has
    the alignment that kernels assume, so any pair can be the input of the same kernel.
    """
    seeds, index = call.tensor(0), call.argument(1, "index")
    (count,) = call.shape(seeds)
    first = index - index % ALIGNED_SEEDS
    size = min(ALIGNED_SEEDS, count - first)
    pair = call.build("slice", seeds, shape=(size,), dim=0, start=first, step=1)
    seed = call.build("slice", pair, shape=(1,), dim=0, start=index - first, step=1)
    return call.finish("view", seed)


def inductor_random(call: Call) -> Value:
    """Lower ``inductor_random`` to the numbers that Inductor's own kernels make."""
    on_gpu = call.result.device.type == "cuda"
    if call.argument(2, "mode") != "rand" or not on_gpu or numbers_depend_on_kernels():
        raise Unsupported("random numbers")
    return call.finish("random", call.build("view", call.tensor(1), shape=(1,)), words=1)


def uniform(call: Call) -> Value:
    """Lower ``nostall::uniform``: 4 or 8 numbers from each counter value of Philox."""
    words = call.argument(3, "words")
    if words not in (4, 8):
        raise Unsupported("random numbers")
    return call.finish("random", call.tensor(0), words=words)


def comparison(op: str) -> Rule:
    """The rule of a comparison: of values in their common dtype, rounded to it.

    It reads Inductor's random numbers without their rounding: Inductor's kernels compare random
    numbers in fp32, before the cast to the program's dtype.
    """

    def rule(call: Call) -> Value:
        places = range(OPERATIONS[op].arity or 0)
        unrounded = [_unrounded(call, call.operand(place)) for place in places]
        if any(call.build.nodes[index].op == "random" for index in unrounded):
            return call.finish(op, *unrounded)
        common = _common_dtype(call, len(places))
        rounded = (call.rounded(call.rounded_operand(place)) for place in places)
        return call.finish(op, *(call.rounded_to(index, common) for index in rounded))

    return rule


def _common_dtype(call: Call, operands: int) -> str:
    """The dtype in which ATen compares the operands."""
    values = [x.meta["val"] if isinstance(x, Node) else x for x in call.node.args[:operands]]
    return dtype_name(torch.result_type(*values)) if operands == 2 else ""


def _unrounded(call: Call, index: int) -> int:
    """The random number that a cast rounds, if ``index`` is a cast of one of Inductor's."""
    node = call.build.nodes[index]
    source = call.build.nodes[node.inputs[0]] if node.op == "cast" else node
    return source.index if source.op == "random" and source["words"] == 1 else index
