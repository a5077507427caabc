"""Times of generated kernels, asked of the GPU here, one by one.

Whether a program gains is for a comparison of whole programs to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from nostall.core.errors import MissingPart
from nostall.gpu import Kernel, LocalGpu
from nostall.tuning.fusing.compiled import Compiled
from nostall.tuning.source import Source

Measure = Callable[[Source], tuple[float | None, str]]
"""Seconds of a launch (None where it failed, and why), and else the GPU's name."""


def timed(made: Compiled, measure: Measure) -> tuple[Compiled, str]:
    """The kernel with its time, and the GPU's name.  What fails there says so in its place."""
    assert made.source is not None
    seconds, told = measure(made.source)
    update = {"not_measured": told} if seconds is None else {"measured": seconds}
    return replace(made, binary=made.binary.model_copy(update=update)), told


def check_gpu() -> None:
    """Raises :class:`MissingPart` where there is no GPU."""
    if not torch.cuda.is_available():
        raise MissingPart(
            "--measure times kernels on a GPU, and PyTorch sees none here; `nostall doctor` shows "
            "what is there; without --measure times are modelled"
        )


def on_this_gpu(source: Source) -> tuple[float | None, str]:
    """Median over paired launches of a kernel with itself, on random inputs, in a process of its
    own."""
    assert source.launch is not None
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch)) as gpu:
        outcome = gpu.evaluate(source.cubin)
        device = gpu.info.get("gpu", "a GPU")
    if outcome.timing is None:
        return None, f"{outcome.status}: {outcome.detail}"
    return median(outcome.timing.original), device
