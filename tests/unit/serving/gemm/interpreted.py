"""Products of odd sizes by the GEMM kernel in Triton's interpreter; prints errors as JSON."""

from __future__ import annotations

import itertools
import json

import torch
from tools.interpreters.triton_interpreter import prepare

from nostall.serving.gemm.config import GemmConfig
from nostall.serving.gemm.linear import Scratch, run_triton

SIZES = ((1, 48, 64), (17, 80, 128))
"""M, N, K: one row, and one row and 16 columns more than a tile."""


def errors() -> dict[str, float]:
    """Largest error of each product, relative to its largest value."""
    prepare()
    scratch = Scratch(torch.full((1 << 14,), float("nan")), torch.zeros(64, dtype=torch.int32))
    generator = torch.Generator().manual_seed(0)
    found = {}
    for (m, n, k), swap, split, has_bias in itertools.product(
        SIZES, (False, True), (1, 4), (False, True)
    ):
        # Rows behind M are NaN: the kernel must not read them.
        buffer = torch.full((m + 32, k), float("nan"), dtype=torch.float16)
        x = buffer[:m].copy_(torch.randn(m, k, generator=generator))
        weight = torch.randn(n, k, generator=generator).half()
        bias = torch.randn(n, generator=generator).half() if has_bias else None
        config = GemmConfig(16, 32, 16, split, swap=swap)
        y = run_triton(config, x, weight, bias, scratch)
        exact = x.double() @ weight.double().T
        exact = exact if bias is None else exact + bias.double()
        error = float((y.double() - exact).abs().max() / exact.abs().max())
        found[f"{m}x{n}x{k} swap={swap} split={split} bias={has_bias}"] = error
        assert not scratch.arrivals.any(), "the counts of arrivals are not 0 behind a launch"
    return found


if __name__ == "__main__":
    print(json.dumps(errors()))
