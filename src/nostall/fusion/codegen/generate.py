"""Generation of kernels for sets of operators, and the reasons why some sets have none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.loops.dynamic_rows import check_dynamic_size, join_dynamic_rows
from nostall.fusion.codegen.loops.mapping import map_pattern
from nostall.fusion.codegen.loops.schedule import Schedule, build_schedule
from nostall.fusion.codegen.packing import common_warps, emit_packed, independent_parts, plan_packed
from nostall.fusion.codegen.tiling.plan_space import first_illegal_reason
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph

T = TypeVar("T")

PlanChooser = Callable[[Schedule], PlannedKernel]
"""Chooses the plan of a schedule. Raises :class:`BadInput` if no plan is legal."""


def schedule_operators(graph: Graph, operators: Iterable[int]) -> Schedule:
    """The schedule (rows and columns) of a set of operators.

    Raises :class:`BadFusion` if the operators have no common loops; :func:`generate` may still pack
    them.
    """
    return _schedule(graph, tuple(sorted(set(operators))))


@lru_cache(maxsize=64)
def _schedule(graph: Graph, operators: tuple[int, ...]) -> Schedule:
    # The same object for the same operators: what is known of its plans is known by the object.
    schedule = join_dynamic_rows(build_schedule(map_pattern(graph, operators)))
    check_dynamic_size(schedule)
    return schedule


def generate(graph: Graph, operators: Iterable[int], choice: PlanChooser = default_plan) -> Program:
    """The kernel of a set of operators.

    It has common loops, with the plan that ``choice`` returns; if there are none, it is a packed
    kernel of the independent parts. Raises :class:`BadFusion` if neither is possible.
    """
    pattern = tuple(operators)
    try:
        return emit(choice(schedule_operators(graph, pattern)))
    except BadInput:
        parts = independent_parts(graph, pattern)
        if len(parts) < 2:
            raise
    return emit_packed(plan_packed([schedule_operators(graph, part) for part in parts]))


def no_kernel_reason(graph: Graph, operators: Iterable[int]) -> str | None:
    """Why :func:`generate` has no kernel for these operators; None if it has one."""
    pattern = tuple(operators)
    reason = _no_common_kernel_reason(graph, pattern)
    if reason is None:
        return None
    parts = independent_parts(graph, pattern)
    if len(parts) < 2:
        return reason
    try:
        warps = common_warps(schedule_operators(graph, part) for part in parts)
    except BadInput as error:
        return str(error)
    return None if warps else reason


def _no_common_kernel_reason(graph: Graph, operators: tuple[int, ...]) -> str | None:
    try:
        return first_illegal_reason(schedule_operators(graph, operators))
    except BadInput as error:
        return str(error)


def has_no_template(graph: Graph, index: int) -> bool:
    """Whether there is no kernel for a single operator, and therefore none that contains it."""
    try:
        map_pattern(graph, (index,))
    except BadInput:
        return True
    return False


def grow_partition(graph: Graph, operators: Iterable[int] | None = None) -> list[tuple[int, ...]]:
    """A greedy partition of operators (by default all) into kernels, grown along producers.

    It is a baseline for tests and for graphs without an explored partition.  An operator joins the
    kernels of all its producers, of one of them, or none.  Operators without a kernel stay alone.
    """
    groups: list[set[int]] = []
    for index in graph.operators if operators is None else sorted(operators):
        producers = [group for group in groups if group & set(graph.sources[index])]
        all_merged = {index}.union(*producers)
        for merged in (all_merged, *({index} | group for group in reversed(producers)), {index}):
            rest = [group for group in groups if not group & merged]
            if len(merged) == 1 or (
                no_kernel_reason(graph, merged) is None and graph.is_acyclic([*rest, merged])
            ):
                groups = [*rest, merged]
                break
    return [tuple(sorted(group)) for group in groups]


def supported_groups(graph: Graph, groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same patterns, with those that code generation does not support split."""
    return [
        subgroup
        for group in groups
        for subgroup in (
            [group] if no_kernel_reason(graph, group) is None else grow_partition(graph, group)
        )
    ]


def generate_partition(
    graph: Graph,
    patterns: Sequence[Iterable[int]] | None,
    choice: PlanChooser,
    finish: Callable[[Program], T],
) -> tuple[tuple[T | int, ...], Counter[str]]:
    """The kernels of a partition in the order of their launches, and the reasons against others.

    ``patterns``: the partition (None: :func:`grow_partition`); other operators stay alone.
    ``finish`` makes the kernel of each program.  A pattern without a kernel is partitioned into
    smaller ones; operators that still have none are steps of their own, by their node.

    Raises :class:`BadFusion` if the graph has opaque nodes or the patterns depend on each other in
    a cycle.
    """
    if opaque := [node for node in graph if node.kind == "opaque"]:
        raise BadFusion(
            f"{opaque[0]} is opaque; stitch the regions between opaque nodes one by one"
        )
    groups = [
        tuple(sorted(group)) for group in (grow_partition(graph) if patterns is None else patterns)
    ]
    covered = {index for group in groups for index in group}
    groups += [(index,) for index in graph.operators if index not in covered]
    groups = supported_groups(graph, groups)
    order = graph.execution_order(groups)
    if order is None:
        raise BadFusion(
            "the patterns depend on each other in a cycle; give a partition whose contraction is "
            "acyclic"
        )
    steps: list[T | int] = []
    illegal_reasons: Counter[str] = Counter()
    for at in order:
        try:
            steps.append(finish(generate(graph, groups[at], choice)))
        except BadInput as error:
            illegal_reasons[str(error)] += 1
            steps.extend(groups[at])
    return tuple(steps), illegal_reasons
