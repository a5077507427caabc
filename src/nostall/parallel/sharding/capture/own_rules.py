"""nostall's own sharding rules, for operators that DTensor has none for.

Each rule gives the strategies of an operator on one mesh dimension, besides the replicated one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nostall.parallel.sharding.placements import PARTIAL_SUM, REPLICATED, Strategy, shard

Rule = Callable[[Sequence[Any], dict[str, Any]], list[Strategy]]
_aten = torch.ops.aten


def _attention(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Attention on CPUs: samples and heads are independent; (query, key, value, mask)."""
    mask = kwargs.get("attn_mask")
    return [
        Strategy((p, p, p, *_mask_placement(mask, d)), (p, p))
        for d, p in ((0, shard(0)), (1, shard(1)))
        if _same_heads(args[:3])
    ]


def _attention_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Its backward pass; (gradient, query, key, value, output, logsumexp, mask)."""
    mask = kwargs.get("attn_mask")
    return [
        Strategy((p,) * 6 + _mask_placement(mask, d), (p, p, p))
        for d, p in ((0, shard(0)), (1, shard(1)))
        if _same_heads(args[1:4])
    ]


def _same_heads(tensors: Sequence[torch.Tensor]) -> bool:
    return len({t.shape[:2] for t in tensors}) == 1


def _mask_placement(mask: torch.Tensor | None, dim: int) -> tuple[str, ...]:
    """Placement of an attention mask, whose last dimensions are broadcast against the scores."""
    if mask is None:
        return ()
    own = dim - (4 - mask.dim())
    return (shard(own) if own >= 0 and mask.shape[own] > 1 else REPLICATED,)


def _group_norm(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Samples are independent; (input, weight, bias)."""
    parameters = sum(isinstance(a, torch.Tensor) for a in args[1:3])
    return [Strategy((shard(0), *(REPLICATED,) * parameters), (shard(0),) * 3)]


def _group_norm_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Gradients of weight and bias are sums over samples; (gradient, input, mean, rstd, weight)."""
    weight = (REPLICATED,) if isinstance(args[4], torch.Tensor) else ()
    return [Strategy((shard(0),) * 4 + weight, (shard(0), PARTIAL_SUM, PARTIAL_SUM))]


def _elementwise(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """A copy of one tensor."""
    placements = [*map(shard, range(args[0].dim())), PARTIAL_SUM]
    return [Strategy((p,), (p,)) for p in placements]


def _convolution(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Samples and output channels are independent; (input, weight, bias)."""
    has_bias, groups = isinstance(args[2], torch.Tensor), args[8]
    samples = Strategy((shard(0), REPLICATED, *(REPLICATED,) * has_bias), (shard(0),))
    if groups != 1:
        return [samples]
    return [samples, Strategy((REPLICATED, shard(0), *(shard(0),) * has_bias), (shard(1),))]


def _convolution_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Gradients of weight and bias are sums over samples, that of the input over output channels;
    (gradient, input, weight)."""
    samples = Strategy((shard(0), shard(0), REPLICATED), (shard(0), PARTIAL_SUM, PARTIAL_SUM))
    if args[9] != 1:  # groups
        return [samples]
    channels = Strategy((shard(1), REPLICATED, shard(0)), (PARTIAL_SUM, shard(0), shard(0)))
    return [samples, channels]


def _max_pool(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Samples and channels are independent; the indices count within a plane."""
    return [Strategy((shard(d),), (shard(d), shard(d))) for d in range(args[0].dim() - 2)]


def _max_pool_backward(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """(gradient, input, ..., indices)."""
    return [Strategy((shard(d),) * 3, (shard(d),)) for d in range(args[0].dim() - 2)]


def _scatter_value(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Strategy]:
    """Write one number at indices along a dimension; the others are independent;
    (tensor, dimension, indices)."""
    tensor, indices = args[0], args[2]
    written = args[1] % max(1, tensor.dim())
    return [
        Strategy((shard(d), shard(d)), (shard(d),))
        for d in range(tensor.dim())
        if d != written and tensor.shape[d] == indices.shape[d]
    ]


RULES: dict[Any, Rule] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.lift_fresh_copy.default: _elementwise,
}
"""Rules by operator; they replace DTensor's."""
FALLBACK_RULES: dict[Any, Rule] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.max_pool2d_with_indices.default: _max_pool,
    _aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    _aten.scatter.value: _scatter_value,
}
"""Rules by operator for versions of torch in which DTensor has none or shards nothing (2.11)."""
