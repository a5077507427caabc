"""Kernels parted where one takes longer than several would.

The explorer counts what a kernel computes by the elements of each operator.  A stitched kernel
computes an operator for every row and column of its tiles: where softmax weights of 200 places
scale 128 features each, their powers are taken again for every block of features.  The schedule
model sees that (and counts every feature, too much); where it says that two launches take less, the
small part becomes a kernel of its own.

Packed kernels are parted, too, where that is worth a launch: a pack has one number of warps and no
partial results, which sums over many rows need to be quick.
"""

from __future__ import annotations

from collections.abc import Iterable

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.cost.gpu import H200
from nostall.fusion.codegen.emit.packed import independent_parts, packed_plan
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.evaluate.work import Work
from nostall.fusion.graph.graph import Graph

SMALLER = 16
"""What a kernel's widest operator walks over, over what a small one does."""
GAIN = 0.9
"""Both parts together take at most this share of the whole, *modelled*."""

Group = tuple[int, ...]


def parted(graph: Graph, groups: Iterable[Group]) -> list[Group]:
    """The same kernels, some of them as two: the small one first.

    Small are operators that walk over less than 1/:data:`SMALLER` of what the widest one does and
    need none of the others; among them has to be one that is worth not doing again.
    """
    work = Work(graph)
    found: list[Group] = []
    for group in groups:
        small = _small(work, group)
        rest = tuple(index for index in group if index not in small)
        parts = [tuple(sorted(small)), rest]
        found += parts if small and _pays(graph, group, parts) else [group]
    return found


def unpacked(graph: Graph, groups: Iterable[Group]) -> list[Group]:
    """The same kernels, packs as their parts where those have plans enough quicker to pay for their
    launches, *modelled*."""
    found: list[Group] = []
    for group in groups:
        parts = independent_parts(graph, group)
        found += parts if len(parts) > 1 and _faster_apart(graph, parts) else [group]
    return found


def _faster_apart(graph: Graph, parts: list[Group]) -> bool:
    try:
        every = [schedule_operators(graph, part) for part in parts]
        plan = packed_plan(every)
    except BadInput:
        return False
    packed = sum(map(modelled_seconds, every, plan.plans)) - (len(parts) - 1) * H200.launch_s
    return sum(modelled_seconds(of, default_plan(of)) for of in every) < GAIN * packed


def _small(work: Work, group: Group) -> frozenset[int]:
    """The operators that may be a kernel of their own; none where they are light."""
    widest = max(work.iterated[index] for index in group)
    small: set[int] = set()
    for index in group:
        inside = [source for source in work.graph.sources[index] if source in group]
        if SMALLER * work.iterated[index] < widest and small.issuperset(inside):
            small.add(index)
    dear = any(work.graph[index].kind != "light" for index in small)
    return frozenset(small if dear else ())


def _pays(graph: Graph, group: Group, parts: Iterable[Group]) -> bool:
    try:
        whole = _seconds(graph, group)
        return sum(_seconds(graph, part) for part in parts) < GAIN * whole
    except BadInput:  # no common loops: a pack, or a part that no plan fits
        return False


def _seconds(graph: Graph, group: Group) -> float:
    """Of a kernel by the plan that is tried first, *modelled*."""
    of = schedule_operators(graph, group)
    return modelled_seconds(of, default_plan(of))
