"""Rows that are not held in registers: one pass over the columns for each level of reductions.

What the reductions of the next level and the outputs need is computed again from memory.  *Looped*
runs the passes (:mod:`nostall.fusion.codegen.levels`) in one kernel.  *Split* shares a row among
several programs and runs a kernel for each pass; partial results go through memory and every
program of the next kernel adds them up in the same order, so the result does not depend on which
program was first.
"""

from __future__ import annotations

from nostall.fusion.codegen.frame import is_specialised, is_zero, row_block
from nostall.fusion.codegen.levels import Pass, passes
from nostall.fusion.codegen.lines import Lines
from nostall.fusion.codegen.plan import KernelPlan
from nostall.fusion.codegen.program import Launch, Program, Workspace, base_name, program
from nostall.fusion.codegen.schedule import Schedule
from nostall.fusion.codegen.templates import TRITON_DTYPES, reduction
from nostall.fusion.codegen.tile import Chunk, Rows, Tile
from nostall.fusion.varying import Extent


def write_looped(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """The body of a kernel whose program is number ``pid``; returns how many programs there are."""
    rows = row_block(of, plan, lines, "pid")
    tile = _tile(of, plan, rows, lines)
    for number, part in enumerate(passes(of)):
        lines(f"# pass {number}")
        write_narrow(tile, part)
        if part.has_columns:
            _columns(tile, part, "0", str(of.column_count))
            for index in part.reductions:
                how = reduction(of.mapping.graph[index])
                tile.keep_reduced(index, how, how.along(f"a{index}", 1), rows=True)
    return Extent(of.row_count, plan.rows)


def emit_split(of: Schedule, plan: KernelPlan) -> Program:
    kernels = []
    graph = of.mapping.graph
    width = plan.chunks[0]
    span = -(-of.column_count // (width * plan.parts)) * width
    name = base_name(of.mapping, plan)
    for number, part in enumerate(passes(of)):
        lines = Lines()
        with lines.block():
            lines("pid = tl.program_id(0)")
            lines("part = tl.program_id(1)")
            rows = row_block(of, plan, lines, "pid")
            tile = _tile(of, plan, rows, lines)
            for index in part.finished:
                _put_together(tile, index, plan.parts)
            write_narrow(tile, part, only=is_zero("part"))
            if part.has_columns:
                lines(f"start = part * {span}")
                stop = f"tl.minimum(start + {span}, {of.column_count})"
                _columns(tile, part, "start", stop)
                for index in part.reductions:
                    how = reduction(graph[index])
                    mask = f", mask={rows.mask}" if rows.mask else ""
                    lines(
                        f"tl.store(w{index} + r * {plan.parts} + part, "
                        f"{how.along(f'a{index}', 1)}{mask})"
                    )
        arguments = _used(of, part)
        grid = (Extent(of.row_count, plan.rows), plan.parts if part.has_columns else 1)
        told = f"{name}_{number}", arguments, (of.counted,), grid, plan.num_warps
        launch = Launch(*told, is_specialised(of))
        kernels.append((lines, launch))
    workspaces = tuple(
        Workspace(f"w{i}", reduction(graph[i]).dtype, of.row_count * plan.parts)
        for i in of.body
        if of.mapping.reduced.get(i)
    )
    return program(of.mapping, plan, kernels, workspaces)


def _tile(of: Schedule, plan: KernelPlan, rows: Rows, lines: Lines) -> Tile:
    width = plan.chunks[0]
    chunk = Chunk(width, "c", "inside" if of.column_count % width else None, "")
    return Tile(of, of.columns, rows, (chunk,), lines)


def write_narrow(tile: Tile, part: Pass, only: str | None = None) -> None:
    """The operators of a pass that have no columns, and their stores."""
    for index in part.narrow:
        if (index, "") not in tile.entries:
            tile.compute(index)
    for index in part.narrow_outputs:
        tile.store(index, only)


def _columns(tile: Tile, part: Pass, start: str, stop: str) -> None:
    """A loop over columns that accumulates the reductions of a pass and stores its outputs."""
    lines, (chunk,) = tile.lines, tile.chunks
    graph = tile.graph
    hows = {index: reduction(graph[index]) for index in part.reductions}
    for index, how in hows.items():
        shape = f"({tile.rows.count}, {chunk.width})"
        lines(f"a{index} = tl.full({shape}, {how.neutral}, {TRITON_DTYPES[how.dtype]})")
    before = dict(tile.entries)
    with lines.block(f"for first in range({start}, {stop}, {chunk.width}):"):
        lines(f"c = first + tl.arange(0, {chunk.width})[None, :]")
        if chunk.mask:
            lines(f"inside = c < {tile.of.column_count}")
        tile.write(part.wide, part.wide_outputs)
        for index, how in hows.items():
            lines(f"# {graph.told(index)}")
            text, _ = tile.partial(index, how, chunk)
            lines(f"a{index} = {how.both(f'a{index}', text)}")
    # Names that are first used in a loop do not exist after it.
    tile.entries = before


def _put_together(tile: Tile, index: int, parts: int) -> None:
    """The result of a reduction from the partial results of the kernel before."""
    how = reduction(tile.graph[index])
    tile.lines(f"# {tile.graph.told(index)}")
    mask = f", mask={tile.rows.mask}" if tile.rows.mask else ""
    tile.lines(f"a{index} = tl.load(w{index} + r * {parts} + tl.arange(0, {parts})[None, :]{mask})")
    tile.keep_reduced(index, how, how.along(f"a{index}", 1), rows=True)


def _used(of: Schedule, part: Pass) -> tuple[str, ...]:
    """What the kernel of a pass reads and writes."""
    mapping = of.mapping
    operators = [*part.wide, *part.narrow, *part.reductions]
    reads = mapping.read_by(operators)
    tensors = [*reads, *sorted([*part.wide_outputs, *part.narrow_outputs])]
    partial = sorted({*part.finished, *part.reductions})
    return (*(f"p{i}" for i in tensors), *(f"w{i}" for i in partial))
