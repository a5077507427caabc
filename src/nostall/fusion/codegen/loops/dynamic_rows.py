"""Kernels with dynamic sizes: which have one source for all sizes, and what it takes for that.

Sizes and strides are literals in the generated source.  The row count alone, a kernel argument,
bounds the slowest loop, or several that all tensors see as one, so their count may be any product
of dynamic sizes.  Where other loops or strides depend on them, the sizes are further arguments
(:mod:`nostall.fusion.codegen.emit.size_arguments`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from nostall.fusion.codegen.loops.addresses import tensor_offset
from nostall.fusion.codegen.loops.mapping import AxisAccess
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.graph import Node
from nostall.fusion.graph.shapes import Shape, contiguous_strides


def join_dynamic_rows(schedule: Schedule) -> Schedule:
    """The schedule with its dynamic row loops as one, if all tensors are contiguous along them."""
    mapping, rows = schedule.mapping, schedule.rows
    sizes, varying = mapping.loop_sizes, mapping.graph.varying
    joined = max(
        (at + 1 for at, loop in enumerate(rows) if varies(sizes[loop], varying)), default=1
    )
    if joined == 1 or (schedule.row_reductions and schedule.reduced_rows != rows):
        return schedule
    for _, accesses, strides in _indexed_tensors(schedule):
        steps = tensor_offset(accesses, strides, sizes).strides
        for outer, inner in pairwise(rows[:joined]):
            if steps.get(outer, 0) != steps.get(inner, 0) * sizes[inner]:
                return schedule
    return replace(schedule, outer_rows=joined)


def check_dynamic_size(schedule: Schedule) -> None:
    """Raises :class:`BadFusion` if no source is valid for all values of the dynamic sizes."""
    reason = size_dependence(schedule)
    if reason is None:
        return
    if schedule.kind not in ("flat", "rows") or schedule.block_reductions:
        raise BadFusion(f"{reason}; leave it to PyTorch")
    if schedule.is_column_major and has_dynamic_columns(schedule):
        raise BadFusion("a dynamic size is reduced that is not the fastest axis in memory")


def needs_size_arguments(schedule: Schedule) -> bool:
    """Whether a kernel has to know more of the dynamic sizes than its row count."""
    return size_dependence(schedule) is not None


def has_dynamic_columns(schedule: Schedule) -> bool:
    """Whether a row has a dynamic number of columns."""
    return varies(schedule.column_count, schedule.mapping.graph.varying)


@lru_cache(maxsize=32)
def size_dependence(schedule: Schedule) -> str | None:
    """Why the row count does not suffice as an argument; None if it does."""
    mapping, varying = schedule.mapping, schedule.mapping.graph.varying
    if varying is None:
        return None
    loops = [loop for loop, size in enumerate(mapping.loop_sizes) if varies(size, varying)]
    if any(loop in schedule.columns for loop in loops):
        return "a dynamic size is reduced"
    joined = schedule.rows[: schedule.outer_rows]
    if any(loop not in joined for loop in loops):
        several = "several loops vary with the dynamic sizes"
        return several if len(loops) > 1 else "the dynamic size is not the slowest axis in memory"
    if schedule.row_reductions and loops and schedule.reduced_rows != schedule.rows:
        return "sums over some of the row loops have a dynamic number of rows"
    for _, accesses, strides in _indexed_tensors(schedule):
        offset = tensor_offset(accesses, strides, mapping.loop_sizes)
        steps = [step for loop, step in offset.strides.items() if loop not in joined[:-1]]
        if any(varies(n, varying) for n in (offset.start, *steps)):
            return "strides depend on the dynamic sizes"
    return None


def _indexed_tensors(schedule: Schedule) -> Iterator[tuple[Node, tuple[AxisAccess, ...], Shape]]:
    """Everything that the source computes an offset for, as (node, accesses, strides).

    These are outputs, inputs, random numbers and counters (``iota``).
    """
    mapping = schedule.mapping
    graph = mapping.graph
    for index in mapping.outputs:
        yield graph[index], mapping.accesses[index], graph[index].strides
    for index in mapping.operators:
        if graph[index].op == "random":
            yield graph[index], mapping.accesses[index], contiguous_strides(graph[index].shape)
    for operand in dict.fromkeys(o for i in mapping.operators for o in mapping.operands[i]):
        if mapping.is_in_memory(operand):
            yield graph[operand.source], operand.accesses, graph[operand.source].strides
        elif graph[operand.source].op == "iota":
            yield graph[operand.source], operand.accesses, (1,)
