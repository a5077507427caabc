"""The command ``nostall serving search``: the fastest plan of attention for a batch's kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.terminal.console import out
from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape
from nostall.serving.batch.batch_file import load_batch

DTYPES = ("bfloat16", "float16")


def search(
    batch: Annotated[Path, typer.Argument(help="Batch file of `nostall serving batch`.")],
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="64, 96, 128 or 256.")] = 128,
    dtype: Annotated[str, typer.Option(help=" or ".join(DTYPES) + ".")] = "bfloat16",
    seconds: Annotated[float, typer.Option(min=1.0, help="Seconds of the search.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
) -> None:
    """Search the fastest plan of attention for the kind of a batch, on this GPU.

    A plan is stored only if two comparisons say that it is faster than the plan of the rules. It
    holds for this GPU, shape, dtype, page size and these versions, in the vLLM plug-in too.
    """
    if dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype}; allowed are {', '.join(DTYPES)}")
    given = load_batch(batch)
    has_trees = any(mask is not None for mask in given.tree_masks)
    shape = AttentionShape(
        heads,
        kv_heads,
        head_dim,
        given.page_size,
        has_trees=has_trees,
        has_prefixes=bool(given.prefix_groups),
    )
    if shape.padded_head_dim > 128:
        raise BadInput(f"--head-dim {head_dim}; plans are searched for heads of up to 128")
    # torch and Triton are imported late: errors of the arguments come first.
    from nostall.serving.attention.winners.on_gpu import search_on_gpu

    kind, found, path = search_on_gpu(given, batch.name, shape, dtype, seconds, seed)
    compared = found.comparison
    shown = f"{compared.ratio:.3f} [{compared.low:.3f}, {compared.high:.3f}]" if compared else "-"
    out.print(f"{kind}: {found.evaluations} plans; rule / best: {shown}")
    if path is None:
        out.print("no plan is surely faster than the rule's; nothing is stored")
    else:
        out.print(f"stored {path}")
