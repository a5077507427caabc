"""Philox counters of random tensors: which random number each element gets.

A Philox counter gives four words of 32 bits. The attribute ``words`` of a random tensor says how
many elements share a counter; i is the number of an element in row-major order:

- 1: element i has counter i.
- 4: element i has word ``i % 4`` of counter ``i // 4``. Four neighbours in the registers of a
  thread cost one counter.
- 8: element i has half ``i % 2`` (the low half first) of word ``i // 2 % 4`` of counter ``i // 8``.
  The random number of a half h is (h + 1/2) / 65536.

So a random number depends on the tensor and the element, not on the kernel that computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from nostall.fusion.codegen.loops.addresses import Offset, tensor_offset
from nostall.fusion.codegen.loops.mapping import AxisAccess, Loops
from nostall.fusion.graph.graph import Node
from nostall.fusion.graph.shapes import contiguous_strides


def counter_offsets(
    node: Node,
    accesses: Sequence[AxisAccess],
    sizes: Sequence[int],
    loop_groups: Sequence[Loops],
) -> tuple[Offset, ...]:
    """The operands of a random tensor's template: (element number,) if ``words`` is 1, else
    (counter, remainder) with ``words * counter + remainder`` = element number.

    ``loop_groups``: the loops that share an index of the kernel, such as all column loops. A group
    whose steps are multiples of ``words`` is in the counter part, so the remainder is short and the
    compiler sees which elements share a counter.
    """
    number = tensor_offset(accesses, contiguous_strides(node.shape), sizes)
    words = node["words"]
    assert isinstance(words, int)
    if words == 1:
        return (number,)
    strides = number.strides
    counter_loops = {
        loop
        for group in loop_groups
        if all(strides.get(loop, 0) % words == 0 for loop in group)
        for loop in group
    }
    counter = {loop: step // words for loop, step in strides.items() if loop in counter_loops}
    remainder = {loop: step for loop, step in strides.items() if loop not in counter_loops}
    return Offset(strides=counter), Offset(strides=remainder)
