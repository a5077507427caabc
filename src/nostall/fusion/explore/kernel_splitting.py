"""Splitting of kernels if several kernels take less modelled time than one.

The explorer counts what a kernel computes by the elements of each operator. But a generated kernel
computes an operator for all rows and columns of its tiles. For example, if 200 softmax weights
scale 128 features each, the kernel computes their exponentials again for each block of features.
The schedule's cost model counts that (for all features, which is too much). If by that model two
launches take less time, the small operators become a kernel of their own.

Packed kernels are unpacked if the gain is larger than the cost of the launches. A packed kernel has
one number of warps for all parts and no partial results, which long sums over rows need to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.cost.gpu import H200
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.packing import independent_parts, plan_packed
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.evaluate.work import GraphWork
from nostall.fusion.graph.graph import Graph

SMALL_FACTOR = 16
"""An operator is small if it loops over less than 1/16 of the elements of the kernel's largest."""
MAX_TIME_RATIO = 0.9
"""Kernels are split if the modelled time of the parts is below this share of the whole kernel's."""

Group = tuple[int, ...]
"""The operators of a kernel, ascending."""


def split_kernels(graph: Graph, groups: Iterable[Group]) -> list[Group]:
    """The same kernels, with the small operators of some split off into kernels of their own.

    Small operators loop over less than 1/:data:`SMALL_FACTOR` of the elements of the kernel's
    largest operator.  Those that depend on no other operators of the kernel run first; at least one
    of them must be more than a light operator, because repeating light operators costs little.
    Those that no other operators of the kernel depend on run last, with a reduction among them: the
    mean of a loss over rows, for which the whole kernel would keep partial results.
    """
    work = GraphWork(graph)
    kernels: list[Group] = []
    for group in groups:
        for small in (_first_small_operators(work, group), _last_small_operators(work, group)):
            rest = tuple(index for index in group if index not in small)
            part = tuple(sorted(small))
            if part and rest and _is_faster_split(graph, group, [part, rest]):
                kernels.append(part)
                group = rest
        kernels.append(group)
    return kernels


def unpack_kernels(graph: Graph, groups: Iterable[Group]) -> list[Group]:
    """The same kernels, with packed ones split into their parts if that takes less modelled time.

    The time of the parts includes their launches.
    """
    kernels: list[Group] = []
    for group in groups:
        parts = independent_parts(graph, group)
        kernels += parts if len(parts) > 1 and _is_faster_unpacked(graph, parts) else [group]
    return kernels


def _is_faster_unpacked(graph: Graph, parts: list[Group]) -> bool:
    try:
        schedules = [schedule_operators(graph, part) for part in parts]
        kernels = plan_packed(schedules)
    except BadInput:
        return False
    packed = _packed_seconds(kernels)
    unpacked = sum(modelled_seconds(default_plan(schedule)) for schedule in schedules)
    return unpacked < MAX_TIME_RATIO * packed


def _first_small_operators(work: GraphWork, group: Group) -> frozenset[int]:
    """The operators to split off in front of the others; none if all of them are light."""
    widest = max(work.iterations[index] for index in group)
    small: set[int] = set()
    for index in group:
        sources = [source for source in work.graph.sources[index] if source in group]
        if SMALL_FACTOR * work.iterations[index] < widest and small.issuperset(sources):
            small.add(index)
    is_costly = any(work.graph[index].kind != "light" for index in small)
    return frozenset(small if is_costly else ())


def _last_small_operators(work: GraphWork, group: Group) -> frozenset[int]:
    """The operators to split off behind the others; none if none of them is a reduction."""
    widest = max(work.iterations[index] for index in group)
    small: set[int] = set()
    for index in reversed(group):
        readers = [reader for reader in work.graph.consumers[index] if reader in group]
        if SMALL_FACTOR * work.iterations[index] < widest and small.issuperset(readers):
            small.add(index)
    reduces = any(work.graph[index].kind == "reduce" for index in small)
    return frozenset(small if reduces else ())


def _is_faster_split(graph: Graph, group: Group, parts: Iterable[Group]) -> bool:
    try:
        unsplit_seconds = unpacked_seconds(graph, group)
        return (
            sum(unpacked_seconds(graph, part) for part in parts) < MAX_TIME_RATIO * unsplit_seconds
        )
    except BadInput:  # the kernel is packed (no common loops), or no plan fits a part
        return False


def unpacked_seconds(graph: Graph, group: Group) -> float:
    """Modelled seconds of a kernel with its default plan.

    Raises :class:`BadInput` if its operators have no common loops, or no plan fits.
    """
    return modelled_seconds(default_plan(schedule_operators(graph, group)))


def kernel_seconds(graph: Graph, group: Group) -> float:
    """Modelled seconds of a kernel with its default plan, packed if it has no common loops.

    Raises :class:`BadInput` if no plan fits.
    """
    try:
        return unpacked_seconds(graph, group)
    except BadInput:
        parts = independent_parts(graph, group)
        if len(parts) < 2:
            raise
    return _packed_seconds(plan_packed([schedule_operators(graph, part) for part in parts]))


def _packed_seconds(kernels: Sequence[PlannedKernel]) -> float:
    """Modelled seconds of the parts of a packed kernel, which has one launch."""
    return sum(map(modelled_seconds, kernels)) - (len(kernels) - 1) * H200.launch_s


class KernelTimes:
    """Modelled seconds of kernels with their default plans, each computed once."""

    def __init__(
        self, graph: Graph, seconds_of: Callable[[Graph, Group], float] = kernel_seconds
    ) -> None:
        """``seconds_of``: the seconds of a kernel; raises :class:`BadInput` if it has no plan."""
        self._graph, self._seconds_of = graph, seconds_of
        self._seconds: dict[Group, float | None] = {}

    def total(self, groups: Iterable[Group]) -> float | None:
        """Modelled seconds of all kernels; None if one of them has no plan."""
        seconds = [self._of(group) for group in groups]
        known = [each for each in seconds if each is not None]
        return sum(known) if len(known) == len(seconds) else None

    def _of(self, group: Group) -> float | None:
        if group not in self._seconds:
            try:
                self._seconds[group] = self._seconds_of(self._graph, group)
            except BadInput:
                self._seconds[group] = None
        return self._seconds[group]
