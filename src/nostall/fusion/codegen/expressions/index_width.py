"""Counters (``iota``): their values follow from their places, and so does how wide they have to be.

PyTorch's counters and indices have 64 bits, which a GPU compares half by half, element by element.
"""

from __future__ import annotations

from nostall.fusion.codegen.expressions.templates import Value
from nostall.fusion.graph.graph import Node

MIN_INT32, MAX_INT32 = -(2**31), 2**31 - 1
"""The ends of int32: what lies beyond is put there, so no counter may be one of them."""


def counter_text(node: Node, count: str) -> str:
    """The value of a counter, from how many steps it has made."""
    start, step = node["start"], node["step"]
    text = count if step == 1 else f"({count} * {step})"
    return text if start == 0 else f"({start} + {text})"


def fits_int32(node: Node, varies: bool) -> bool:
    """Whether all values of a counter in 64 bits lie between the ends of int32; ``varies``: its
    size may be known at run time only."""
    start, step = node["start"], node["step"]
    assert isinstance(start, int) and isinstance(step, int)
    if node.dtype != "int64" or (varies and (start, step) != (0, 1)):
        return False
    last = start + step * max(0, node.elements - 1)
    return min(start, last) > MIN_INT32 and max(start, last) < MAX_INT32


def narrow_to_int32(value: Value, is_of_the_row: bool) -> str:
    """Another value of 64 bits in 32, which compares alike with counters; empty where that takes
    more than it saves: a number for each element."""
    if value.dtype != "int64":
        return ""
    if value.number is not None:
        return value.text if MIN_INT32 < value.number < MAX_INT32 else ""
    return f"_within({value.text})" if is_of_the_row else ""
