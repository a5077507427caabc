"""What follows a sum over rows, in the kernel that adds the sum up.

To the explorer a reduction across rows ends a kernel: its blocks hold partial results, and nobody
in there knows the whole.  The code generator has a second stage that does, and can go on: casting
the gradient of a weight to the weight's dtype needs no launch of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from nostall.fusion.codegen.generate import no_kernel_reason
from nostall.fusion.evaluate.work import Work
from nostall.fusion.explore.kernel_splitting import SMALLER, Group
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import ELEMENTWISE


def finished(graph: Graph, groups: Iterable[Group]) -> list[Group]:
    """The same operators; those at the end of the graph that need results of one kernel's
    reductions and nothing else that is computed are in that kernel, where it can be written and
    they walk over less than 1/:data:`SMALLER` of what its widest operator does."""
    walked = Work(graph).iterated
    found = [set(group) for group in groups]
    held = {index: at for at, group in enumerate(found) for index in group}
    for at, group in enumerate(found):
        if not any(graph[index].kind == "reduce" for index in group):
            continue
        widest = max(walked[index] for index in group)
        ends = {i for i in _ends(graph, group) if SMALLER * walked[i] < widest}
        if ends and no_kernel_reason(graph, sorted(group | ends)) is None:
            for index in ends:
                found[held[index]].discard(index)
                held[index] = at
            group |= ends
    return [tuple(sorted(group)) for group in found if group]


def _ends(graph: Graph, group: set[int]) -> set[int]:
    """Elementwise operators that only results of the group's reductions lead to, with all that
    reads them."""
    found: set[int] = set()
    for index in reversed(graph.operators):
        light = graph[index].kind in ELEMENTWISE and index not in group
        if light and found.issuperset(graph.consumers[index]):
            found.add(index)
    for index in graph.operators:
        made = [i for i in graph.sources[index] if graph[i].kind != "input"]
        led = all(i in found or (i in group and graph[i].kind == "reduce") for i in made)
        if not (made and led):
            found.discard(index)
    return found
