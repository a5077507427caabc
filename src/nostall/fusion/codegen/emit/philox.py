"""Which random number each element takes: where Philox counts from.

A counter gives four words of 32 bits.  Where a tensor's ``words`` are 4, element i in row-major
order takes word ``i % 4`` of counter ``i // 4``: what a number is follows from the tensor alone,
whatever kernel makes it, and four neighbours in a thread's registers cost one counter.  Where they
are 8, it takes half ``i % 2`` (the low one first) of word ``i // 2 % 4`` of counter ``i // 8``; the
number is (h + 1/2) / 65536 for a half h.
"""

from __future__ import annotations

from collections.abc import Sequence

from nostall.fusion.codegen.loops.addresses import Offset, tensor_offset
from nostall.fusion.codegen.loops.mapping import AxisAccess, Loops
from nostall.fusion.graph.graph import Node
from nostall.fusion.graph.shapes import contiguous_strides


def counter_offsets(
    node: Node, places: Sequence[AxisAccess], sizes: Sequence[int], sides: Sequence[Loops]
) -> tuple[Offset, ...]:
    """What the template of a random tensor at ``places`` takes: the number of each element where
    ``words`` is 1, else (first, place), ``words * first + place`` being that number.

    ``sides``: the loops of each counter of the kernel.  What goes in steps of whole counters
    through one of them is in ``first``: the rest is short, and a compiler sees who shares one.
    """
    number = tensor_offset(places, contiguous_strides(node.shape), sizes)
    words = node["words"]
    assert isinstance(words, int)
    if words == 1:
        return (number,)
    weights = number.strides
    whole = [side for side in sides if all(weights.get(loop, 0) % words == 0 for loop in side)]
    apart = {loop for side in whole for loop in side}
    first = {loop: weight // words for loop, weight in weights.items() if loop in apart}
    place = {loop: weight for loop, weight in weights.items() if loop not in apart}
    return Offset(strides=first), Offset(strides=place)
