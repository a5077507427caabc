"""The command ``nostall serving search``: the fastest plan of attention for a batch's kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.terminal.console import out
from nostall.core.search import Budget
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.rules import PLANS, TALL_PLANS, BatchKind
from nostall.serving.attention.space import PlanSpace
from nostall.serving.batch.batch_file import load_batch
from nostall.serving.batch.ragged import RaggedBatch

DTYPES = ("bfloat16", "float16")


def kind_of(batch: RaggedBatch) -> BatchKind:
    """The kind of a batch, from its lengths."""
    lengths = batch.query_lengths[batch.query_lengths > 0]
    return BatchKind(
        bool((lengths == 1).any()), int(lengths.max(initial=1)), batch.speculative_limit
    )


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
    from nostall.core.errors import BadInput

    if dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype}; allowed are {', '.join(DTYPES)}")
    given = load_batch(batch)
    has_trees = any(mask is not None for mask in given.tree_masks)
    shape = AttentionShape(heads, kv_heads, head_dim, given.page_size, has_trees=has_trees)
    if shape.padded_head_dim > 128:
        raise BadInput(f"--head-dim {head_dim}; plans are searched for heads of up to 128")
    # torch and Triton are imported late: errors of the arguments come first.
    import torch

    from nostall.gpu.clock import ReplayClock
    from nostall.serving.attention.tall_launch import has_tall_kernel, supports_tall
    from nostall.serving.attention.winners.gpu_batch import GpuBatch
    from nostall.serving.attention.winners.plan_store import PlanKey, record_of, save_plan
    from nostall.serving.attention.winners.search import search_plan
    from nostall.serving.gemm.gpu_layer import current_gpu

    gpu, device = current_gpu(), torch.device("cuda", torch.cuda.current_device())
    kind = kind_of(given).kind(shape.group)
    kernels = [PLANS[kind].kernel, *(plan.kernel for plan in PLANS.values())]
    rule = PLANS[kind]
    if kind in TALL_PLANS and supports_tall(shape) and has_tall_kernel(device):
        rule = TALL_PLANS[kind]
    tensors = GpuBatch.of(given, shape, getattr(torch, dtype), device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    found = search_plan(
        PlanSpace(kernels, has_fixed_grid=True),
        rule,
        lambda plan: tensors.run(plan, sms),
        ReplayClock(),
        Budget(seconds=seconds),
        seed,
    )
    compared = found.comparison
    shown = f"{compared.ratio:.3f} [{compared.low:.3f}, {compared.high:.3f}]" if compared else "-"
    out.print(f"{kind}: {found.evaluations} plans; rule / best: {shown}")
    if found.plan is None or compared is None:
        out.print("no plan is surely faster than the rule's; nothing is stored")
        return
    ratios = (compared.ratio, compared.low, compared.high)
    key = PlanKey.of(shape, dtype, kind, gpu)
    path = save_plan(
        record_of(key, found.plan, batch.name, ratios, found.samples, found.evaluations)
    )
    out.print(f"stored {path}")
