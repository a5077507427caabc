"""Liger's kernels as methods, for the chains that compute the same as one of them.

They are called without autograd, as in a CUDA graph.  Some write their results over their inputs.
Liger is not a dependency: kernels that cannot be imported are skipped.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.timing import Inputs, Method

CASTING_GEMMA = 1
"""Casting mode of Liger's RMSNorm that computes everything in fp32, as the chain does."""


class NoLigerKernel(Exception):
    """Liger has no kernel for a chain, or Liger cannot be imported."""


def liger_method(chain: Chain) -> Method:
    """Liger's kernel for a chain.

    Raises :class:`NoLigerKernel` if there is none.  Errors other than ImportError that importing
    Liger raises are passed on.
    """
    name = chain.function.__name__
    if name not in _KERNELS:
        raise NoLigerKernel(f"Liger has no kernel that computes {name}")
    module, make_run, overwrites = _KERNELS[name]
    try:
        ops = importlib.import_module(f"liger_kernel.ops.{module}")
    except ImportError as error:
        raise NoLigerKernel(f"liger-kernel cannot be imported: {error}") from error
    return Method(make_run(ops), overwrites)


def _residual_norm(ops: Any) -> Callable[[Inputs], object]:
    """Residual addition and RMSNorm; Liger's kernel also writes the reciprocal RMS of each row."""

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        x, residual, weight = inputs
        normed, total, *_ = ops.fused_add_rms_norm_forward(x, residual, weight, 1e-6, 0.0, "llama")
        return normed, total

    return run


def _norm_backward(ops: Any) -> Callable[[Inputs], object]:
    def run(inputs: Inputs) -> object:
        dy, x, mean, rstd, weight, bias = inputs
        return ops.layer_norm_backward(dy, x, weight, bias, mean.view(-1), rstd.view(-1))

    return run


def _rms_norm_backward(ops: Any) -> Callable[[Inputs], object]:
    from liger_kernel.ops.utils import calculate_settings

    def run(inputs: Inputs) -> object:
        dy, x, rstd, weight = inputs
        block_size, num_warps = calculate_settings(x.shape[-1])
        return ops.rms_norm_backward(
            dy, x, weight, rstd.view(-1), 0.0, CASTING_GEMMA, block_size, num_warps, False, None
        )

    return run


def _swiglu(ops: Any) -> Callable[[Inputs], object]:
    return lambda inputs: ops.swiglu_forward(*inputs)[2]


def _swiglu_backward(ops: Any) -> Callable[[Inputs], object]:
    def run(inputs: Inputs) -> object:
        dy, a, b = inputs
        return ops.swiglu_backward(a, b, dy)

    return run


def _geglu(ops: Any) -> Callable[[Inputs], object]:
    return lambda inputs: ops.geglu_forward(*inputs)[2]


def _cross_entropy(ops: Any) -> Callable[[Inputs], object]:
    """Liger's kernel alone: its wrapper synchronizes, which a CUDA graph cannot capture."""

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        x, target = inputs
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


_KERNELS: dict[str, tuple[str, Callable[[Any], Callable[[Inputs], object]], bool]] = {
    "residual_norm": ("fused_add_rms_norm", _residual_norm, False),
    "norm_backward": ("layer_norm", _norm_backward, False),
    "rms_norm_backward": ("rms_norm", _rms_norm_backward, False),
    "swiglu": ("swiglu", _swiglu, False),
    "swiglu_backward": ("swiglu", _swiglu_backward, True),
    "geglu": ("geglu", _geglu, False),
    "cross_entropy": ("cross_entropy", _cross_entropy, True),
}
