"""The norm of all gradients over all ranks, each value counted once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6
"""That of ``torch.nn.utils.clip_grad_norm_``."""
_SUMMED = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Types in which squares of values of shorter types are summed."""


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
    own = [p for name, p in parameters.items() if name in counted]
    norms = [
        norm.to(device, torch.float64)
        for dtype, gradients in _gradients(own).items()
        for norm in torch._foreach_norm(gradients, norm_type, _SUMMED.get(dtype))
    ]
    values = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64, device=device)
    if norm_type == float("inf"):
        total = values.max() if norms else values.new_zeros(())
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total
    total = values.pow(norm_type).sum()
    dist.all_reduce(total)
    return total.pow(1 / norm_type)


def clip(
    parameters: Mapping[str, torch.nn.Parameter], max_norm: float, total: torch.Tensor
) -> None:
    """Scale the gradients as ``torch.nn.utils.clip_grad_norm_`` does, for a norm of ``total``."""
    factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    for dtype, gradients in _gradients(parameters.values()).items():
        torch._foreach_mul_(gradients, factor.to(dtype))


def _gradients(
    parameters: Iterable[torch.nn.Parameter],
) -> dict[torch.dtype, list[torch.Tensor]]:
    """The gradients that there are, as local tensors by element type."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):  # FSDP2's; each rank has a shard, perhaps an empty one
            gradient = gradient.to_local()
        if gradient is not None and gradient.numel():
            found.setdefault(gradient.dtype, []).append(gradient)
    return found
