"""The norm of all gradients over all ranks, each value counted once."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist

_EPSILON = 1e-6
"""That of ``torch.nn.utils.clip_grad_norm_``."""


def total_norm(
    parameters: Mapping[str, torch.nn.Parameter],
    counted: Collection[str],
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """The norm of the gradients of all ranks' parameters, equal on all ranks; a collective call.

    ``counted`` are the names of those that this rank counts: one rank counts a replica, a tied
    weight or a shard.
    """
    gradients = [p.grad for name, p in parameters.items() if name in counted and p.grad is not None]
    norms = torch._foreach_norm(gradients, norm_type) if gradients else []
    own = torch.zeros(len(norms), dtype=torch.float64, device=device)
    if norms:
        own = torch.stack([norm.to(device, torch.float64) for norm in norms])
    if norm_type == float("inf"):
        total = own.max() if norms else own.new_zeros(())
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total
    total = own.pow(norm_type).sum()
    dist.all_reduce(total)
    return total.pow(1 / norm_type)


def clip(
    parameters: Mapping[str, torch.nn.Parameter], max_norm: float, total: torch.Tensor
) -> None:
    """Scale the gradients as ``torch.nn.utils.clip_grad_norm_`` does, for a norm of ``total``."""
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    if gradients:
        factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
        torch._foreach_mul_(gradients, factor.to(torch.float32))
