"""The command ``nostall serving show``: the task tables of a batch file, and a summary."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nostall.cli.terminal.console import Format, FormatOption, out, show_json, show_table
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_text_atomically
from nostall.serving.attention.config import AttentionPlan
from nostall.serving.batch.batch_file import dump_batch, load_batch
from nostall.serving.batch.examples import EXAMPLES, Draw, draw_batch, example
from nostall.serving.batch.ragged import RaggedBatch
from nostall.serving.tables.columns import (
    PREFIX_NAMES,
    REDUCTION_NAMES,
    TASK_NAMES,
    TILE,
    TOKEN_NAMES,
)
from nostall.serving.tables.costs import TileSet, load_costs
from nostall.serving.tables.settings import ORDER_NAMES, TableSettings, TaskTables
from nostall.serving.traces import load_requests

if TYPE_CHECKING:
    from nostall.serving.tables.summary import TableSummary


DEFAULT_PROGRAMS = 264
"""Two programs for each SM of an H100."""

BatchArgument = Annotated[Path, typer.Argument(help="Batch file of `nostall serving batch`.")]


def show(
    batch: BatchArgument,
    order: Annotated[str, typer.Option(help=f"One of {', '.join(ORDER_NAMES)}.")] = "snake",
    programs: Annotated[
        int, typer.Option(min=1, help="Programs that run at the same time; 264: two for each SM.")
    ] = DEFAULT_PROGRAMS,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    tiles: Annotated[str, typer.Option(help="Tile heights in rows, ascending.")] = "16,64,128",
    split: Annotated[
        int | None, typer.Option(min=1, help="Most keys of a unit; default: no limit.")
    ] = None,
    units_per_program: Annotated[
        int, typer.Option(min=0, help="Split tiles that cost more than an even share of this many.")
    ] = 0,
    least_prefix: Annotated[
        int, typer.Option(min=0, help="Fewest keys of a prefix that a group reads once; 0: never.")
    ] = AttentionPlan.least_prefix,
    least_saved_ns: Annotated[
        int, typer.Option(min=0, help="Least time of a program that a group must save; 0: any.")
    ] = AttentionPlan.least_saved_ns,
    window: Annotated[int, typer.Option(min=0, help="Sliding window in keys; 0: none.")] = 0,
    costs: Annotated[
        Path | None, typer.Option(help="Measured costs (JSON); default: modelled costs.")
    ] = None,
    rows: Annotated[
        int, typer.Option(min=0, help="Rows of each table to print; 0: all of them.")
    ] = 12,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show how a batch is cut into units, and which program runs which.

    The Token-Table has the query tokens of each sequence, the Task-Table the units in execution
    order. Costs are modelled unless --costs gives measured ones.
    """
    from nostall.serving.tables.host import build_tables
    from nostall.serving.tables.summary import summarize

    given = load_batch(batch)
    tile_set = _tile_set(tiles, split, units_per_program, least_prefix, least_saved_ns)
    settings = TableSettings(
        heads,
        kv_heads,
        programs,
        tile_set,
        load_costs(costs, tile_set) if costs else None,
        order,
        window=window,
    )
    tables = build_tables(given, settings)
    summary = summarize(given, tables, settings)
    if format is Format.JSON:
        show_json(_document(given, tables, settings, summary))
        return
    _print_summary(summary)
    _print_tables(given, tables, settings, rows)


def _tile_set(
    heights: str, split: int | None, units_per_program: int, least_prefix: int, least_saved_ns: int
) -> TileSet:
    try:
        numbers = tuple(int(height) for height in heights.split(","))
    except ValueError as error:
        raise BadInput(
            f"--tiles {heights}; allowed are numbers separated by commas, such as 16,64,128"
        ) from error
    return TileSet(
        numbers,
        split=TileSet.split if split is None else split,
        units_per_program=units_per_program,
        least_prefix=least_prefix,
        least_saved_ns=least_saved_ns,
    )


def _print_tables(
    batch: RaggedBatch, tables: TaskTables, settings: TableSettings, rows: int
) -> None:
    from nostall.serving.tables.summary import token_table

    tokens = [
        [row.stage.name.lower(), *map(str, row[1:-1]), str(settings.tiles.heights[row.tile])]
        for row in token_table(batch, settings)
    ]
    _print_rows("Token-Table", TOKEN_NAMES, tokens, rows)
    units = [
        [str(program), *map(str, row[:TILE]), str(settings.tiles.heights[row[TILE]]), str(row[-1])]
        for program, row in _units(tables)
    ]
    _print_rows("Task-Table", ("program", *TASK_NAMES), units, rows)
    reductions = [list(map(str, row)) for row in tables.used_reductions.tolist()]
    if reductions:
        _print_rows("Reductions", REDUCTION_NAMES, reductions, rows)
    prefixes = [list(map(str, row)) for row in tables.used_prefix_rows.tolist()]
    if prefixes:
        _print_rows("Query tokens of prefix groups", PREFIX_NAMES, prefixes, rows)


