"""LayerNorm, GELU and a mask as one function: memory-bound operators on rows of 5,000 elements.

The row length is no power of two. Run it with

    nostall fuse examples/fusion/layernorm_gelu.py:layernorm_gelu
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def layernorm_gelu(x: Tensor, weight: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
    """GELU of the layer norm of ``x``, set to 0 where ``keep`` is False.

    Shapes: ``x`` and ``keep`` (rows, columns), ``weight`` and ``bias`` (columns,).
    """
    return F.gelu(F.layer_norm(x, weight.shape, weight, bias)) * keep


def inputs() -> tuple[Tensor, ...]:
    """The inputs to trace with; only their shapes and dtypes are used, not their values."""
    half = {"dtype": torch.float16}
    return (
        torch.randn(4096, 5000, **half),
        torch.ones(5000, **half),
        torch.zeros(5000, **half),
        torch.ones(4096, 5000, dtype=torch.bool),
    )
