"""Random input tensors for timing kernels, with given shapes and strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Layout = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides (in elements) and dtype of a tensor."""


def synthetic_inputs(layouts: Sequence[Layout], device: torch.device) -> list[Tensor]:
    """Random tensors with these layouts; the same values in every call.

    Floating-point values are normally distributed.  Integers are 0 or 1, so they are valid indices
    of any axis with at least two elements.  The process's own random number generators are not
    used.
    """
    generator = torch.Generator(device).manual_seed(0)
    inputs = []
    for shape, strides, dtype in layouts:
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        memory = torch.empty(0 if 0 in shape else span, dtype=dtype, device=device)
        inputs.append(_fill(memory, generator).as_strided(shape, strides))
    return inputs


def _fill(memory: Tensor, generator: torch.Generator) -> Tensor:
    if not memory.is_floating_point():
        return memory.random_(0, 2, generator=generator)
    return memory.copy_(torch.randn(memory.shape, device=memory.device, generator=generator))
