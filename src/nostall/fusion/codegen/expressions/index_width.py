"""Index narrowing: counters (``iota``) and indices in 32 bits if their range allows it.

PyTorch's counters and indices have 64 bits.  A GPU compares 64-bit integers in two halves, so each
comparison takes more instructions.
"""

from __future__ import annotations

from nostall.fusion.codegen.expressions.templates import Value
from nostall.fusion.graph.graph import Node

MIN_INT32, MAX_INT32 = -(2**31), 2**31 - 1
"""The range of int32.  Wider values are clamped to it, so no counter may equal one of its ends."""


def counter_text(node: Node, count: str) -> str:
    """The text of a counter's value, from the text of its index ``count``."""
    start, step = node["start"], node["step"]
    text = count if step == 1 else f"({count} * {step})"
    return text if start == 0 else f"({start} + {text})"


def fits_int32(node: Node, varies: bool) -> bool:
    """Whether all values of an int64 counter are strictly within the range of int32.

    ``varies``: the counter's size may be dynamic.
    """
    start, step = node["start"], node["step"]
    assert isinstance(start, int) and isinstance(step, int)
    if node.dtype != "int64" or (varies and (start, step) != (0, 1)):
        return False
    last = start + step * max(0, node.elements - 1)
    return min(start, last) > MIN_INT32 and max(start, last) < MAX_INT32


def narrow_to_int32(value: Value, is_row_value: bool) -> str:
    """The text of an int64 value in 32 bits, equal to the original in comparisons with counters.

    "" if the value cannot be narrowed, or if it is not the same for the whole row
    (``is_row_value``): narrowing each element would cost more than it saves.
    """
    if value.dtype != "int64":
        return ""
    if value.number is not None:
        return value.text if MIN_INT32 < value.number < MAX_INT32 else ""
    return f"_within({value.text})" if is_row_value else ""
