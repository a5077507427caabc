"""Precision of matrix products by PyTorch's flags.

The back end reads it for each graph, also when it loads a stored choice and no rules.
"""

from __future__ import annotations

import torch


def allows_tf32() -> bool:
    """Whether PyTorch's flags let products of fp32 round their operands to TF32."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the newer flag is set to a value that the older one cannot express
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
