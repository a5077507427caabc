"""The first lines of a kernel: which rows and columns its program has."""

from __future__ import annotations

from nostall.fusion.codegen.emit.tile import Chunk, Rows
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.loops.addresses import ZERO
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan


def is_zero(scalar: str) -> str:
    """A condition on a number of the program, as the tensor that a mask has to be."""
    return f"{scalar} + {ZERO} == 0"


ALIGNED = 16
"""What Triton looks for in counts when it chooses how wide accesses are."""


def is_specialised(of: Schedule) -> bool:
    """Whether the count's own divisibility decides how wide accesses along the rows are."""
    return of.along_rows and of.row_step % ALIGNED != 0


def limit(of: Schedule) -> str:
    """The number of all rows.  The factor stands in the text: Triton reads from it that masks end
    at multiples of it, without which it loads element by element."""
    return f"count * {of.row_step}" if of.row_step > 1 else "count"


def row_block(of: Schedule, plan: KernelPlan, lines: Lines, block: str) -> Rows:
    """Rows of the block of rows number ``block``."""
    if plan.rows == 1:
        lines(f"r = {block} + {ZERO}")
        return Rows(of.rows, 1, "r", None, is_zero(block))
    lines(f"r = {block} * {plan.rows} + tl.arange(0, {plan.rows})[:, None]")
    lines(f"live = r < {limit(of)}")
    return Rows(of.rows, plan.rows, "r", "live", is_zero(block), f"({block} * {plan.rows})")


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
