"""LayerNorm, GELU and a mask: memory-bound operators with a row length that is no power of two.

nostall fuse examples/fusion/layernorm_gelu.py:layernorm_gelu
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def layernorm_gelu(x: Tensor, weight: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
    """``x`` (rows, columns), ``weight`` and ``bias`` (columns), ``keep`` (rows, columns) bool."""
    return F.gelu(F.layer_norm(x, weight.shape, weight, bias)) * keep


def inputs() -> tuple[Tensor, ...]:
    """Fake tensors are made of these: only shapes and dtypes count."""
    half = {"dtype": torch.float16}
    return (
        torch.randn(4096, 5000, **half),
        torch.ones(5000, **half),
        torch.zeros(5000, **half),
        torch.ones(4096, 5000, dtype=torch.bool),
    )
