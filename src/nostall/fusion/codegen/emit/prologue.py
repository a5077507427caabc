"""Kernel prologue: lines that compute the row and column indices of a program."""

from __future__ import annotations

from nostall.fusion.codegen.emit.tile_parts import Chunk, Rows
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.loops.addresses import ZERO_TENSOR
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel


def zero_condition(scalar: str) -> str:
    """The condition that a scalar is 0, as a tensor of shape (1, 1): a mask must be a tensor."""
    return f"{scalar} + {ZERO_TENSOR} == 0"


COUNT_ALIGNMENT = 16
"""Triton specializes kernels for counts that are multiples of this, for wider accesses."""


def specializes_counts(schedule: Schedule) -> bool:
    """Whether the width of accesses along the rows depends on the divisibility of the count."""
    return schedule.is_column_major and schedule.inner_row_count % COUNT_ALIGNMENT != 0


def row_limit(schedule: Schedule) -> str:
    """The number of rows of a schedule, as text.

    The constant factor declares to Triton that masks end at a multiple of it. Without the factor
    Triton would load element by element.
    """
    return f"count * {schedule.inner_row_count}" if schedule.inner_row_count > 1 else "count"


def write_row_block(kernel: PlannedKernel, lines: Lines, block: str) -> Rows:
    """Write the row indices of a program; ``block`` is the text of its row block number."""
    schedule, plan = kernel.schedule, kernel.plan
    if plan.rows == 1:
        lines(f"r = {block} + {ZERO_TENSOR}")
        return Rows(schedule.rows, 1, "r", None, zero_condition(block))
    lines(f"r = {block} * {plan.rows} + tl.arange(0, {plan.rows})[:, None]")
    lines(f"live = r < {row_limit(schedule)}")
    return Rows(
        schedule.rows, plan.rows, "r", "live", zero_condition(block), f"({block} * {plan.rows})"
    )


def write_row_chunks(kernel: PlannedKernel, lines: Lines) -> tuple[Chunk, ...]:
    """Write the column indices of all chunks of a row; only the last chunk can have a mask."""
    plan, columns = kernel.plan, kernel.schedule.column_count
    chunks = []
    first = 0
    for at, width in enumerate(plan.chunks):
        suffix = f"_{at}" if len(plan.chunks) > 1 else ""
        start = f"{first} + " if first else ""
        lines(f"c{suffix} = {start}tl.arange(0, {width})[None, :]")
        mask = None
        if first + width > columns:
            mask = f"inside{suffix}"
            lines(f"{mask} = c{suffix} < {columns}")
        chunks.append(Chunk(width, f"c{suffix}", mask, suffix))
        first += width
    return tuple(chunks)
