"""Emission of Triton or Gluon source for planned kernels, scheme by scheme.

``EMITTERS`` has one entry for each scheme. Equal schedules and plans give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nostall.fusion.codegen.emit.program import (
    LAUNCH_DEPENDENTS,
    Launch,
    Program,
    assemble_program,
    kernel_name,
)
from nostall.fusion.codegen.emit.schemes.dots import write_matrices
from nostall.fusion.codegen.emit.schemes.multi_pass import emit_split, write_looped
from nostall.fusion.codegen.emit.schemes.sequence import write_sequence
from nostall.fusion.codegen.emit.schemes.shared import emit_shared
from nostall.fusion.codegen.emit.schemes.two_stage import emit_two_stage
from nostall.fusion.codegen.emit.size_arguments import write_with_sizes
from nostall.fusion.codegen.emit.tile import Tile
from nostall.fusion.codegen.emit.tile_parts import (
    Chunk,
    Rows,
    row_limit,
    specializes_counts,
    write_row_block,
    write_row_chunks,
    zero_condition,
)
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.loops.dynamic_rows import needs_size_arguments
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import Scheme
from nostall.fusion.codegen.tiling.legality import large_outputs
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.dynamic_size import Extent

Emitter = Callable[[PlannedKernel], Program]
BodyWriter = Callable[[PlannedKernel, Lines], int]
"""Writes the body of a kernel for the program ``pid`` and ``count``, the number of rows; returns
the number of programs."""


def emit(kernel: PlannedKernel) -> Program:
    """The source and the launches of a planned kernel.

    Raises :class:`BadFusion` if the source depends on dynamic sizes otherwise than by numbers.
    """
    return EMITTERS[kernel.plan.scheme](kernel)


def tensor_arguments(schedule: Schedule) -> tuple[str, ...]:
    """Names of the tensors of a pattern, in the order of a kernel's arguments: inputs first."""
    return tuple(f"p{i}" for i in (*schedule.mapping.inputs, *schedule.mapping.outputs))


def _single(write_body: BodyWriter) -> Emitter:
    """The emitter of a scheme with one kernel."""

    def write(kernel: PlannedKernel) -> tuple[str, Launch]:
        schedule, lines = kernel.schedule, Lines()
        with lines.block():
            lines("pid = tl.program_id(0)")
            programs = write_body(kernel, lines)
        launch = Launch(
            kernel_name(kernel),
            tensor_arguments(schedule),
            (schedule.outer_row_count,),
            (programs, 1),
            kernel.plan.num_warps,
            specializes_counts(schedule),
        )
        return str(lines), launch

    def emit_single(kernel: PlannedKernel) -> Program:
        has_sizes = needs_size_arguments(kernel.schedule)
        return assemble_program(
            kernel, [write_with_sizes(kernel, write) if has_sizes else write(kernel)]
        )

    return emit_single


def write_flat(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the scheme ``thread``; returns the number of programs.

    There are no reductions, so all loops are the columns of one long row.
    """
    schedule, plan = kernel.schedule, kernel.plan
    width = plan.chunks[0]
    lines(f"c = pid * {width} + tl.arange(0, {width})[None, :]")
    mask = None
    if schedule.mapping.graph.varying is not None or schedule.row_count % width:
        mask = "inside"
        lines(f"{mask} = c < {row_limit(schedule)}")
    rows = Rows((), 1, "0", None, zero_condition("pid"))
    tile = Tile(kernel.facts, schedule.rows, rows, (Chunk(width, "c", mask, ""),), lines)
    tile.evict_first = large_outputs(schedule) if plan.evict_first else frozenset()
    tile.preload(schedule.body)
    if plan.eager_loads:
        lines(LAUNCH_DEPENDENTS)
    if not plan.evict_first:
        tile.write(schedule.body)
        return Extent(schedule.row_count, width)
    # After a barrier, warps store neighbouring addresses at the same time.
    tile.write(schedule.body, stores=())
    lines("tl.debug_barrier()")
    for index in schedule.mapping.outputs:
        tile.store(index)
    return Extent(schedule.row_count, width)


def write_register_rows(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the schemes ``warp`` and ``block``; returns the number of
    programs. Whole rows stay in registers across all reductions.
    """
    schedule, plan = kernel.schedule, kernel.plan
    rows = write_row_block(kernel, lines, "pid")
    chunks = write_row_chunks(kernel, lines)
    tile = Tile(kernel.facts, schedule.columns, rows, chunks, lines)
    tile.evict_first = large_outputs(schedule) if plan.evict_first else frozenset()
    tile.preload(schedule.body)
    if plan.eager_loads and schedule.late_broadcast_operands:
        tile.preload(schedule.body, row_dependent=False)
    elif plan.eager_loads:
        lines(LAUNCH_DEPENDENTS)
    tile.write(schedule.body)
    return Extent(schedule.row_count, plan.rows)


PACKABLE_BODIES: Mapping[Scheme, BodyWriter] = {
    "thread": write_flat,
    "warp": write_register_rows,
    "block": write_register_rows,
    "looped": write_looped,
}
"""Body writers of the schemes that can be packed: one kernel, no partial results, no dots."""

EMITTERS: Mapping[Scheme, Emitter] = {
    **{scheme: _single(write_body) for scheme, write_body in PACKABLE_BODIES.items()},
    "shared": emit_shared,
    "split": emit_split,
    "column": emit_two_stage,
    "matrix": _single(write_matrices),
    "turned": _single(write_sequence),
}
"""The emitter of each scheme."""
