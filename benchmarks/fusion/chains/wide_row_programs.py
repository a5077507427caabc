"""Chains over rows that are too wide for registers: vocabularies, and norms of very wide layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.fusion.chains.programs import (
    Chain,
    Given,
    double_norm,
    log_softmax_entropy,
    lse_and_gradient,
    norm_quantise,
)

HALF, SINGLE = torch.float16, torch.float32


def min_p(logits: Tensor, temperature: Tensor) -> Tensor:
    """Shares of tokens, of which those below a twentieth of the largest are dropped (min-p)."""
    shares = (logits.float() / temperature).softmax(-1)
    kept = torch.where(shares >= 0.05 * shares.amax(-1, keepdim=True), shares, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def distillation(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Kullback-Leibler divergence by row, and its gradient for the student."""
    log_p = teacher.float().log_softmax(-1)
    log_q = student.float().log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1), (log_q.exp() - p).to(student.dtype)


def gated_softmax_norm(x: Tensor, gate: Tensor) -> Tensor:
    """Shares of memory slots, gated, and a norm over them."""
    return F.layer_norm(x.softmax(-1) * gate, x.shape[-1:])


def _chains() -> list[Chain]:
    def rows(count: int, columns: int, dtype: torch.dtype = HALF) -> Given:
        return (count, columns), dtype

    def vector(columns: int, dtype: torch.dtype = HALF) -> Given:
        return (columns,), dtype

    one = rows(2048, 1, SINGLE)
    return [
        Chain("min-p 2048x12288", min_p, (rows(2048, 12288), one)),
        Chain("min-p 2048x32000", min_p, (rows(2048, 32000), one)),
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


WIDE = {chain.name: chain for chain in _chains()}
