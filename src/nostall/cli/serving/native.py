"""The command ``nostall serving native``: native schedules of a step's attention kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nostall.cli.serving.search import (
    DtypeOption,
    HeadDimOption,
    HeadsOption,
    KvHeadsOption,
    SeedOption,
    check_dtype,
    given_shape,
)
from nostall.cli.terminal.console import out
from nostall.serving.attention.config import AttentionShape
from nostall.serving.batch.batch_file import load_batch
from nostall.serving.batch.ragged import RaggedBatch

if TYPE_CHECKING:
    from nostall.tuning.attention.sources import AttentionStep


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
