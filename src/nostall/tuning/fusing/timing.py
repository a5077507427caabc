"""Measurement of generated kernels on this machine's GPU, each kernel on its own.

Whether a whole function gains can only be decided by measuring the whole function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from nostall.core.errors import MissingPart
from nostall.gpu import Kernel, LocalGpu
from nostall.tuning.fusing.binaries import CompiledKernel
from nostall.tuning.sources.source import Source

Measure = Callable[[Source], tuple[float | None, str]]
"""Function that measures a kernel: (seconds, GPU name), or (None, reason) if it fails."""


def time_kernel(kernel: CompiledKernel, measure: Measure) -> tuple[CompiledKernel, str]:
    """Measure a kernel; its record gets the measured time, or the reason of the failure.

    Returns the kernel and the text of ``measure``: the GPU's name, or the reason.
    """
    assert kernel.source is not None
    seconds, text = measure(kernel.source)
    update = {"not_measured": text} if seconds is None else {"measured": seconds}
    return replace(kernel, binary=kernel.binary.model_copy(update=update)), text


def check_gpu() -> None:
    """Raise :class:`MissingPart` if PyTorch sees no GPU."""
    if not torch.cuda.is_available():
        raise MissingPart(
            "--measure needs a GPU, and PyTorch sees none; `nostall doctor` checks this machine; "
            "without --measure, times are modelled"
        )


def measure_on_this_gpu(source: Source) -> tuple[float | None, str]:
    """Median time of a kernel on random inputs, measured in a separate process.

    The measurement compares the kernel with itself in paired launches.
    """
    assert source.launch is not None
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch)) as gpu:
        outcome = gpu.evaluate(source.cubin)
        device = gpu.info.get("gpu", "a GPU")
    if outcome.timing is None:
        return None, f"{outcome.status}: {outcome.detail}"
    return median(outcome.timing.original), device
