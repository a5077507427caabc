"""The compiled kernels of an attention step, for an architecture; no GPU is needed.

The launches are those of :class:`nostall.serving.attention.launch.MetaAttention` on tensors without
memory: Triton specializes on their dtypes, strides and alignment as it does on a GPU, so each cubin
is the one that a serving program compiles, and the store finds the result by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from nostall.core.errors import BadInput
from nostall.core.launch import LaunchSpec
from nostall.serving.attention.config import AttentionPlan, AttentionShape
from nostall.serving.attention.winners.on_gpu import GpuBatch
from nostall.serving.batch.ragged import RaggedBatch
from nostall.tuning.sources.source import Source, compute_capability
from nostall.tuning.sources.triton_source import import_triton, pretend_device


@dataclass(frozen=True)
class AttentionStep:
    """What is launched and timed: the attention of one layer in one step."""

    ragged: RaggedBatch
    shape: AttentionShape
    plan: AttentionPlan
    dtype: str
    """``bfloat16`` or ``float16``: of queries, keys and values."""
    name: str
    """Name of the batch, for messages and records."""


def check_step(step: AttentionStep) -> None:
    """Raise :class:`BadInput` for a step whose kernels have no native search."""
    if step.plan.kernel.language == "gluon":
        raise BadInput(
            f"the plan for {step.name} is the Gluon kernel, and native schedules are searched for "
            "the Triton kernels only: warps of the Gluon kernel wait for each other's copies, and "
            "comparing results would not show a race between them; give a batch of decodes, of "
            "verifies, or of prefills beside decodes"
        )
    if not step.ragged.query_lengths.any():
        raise BadInput(f"{step.name} has no query tokens; give a batch with work to measure")


_DEVICE = "nostall"
"""Key of the compiled kernels of a recording in Triton's tables, which no GPU has."""


def attention_functions() -> tuple[Any, ...]:
    """The Triton functions that an attention step launches.

    Raises :class:`BadInput` under Triton's interpreter, which compiles nothing.
    """
    triton = import_triton()
    from nostall.serving.attention.kernel import meta_attention
    from nostall.serving.attention.reduce import reduce_splits

    functions = (meta_attention, reduce_splits)
    if not all(isinstance(function, triton.JITFunction) for function in functions):
        raise BadInput(
            "TRITON_INTERPRET is set, so Triton compiles no kernels; unset it to search native "
            "schedules"
        )
    return functions


def step_sources(step: AttentionStep, sms: int, arch: str = "sm_90") -> list[Source]:
    """The kernels of a step on a GPU of ``sms`` SMs, each with its PTX, in order of the launches.

    Raises :class:`BadInput` for a step without native search, or if a kernel does not compile.
    """
    check_step(step)
    batch = GpuBatch.empty(step.ragged, step.shape, getattr(torch, step.dtype))
    with recorded_sources(arch, f"attention of {step.name}") as sources:
        batch.launch(step.plan, sms)(batch.caches[0], torch.empty_like(batch.query))
    return sources


@contextmanager
def recorded_sources(arch: str, origin: str) -> Iterator[list[Source]]:
    """Compile the attention kernels of all launches in this context, instead of launching them.

    Yields the list that each launch adds its kernel to.  Triton's own cache is used, and no
    attachment point that would replace a cubin.
    """
    triton = import_triton()
    from triton.backends.compiler import GPUTarget

    functions, knobs = attention_functions(), triton.knobs
    target = GPUTarget("cuda", compute_capability(arch), 32)
    sources: list[Source] = []

    def record(run: Any) -> Any:
        def compile_only(*args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
            compiled = run(*args, grid=grid, warmup=True, **options)
            sources.append(_source(compiled, tuple(map(int, grid)), origin))

        return compile_only

    with pretend_device(triton.runtime.driver, target, _DEVICE), knobs.cache.scope():
        knobs.cache.manager_class = None
        for function in functions:
            function.run = record(function.run)
        try:
            yield sources
        finally:
            for function in functions:
                del function.run
                function.device_caches.pop(_DEVICE, None)


def _source(compiled: Any, grid: tuple[int, ...], origin: str) -> Source:
    metadata = compiled.metadata
    x, y, z = (*grid, 1, 1)[:3]
    warps = int(metadata.num_warps)
    # The arguments are left out: random numbers in the task tables would be no launch of a step.
    launch = LaunchSpec(
        grid=(x, y, z), block=(32 * warps, 1, 1), shared=int(metadata.shared), num_warps=warps
    )
    options = {n: getattr(metadata, n, None) for n in ("enable_fp_fusion", "ptx_options")}
    provenance = {
        "compiler": f"triton {metadata.triton_version}",
        "arch": f"sm_{metadata.target.arch}",
        "options": ", ".join(f"{k}={v}" for k, v in options.items() if v is not None),
    }
    return Source(
        cubin=bytes(compiled.asm["cubin"]),
        kernel=str(metadata.name),
        launch=launch,
        origin=origin,
        provenance=MappingProxyType(provenance),
        ptx=str(compiled.asm["ptx"]),
    )
