"""The command ``nostall serving batch``: write an example batch, or one drawn from a trace."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.terminal.console import out
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_text_atomically
from nostall.serving.batch.batch_file import dump_batch
from nostall.serving.batch.examples import EXAMPLES, Draw, draw_batch, example
from nostall.serving.batch.ragged import RaggedBatch
from nostall.serving.traces.requests import load_requests


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
    page_size: Annotated[int, typer.Option(help="Keys of a page; a multiple of 16.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the pages and of the draw.")] = 0,
) -> None:
    """Write a batch file: an example, or a step with lengths drawn from a trace."""
    if (name is None) == (trace is None):
        raise BadInput(
            "give either --name, an example, or --trace, a file that lengths are drawn from"
        )
    draw = Draw(token_budget, decodes, verifies, draft_tokens, trees, page_size)
    batch = _drawn(trace, draw, seed) if trace else example(name or "", page_size, seed)
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


def _drawn(trace: Path, draw: Draw, seed: int) -> RaggedBatch:
    requests = load_requests(trace)
    return draw_batch(
        [request.prompt for request in requests],
        [request.output for request in requests],
        draw,
        seed,
    )
