"""Operators that replace, on a GPU, those that PyTorch has for CPUs only.

Steps are traced for CPUs, so that a plan can be made without a GPU.  The one operator that PyTorch
selects by device is attention: the CPU's becomes FlashAttention for half precision without a mask,
and memory-efficient attention otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nostall.parallel.errors import BadPlan

_aten = torch.ops.aten
_ALIGNMENT = 16
"""Memory-efficient attention reads masks in groups of this many columns."""


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logarithms of the sums of exponentials."""
    _check(query, dropout_p)
    if _is_flash(query, attn_mask):
        result = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    else:
        result = _aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(query, key, attn_mask), True, 0.0, is_causal, scale=scale
        )
    return result[0], result[1]


def _attention_backward(
    *saved: Any, attn_mask: torch.Tensor | None = None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; ``saved`` are the arguments of the CPU's operator."""
    gradient, query, key, value, output, sums, _dropout, is_causal = saved
    # Without dropout, kernels read neither seed nor offset, but the operators need tensors.
    if _is_flash(query, attn_mask):
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        offset = torch.empty((), dtype=torch.uint64, device=query.device)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, output, sums, None, None, query.shape[2], key.shape[2],
            0.0, is_causal, seed, offset, scale=scale,
        )  # fmt: skip
    else:
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, _bias(query, key, attn_mask), output, sums, seed, seed,
            0.0, [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def _check(query: torch.Tensor, dropout_p: float) -> None:
    """Raise :class:`BadPlan` for attention that has no kernel here."""
    if dropout_p:
        raise BadPlan(
            f"attention with dropout {dropout_p} does not run sharded on a GPU, because shards "
            "would draw other random numbers; set the dropout of attention to 0"
        )
    if query.dtype is torch.float64:
        raise BadPlan(
            "attention in float64 has no fused kernel on a GPU; use float32, bfloat16 or float16"
        )


def _is_flash(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return mask is None and query.dtype in (torch.bfloat16, torch.float16)


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask added to the scores, for all samples and heads, with aligned rows."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        mask = zeros.masked_fill(mask.logical_not(), float("-inf"))
    columns = key.shape[2]
    padded = torch.nn.functional.pad(mask, (0, -columns % _ALIGNMENT))[..., :columns]
    return padded.expand(*query.shape[:3], columns)


GPU_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
"""By operator for CPUs, the function that replaces it."""
