"""The command ``nostall serving search``: the fastest plan of attention for a batch's kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.terminal.console import out
from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape
from nostall.serving.batch.batch_file import load_batch
from nostall.serving.batch.ragged import RaggedBatch

DTYPES = ("bfloat16", "float16")
HeadsOption = Annotated[int, typer.Option(min=1, help="Query heads.")]
KvHeadsOption = Annotated[int, typer.Option(min=1, help="KV heads.")]
HeadDimOption = Annotated[int, typer.Option(help="64, 96, 128 or 256.")]
DtypeOption = Annotated[str, typer.Option(help=" or ".join(DTYPES) + ".")]
SeedOption = Annotated[int, typer.Option(help="Seed of the search.")]


def search(
    batch: Annotated[Path, typer.Argument(help="Batch file of `nostall serving batch`.")],
    heads: HeadsOption = 32,
    kv_heads: KvHeadsOption = 8,
    head_dim: HeadDimOption = 128,
    dtype: DtypeOption = "bfloat16",
    seconds: Annotated[float, typer.Option(min=1.0, help="Seconds of the search.")] = 60.0,
    seed: SeedOption = 0,
    native_seconds: Annotated[
        float,
        typer.Option(
            "--native",
            min=0.0,
            help="Then search native schedules of the plan's kernels, for so many seconds each, "
            "as `nostall serving native` does; 0: do not.",
        ),
    ] = 0.0,
) -> None:
    """Search the fastest plan of attention for the kind of a batch, on this GPU.

    A plan is stored only if two comparisons say that it is faster than the plan of the rules. It
    holds for this GPU, shape, dtype, page size and these versions, in the vLLM plug-in too.
    """
    check_dtype(dtype)
    given = load_batch(batch)
    shape = given_shape(given, heads, kv_heads, head_dim)
    # torch and Triton are imported late: errors of the arguments come first.
    from nostall.attach.vllm.routing import plan_kinds
    from nostall.serving.attention.winners.on_gpu import search_on_gpu

    kind, found, path = search_on_gpu(given, batch.name, shape, dtype, seconds, seed)
    compared = found.comparison
    shown = f"{compared.ratio:.3f} [{compared.low:.3f}, {compared.high:.3f}]" if compared else "-"
    out.print(f"{kind}: {found.evaluations} plans; rule / best: {shown}")
    if path is None:
        out.print("no plan is surely faster than the rule's; nothing is stored")
    else:
        out.print(f"stored {path}")
        if kind not in plan_kinds(shape):
            out.print(
                f"the vLLM plug-in does not use plans of {kind}: steps with speculation may hold "
                "decodes; for those, search a batch file that has a decode, too"
            )
    if native_seconds:
        from nostall.cli.serving.native import search_native

        search_native(given, batch.name, shape, dtype, native_seconds, seed)


def check_dtype(dtype: str) -> None:
    """Raise :class:`BadInput` for a dtype that is not searched."""
    if dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype}; allowed are {', '.join(DTYPES)}")


def given_shape(batch: RaggedBatch, heads: int, kv_heads: int, head_dim: int) -> AttentionShape:
    """The shape of a batch's attention.  Raises :class:`BadInput` if it has no plans to search."""
    shape = AttentionShape(
        heads,
        kv_heads,
        head_dim,
        batch.page_size,
        has_trees=any(mask is not None for mask in batch.tree_masks),
        has_prefixes=bool(batch.prefix_groups),
    )
    if shape.padded_head_dim > 128:
        raise BadInput(f"--head-dim {head_dim}; plans are searched for heads of up to 128")
    return shape
