"""Parts of a tile: its rows, its chunks of columns and its values, as texts of a kernel.

The lines that compute the row and column indices of a program are written here, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from nostall.fusion.codegen.expressions.index_width import narrow_to_int32
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import Value
from nostall.fusion.codegen.loops.addresses import ZERO_TENSOR
from nostall.fusion.codegen.loops.mapping import Loops
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.loop_peeling import Peeling
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.graph import Node


@dataclass(frozen=True)
class Rows:
    """The rows of a tile, as texts of the kernel."""

    loops: Loops
    count: int
    # The row numbers, a tensor of shape (count, 1).
    counter: str
    # Which of the rows exist; None if all do.
    mask: str | None
    # A condition that is true in all rows of the tile that begins with row 0.
    is_first_block: str
    # The number of the first row if it is a multiple of ``count``, else empty.
    start: str = ""


@dataclass(frozen=True)
class Chunk:
    """A range of columns of a tile, as texts of the kernel."""

    width: int
    # The column numbers, a tensor of shape (1, width).
    counter: str
    # Which of the columns exist; None if all do.
    mask: str | None
    # Distinguishes the names of values of different chunks.
    suffix: str
    # Tensors whose rows are peeled are accessed by lanes, 16 bytes at a time.
    peeling: Peeling | None = None
    # In loops over chunks that are written in Gluon: ``counter`` is ``start`` + ``lanes``, and
    # ``lanes`` is the same tensor in all iterations.
    start: str = ""
    lanes: str = ""


@dataclass(frozen=True)
class TileValue:
    """A value of the kernel and the axes of its tensor."""

    value: Value
    has_rows: bool = False
    has_columns: bool = False
    # The same value as int32, if it is an int64 counter whose values all fit.
    int32_text: str = ""


def narrow_comparison(
    node: Node, operands: list[TileValue], chunk: Chunk | None
) -> list[TileValue]:
    """The operands of a comparison with an int64 counter as int32, if possible.

    A GPU compares int64 in two halves. An operand that a row has once is clamped to the ends of
    int32; no counter has these values, so the comparison gives the same result.
    """
    if not any(operand.int32_text for operand in operands):
        return operands
    texts = [
        operand.int32_text or narrow_to_int32(operand.value, not operand.has_columns)
        for operand in operands
    ]
    if not all(texts):
        return operands
    counter = f"({chunk.counter})" if chunk and chunk.lanes else ""
    others = [at for at, operand in enumerate(operands) if not operand.int32_text]
    if chunk and node.op in ("eq", "ne") and counter in texts and others:
        # LLVM would widen the column numbers to 64 bits, as addresses need them, and compare those.
        (at,) = others
        if operands[at].value.number is None:
            texts = [f"({texts[at]} - {chunk.start})"] * 2
            texts[1 - at] = chunk.lanes
    return [
        TileValue(Value(text, "int32", operand.value.number), operand.has_rows, operand.has_columns)
        for text, operand in zip(texts, operands, strict=True)
    ]


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
