"""The commands ``nostall serving search`` and ``native``, for the kind of a batch.

The first finds the fastest plan of attention, the second native schedules of its kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nostall.cli.terminal.console import out
from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape
from nostall.serving.batch.batch_file import load_batch
from nostall.serving.batch.ragged import RaggedBatch

if TYPE_CHECKING:
    from nostall.tuning.attention.sources import AttentionStep

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


def native(
    batch: Annotated[Path, typer.Argument(help="Batch file of `nostall serving batch`.")],
    heads: HeadsOption = 32,
    kv_heads: KvHeadsOption = 8,
    head_dim: HeadDimOption = 128,
    dtype: DtypeOption = "bfloat16",
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds of the search of each kernel.")
    ] = 60.0,
    seed: SeedOption = 0,
    assemble_only: Annotated[
        bool,
        typer.Option(
            "--assemble-only",
            help="Assemble and verify the candidates of the search's start for sm_90; needs no "
            "GPU, and stores nothing.",
        ),
    ] = False,
) -> None:
    """Search native schedules of the attention kernels of a batch's kind, on this GPU.

    The plan is the winner of `nostall serving search`, or that of the rules. What ptxas is given
    changes (order, registers, options), then native instructions move. A kernel is stored only if
    the verifier proves it, its results have the original's bits, and the step is measured as
    faster. The vLLM plug-in and `nostall apply` load it on this GPU.
    """
    check_dtype(dtype)
    given = load_batch(batch)
    shape = given_shape(given, heads, kv_heads, head_dim)
    if assemble_only:
        _assemble(given, batch.name, shape, dtype)
    else:
        search_native(given, batch.name, shape, dtype, seconds, seed)


def search_native(
    batch: RaggedBatch, name: str, shape: AttentionShape, dtype: str, seconds: float, seed: int
) -> None:
    """Search on the current GPU, and print a line for each kernel."""
    from nostall.tuning.sources.triton_source import import_triton

    import_triton()
    # torch and Triton are imported late: errors of the arguments come first.
    from nostall.store import Store
    from nostall.tuning.attention.job import Gpu, native_settings, tune_step

    gpu = Gpu.present()
    step = _step(batch, name, shape, dtype, gpu.name)
    for found in tune_step(step, gpu, native_settings(seconds, seed), Store()):
        decision = found.result.decision
        compared = decision.comparison if decision else None
        ratio = "-"
        if compared is not None:
            ratio = f"{compared.ratio:.4f} [{compared.low:.4f}, {compared.high:.4f}]"
        evaluations = found.result.search.evaluations
        out.print(f"{found.source.kernel}: {evaluations} candidates; step original / best: {ratio}")
        if found.row is not None:
            out.print(f"stored record {found.row.id[:12]}; see `nostall store show`")
        else:
            out.print("no candidate is surely faster; nothing is stored")
            out.print(f"a program on this GPU runs {found.before}")


def _assemble(batch: RaggedBatch, name: str, shape: AttentionShape, dtype: str) -> None:
    """Assemble and verify the portfolio of each kernel for an H100, and print a line for each."""
    from nostall.core.errors import ContractBroken
    from nostall.tuning.attention.job import check_portfolio, require_assemblers
    from nostall.tuning.attention.sources import step_sources

    assemblers = require_assemblers()
    for source in step_sources(_step(batch, name, shape, dtype, ""), sms=132):
        checked = check_portfolio(source, assemblers)
        built, tried = checked.statuses["built"], checked.statuses.total()
        safe = checked.codes - len(checked.unsafe)
        out.print(
            f"{source.kernel}: {built} of {tried} candidates assembled, {safe} of "
            f"{checked.codes} different codes accepted by the verifier"
        )
        if checked.unsafe:
            raise ContractBroken(f"the verifier refuses a candidate: {checked.unsafe[0]}")


def _step(
    batch: RaggedBatch, name: str, shape: AttentionShape, dtype: str, gpu: str
) -> AttentionStep:
    """The step with the plan in force; ``gpu``: its name, empty for the plan of the rules."""
    import torch

    from nostall.serving.attention.gluon_launch import has_gluon_kernel, supports_gluon
    from nostall.serving.attention.rules import plan_for
    from nostall.serving.attention.winners.on_gpu import kind_of
    from nostall.serving.attention.winners.plan_store import plan_in_force
    from nostall.tuning.attention.sources import AttentionStep

    kind = kind_of(batch)
    if gpu:
        has_gluon = has_gluon_kernel(torch.device("cuda", torch.cuda.current_device()))
        plan = plan_in_force(shape, dtype, kind, gpu, has_gluon)
    else:
        plan = plan_for(shape, kind, has_gluon=supports_gluon(shape))
    return AttentionStep(batch, shape, plan, dtype, name)
