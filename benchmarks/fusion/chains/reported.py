"""Chains of users on which stitched kernels were slower than Inductor's on an H100 (2026-11-26)."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.fusion.chains.generated import (
    BF16,
    INDEX,
    cosine,
    log_probability_entropy,
    softcap_softmax,
)
from benchmarks.fusion.chains.programs import Chain


def query_norm_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RMS norm of each head's query, then its rotary embedding."""
    fp32 = x.float()
    normed = (fp32 * torch.rsqrt(fp32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight
    first, second = normed.chunk(2, -1)
    return normed * cos + torch.cat((-second, first), -1) * sin


REPORTED: dict[str, Chain] = {
    chain.name: chain
    for chain in (
        Chain("cosine 65536x768", cosine, (((65536, 768), BF16),) * 2),
        Chain(
            "query norm + rotary 8192x32x128",
            query_norm_rotary,
            (((8192, 32, 128), BF16), ((128,), BF16), *(((8192, 1, 128), BF16),) * 2),
        ),
        Chain(
            "softcap softmax 4x16x1024x1024",
            softcap_softmax,
            (((4, 16, 1024, 1024), BF16), ((1024, 1024), BF16)),
        ),
        Chain(
            "log probability + entropy 4096x151936",
            log_probability_entropy,
            (((4096, 151936), BF16), ((4096,), INDEX)),
        ),
    )
}
"""The reported chains by name."""