def _units(tables: TaskTables) -> list[tuple[int, list[int]]]:
    """The program and the row of each unit."""
    offsets = tables.used_offsets.tolist()
    tasks = tables.used_tasks.tolist()
    return [
        (program, row)
        for program in range(len(offsets) - 1)
        for row in tasks[offsets[program] : offsets[program + 1]]
    ]


def _print_rows(title: str, columns: tuple[str, ...], cells: list[list[str]], limit: int) -> None:
    shown = cells[:limit] if limit else cells
    more = f", the first {len(shown)}" if len(shown) < len(cells) else ""
    show_table(f"{title}: {len(cells)} rows{more}", columns, shown)


def _print_summary(summary: TableSummary) -> None:
    rows = [
        (
            kind.stage,
            kind.height,
            kind.units,
            kind.split_units,
            f"{kind.row_use:.0%}",
            kind.keys,
            f"{kind.cost_us:,.0f}",
        )
        for kind in summary.kinds
    ]
    columns = ("stage", "tile", "units", "split", "rows used", "keys", "cost (us)")
    show_table("Units by stage and tile", columns, rows)
    least, mean, most = summary.load_us
    out.print(
        f"order {summary.order}: {summary.units} units on {summary.programs} programs; cost of a "
        f"program {least:.1f} to {most:.1f} us, mean {mean:.1f} us, imbalance "
        f"{summary.imbalance:.1%} (largest over mean)"
    )
    out.print(
        f"{summary.reductions} reductions of {summary.scratch_rows} scratch rows; costs are "
        f"{summary.cost_kind} ({summary.cost_source})"
    )


def _document(
    batch: RaggedBatch, tables: TaskTables, settings: TableSettings, summary: TableSummary
) -> dict[str, Any]:
    from nostall.serving.tables.summary import token_table

    columns = {"tokens": TOKEN_NAMES, "tasks": TASK_NAMES, "reductions": REDUCTION_NAMES}
    return {
        "columns": {**columns, "prefix_rows": PREFIX_NAMES},
        "tile_heights": settings.tiles.heights,
        "tokens": [list(row) for row in token_table(batch, settings)],
        "tasks": tables.used_tasks.tolist(),
        "program_offsets": tables.used_offsets.tolist(),
        "reductions": tables.used_reductions.tolist(),
        "prefix_rows": tables.used_prefix_rows.tolist(),
        "summary": {**asdict(summary), "imbalance": summary.imbalance},
    }


def write_batch(
    name: Annotated[
        str | None, typer.Option(help=f"Example: one of {', '.join(EXAMPLES)}.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace to draw lengths from (CSV of Azure or BurstGPT, Mooncake JSON)."),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Batch file; default: standard output.")
    ] = None,
    decodes: Annotated[int, typer.Option(min=0, help="Decodes of a drawn batch.")] = 64,
    verifies: Annotated[int, typer.Option(min=0, help="Verifies of a drawn batch.")] = 0,
    draft_tokens: Annotated[
        int, typer.Option(min=2, max=32, help="Query tokens of a drawn verify.")
    ] = 8,
    trees: Annotated[bool, typer.Option("--trees", help="Give drawn verifies tree masks.")] = False,
    token_budget: Annotated[
        int, typer.Option(min=1, help="Query tokens of a drawn batch; prefills fill it.")
    ] = 4096,
    page_size: Annotated[int, typer.Option(min=16, help="Keys of a page; a multiple of 16.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the pages and of the draw.")] = 0,
) -> None:
    """Write a batch file: an example, or a step with lengths drawn from a trace."""
    if (name is None) == (trace is None):
        raise BadInput(
            "give either --name, an example, or --trace, a file that lengths are drawn from"
        )
    draw = Draw(token_budget, decodes, verifies, draft_tokens, trees, page_size)
    if trace:
        requests = load_requests(trace)
        lengths = [request.prompt for request in requests], [request.output for request in requests]
        batch = draw_batch(*lengths, draw, seed)
    else:
        batch = example(name or "", page_size, seed)
    text = dump_batch(batch)
    if out_file is None:
        typer.echo(text, nl=False)
        return
    write_text_atomically(out_file, text)
    out.print(
        f"{out_file}: {len(batch)} sequences, {batch.query_lengths.sum()} query tokens, "
        f"{batch.kv_lengths.sum()} keys"
    )
    words = ["nostall", "serving", "show", str(out_file)]
    out.print(f"next:     {shlex.join(words)}")
