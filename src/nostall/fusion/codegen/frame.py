"""The first lines of a kernel: which rows and columns its program has."""

from __future__ import annotations

from nostall.fusion.codegen.addresses import ZERO
from nostall.fusion.codegen.lines import Lines
from nostall.fusion.codegen.plan import KernelPlan
from nostall.fusion.codegen.schedule import Schedule
from nostall.fusion.codegen.tile import Chunk, Rows


def is_zero(scalar: str) -> str:
    """A condition on a number of the program, as the tensor that a mask has to be."""
    return f"{scalar} + {ZERO} == 0"


def row_block(of: Schedule, plan: KernelPlan, lines: Lines, block: str) -> Rows:
    """Rows of the block of rows number ``block``; ``count`` is the number of all rows."""
    if plan.rows == 1:
        lines(f"r = {block} + {ZERO}")
        return Rows(of.rows, 1, "r", None, is_zero(block))
    lines(f"r = {block} * {plan.rows} + tl.arange(0, {plan.rows})[:, None]")
    lines("live = r < count")
    return Rows(of.rows, plan.rows, "r", "live", is_zero(block))


def whole_row(of: Schedule, plan: KernelPlan, lines: Lines) -> tuple[Chunk, ...]:
    """All columns, in one or several chunks; only the last chunk can have too many lanes."""
    columns = of.column_count
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
