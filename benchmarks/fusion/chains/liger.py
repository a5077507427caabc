"""Liger's kernels for the chains that compute the same as one of them.

The raw functions are called, without autograd, as they would run inside a CUDA graph.  Some write
their results over their inputs.  Liger is no dependency: what cannot be imported is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.timing import Inputs, Method

GEMMA = 1
"""Casting mode of Liger's RMSNorm that computes everything in fp32, as the chain does."""


class NoLiger(Exception):
    """Liger has no kernel for a chain, or is not there; says which."""


def liger(chain: Chain) -> Method:
    """Raises :class:`NoLiger`, or what importing Liger raises."""
    name = chain.function.__name__
    if name not in _OF:
        raise NoLiger(f"Liger has no kernel that computes {name}")
    module, make, overwrites = _OF[name]
    try:
        ops = importlib.import_module(f"liger_kernel.ops.{module}")
    except ImportError as error:
        raise NoLiger(f"liger-kernel cannot be imported: {error}") from error
    return Method(make(ops), overwrites)


def _residual_norm(ops: Any) -> Callable[[Inputs], object]:
    """Also writes the reciprocal deviation of each row."""

    def run(given: Inputs) -> tuple[Tensor, Tensor]:
        x, residual, weight = given
        normed, total, *_ = ops.fused_add_rms_norm_forward(x, residual, weight, 1e-6, 0.0, "llama")
        return normed, total

    return run


def _norm_backward(ops: Any) -> Callable[[Inputs], object]:
    def run(given: Inputs) -> object:
        dy, x, mean, rstd, weight, bias = given
        return ops.layer_norm_backward(dy, x, weight, bias, mean.view(-1), rstd.view(-1))

    return run


def _rms_norm_backward(ops: Any) -> Callable[[Inputs], object]:
    from liger_kernel.ops.utils import calculate_settings

    def run(given: Inputs) -> object:
        dy, x, rstd, weight = given
        width, warps = calculate_settings(x.shape[-1])
        return ops.rms_norm_backward(
            dy, x, weight, rstd.view(-1), 0.0, GEMMA, width, warps, False, None
        )

    return run


def _swiglu(ops: Any) -> Callable[[Inputs], object]:
    return lambda given: ops.swiglu_forward(*given)[2]


def _swiglu_backward(ops: Any) -> Callable[[Inputs], object]:
    def run(given: Inputs) -> object:
        dy, a, b = given
        return ops.swiglu_backward(a, b, dy)

    return run


def _geglu(ops: Any) -> Callable[[Inputs], object]:
    return lambda given: ops.geglu_forward(*given)[2]


def _cross_entropy(ops: Any) -> Callable[[Inputs], object]:
    """Its kernel alone: the function around it waits for the GPU, which no CUDA graph can hold."""

    def run(given: Inputs) -> tuple[Tensor, Tensor]:
        x, target = given
        rows, columns = x.shape
        loss = torch.zeros(rows, dtype=x.dtype, device=x.device)
        ops.liger_cross_entropy_kernel[(rows,)](
            X_ptr=x,
            X_stride=x.stride(0),
            Y_ptr=target,
            Y_stride=1,
            weight_ptr=None,
            loss_ptr=loss,
            z_loss_ptr=None,
            loss_stride=1,
            token_accuracy_ptr=None,
            token_accuracy_stride=0,
            predicted_tokens_ptr=None,
            predicted_tokens_stride=0,
            n_cols=columns,
            n_non_ignore=rows,
            sum_non_ignore_weight=rows,
            ignore_index=-100,
            weight_sum=0.0,
            lse_square_scale=0.0,
            label_smoothing=0.0,
            reduction="none",
            softcap=None,
            RETURN_Z_LOSS=False,
            RETURN_TOKEN_ACCURACY=False,
            RETURN_PREDICTED_TOKENS=False,
            BLOCK_SIZE=min(ops.MAX_FUSED_SIZE, 1 << (columns - 1).bit_length()),
            HAS_WEIGHT=False,
            HAS_SOFTCAPPING=False,
            HAS_GRADIENTS=True,
            num_warps=32,
        )
        return loss, x

    return run


_OF: dict[str, tuple[str, Callable[[Any], Callable[[Inputs], object]], bool]] = {
    "residual_norm": ("fused_add_rms_norm", _residual_norm, False),
    "norm_backward": ("layer_norm", _norm_backward, False),
    "rms_norm_backward": ("rms_norm", _rms_norm_backward, False),
    "swiglu": ("swiglu", _swiglu, False),
    "swiglu_backward": ("swiglu", _swiglu_backward, True),
    "geglu": ("geglu", _geglu, False),
    "cross_entropy": ("cross_entropy", _cross_entropy, True),
}
