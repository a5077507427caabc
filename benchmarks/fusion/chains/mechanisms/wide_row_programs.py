"""Chains over rows that do not fit in registers: vocabularies, and norms of very wide layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.fusion.chains.programs import (
    Chain,
    InputSpec,
    double_norm,
    log_softmax_entropy,
    lse_and_gradient,
    norm_quantise,
)

HALF, SINGLE = torch.float16, torch.float32


def min_p(logits: Tensor, temperature: Tensor) -> Tensor:
    """Min-p sampling: probabilities below 1/20 of the largest become 0, the rest is normalized."""
    probabilities = (logits.float() / temperature).softmax(-1)
    masked = torch.where(
        probabilities >= 0.05 * probabilities.amax(-1, keepdim=True), probabilities, 0.0
    )
    return masked / masked.sum(-1, keepdim=True)


def distillation(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Kullback-Leibler divergence of each row, and its gradient for the student's logits."""
    log_p = teacher.float().log_softmax(-1)
    log_q = student.float().log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1), (log_q.exp() - p).to(student.dtype)


def gated_softmax_norm(x: Tensor, gate: Tensor) -> Tensor:
    """Softmax times a gate, then LayerNorm."""
    return F.layer_norm(x.softmax(-1) * gate, x.shape[-1:])


def _chains() -> list[Chain]:
    def rows(count: int, columns: int, dtype: torch.dtype = HALF) -> InputSpec:
        return (count, columns), dtype

    def vector(columns: int, dtype: torch.dtype = HALF) -> InputSpec:
        return (columns,), dtype

    temperature = rows(2048, 1, SINGLE)
    return [
        Chain("min-p 2048x12288", min_p, (rows(2048, 12288), temperature)),
        Chain("min-p 2048x32000", min_p, (rows(2048, 32000), temperature)),
        Chain("distillation 2048x12288", distillation, (rows(2048, 12288),) * 2),
        Chain("distillation 2048x32000", distillation, (rows(2048, 32000),) * 2),
        Chain(
            "softmax + gate + norm fp32 4096x8192",
            gated_softmax_norm,
            (rows(4096, 8192, SINGLE), vector(8192, SINGLE)),
        ),
        Chain(
            "softmax + gate + norm fp32 2048x32768",
            gated_softmax_norm,
            (rows(2048, 32768, SINGLE), vector(32768, SINGLE)),
        ),
        Chain(
            "double norm 4096x8192",
            double_norm,
            (rows(4096, 8192), rows(4096, 8192), vector(8192), vector(8192)),
        ),
        Chain("RMSNorm + int8 4096x28672", norm_quantise, (rows(4096, 28672), vector(28672))),
        Chain("log-sum-exp + softmax 2048x50304", lse_and_gradient, (rows(2048, 50304),)),
        Chain("log-sum-exp + softmax 1024x100352", lse_and_gradient, (rows(1024, 100352),)),
        Chain("log-softmax + entropy 2048x50304", log_softmax_entropy, (rows(2048, 50304),)),
    ]


WIDE_ROW_CHAINS = {chain.name: chain for chain in _chains()}
