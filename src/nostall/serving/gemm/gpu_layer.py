"""A linear layer on a GPU whose weights rotate, so that no weight is in the L2 cache twice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nostall.gpu.clock import Run
from nostall.serving.gemm.config import LinearShape
from nostall.serving.gemm.cublaslt import CublasLtError, Product
from nostall.serving.gemm.linear import Scratch, run_entry
from nostall.serving.gemm.table import Entry

ROTATED_BYTES = 160 << 20
"""Bytes of all weights at least; three times the L2 cache of an H100."""
TOLERANCE = 2e-2
"""Allowed difference from F.linear, relative to the largest value."""


@dataclass(frozen=True, eq=False)
class GpuLayer:
    """Weights and inputs of a layer; implements :class:`nostall.serving.gemm.tune.Layer`."""

    shape: LinearShape
    sms: int
    weights: tuple[Tensor, ...]
    x: Tensor
    scratch: Scratch

    @staticmethod
    def of(shape: LinearShape, max_rows: int, scratch: Scratch, seed: int = 0) -> GpuLayer:
        """Random weights and inputs on the current GPU."""
        device = torch.device("cuda", torch.cuda.current_device())
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, shape.dtype)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        copies = max(2, -(-ROTATED_BYTES // (2 * shape.columns * shape.depth)))
        weights = tuple(draw(shape.columns, shape.depth) * shape.depth**-0.5 for _ in range(copies))
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return GpuLayer(shape, sms, weights, draw(max_rows, shape.depth), scratch)

    def run(self, entry: Entry, m: int) -> Run:
        """Products with all weights, one after the other; checked against F.linear first.

        Raises ``ValueError`` if an entry's result is wrong.
        """
        x = self.x[:m]
        got = run_entry(entry, x, self.weights[0], None, self.scratch).float()
        exact = torch.nn.functional.linear(x, self.weights[0]).float()
        error = float((got - exact).abs().max() / exact.abs().max())
        if not error < TOLERANCE:
            raise ValueError(f"wrong result: relative difference {error:.2g} from F.linear")

        def run() -> None:
            for weight in self.weights:
                run_entry(entry, x, weight, None, self.scratch)

        return run

    def algorithms(self, m: int) -> list[bytes]:
        """The algorithms that cuBLASLt proposes, none if the library is missing."""
        n, k = self.shape.columns, self.shape.depth
        index = self.x.device.index or 0
        try:
            proposed = Product.of(m, n, k, self.x.dtype, False, index).algorithms()
        except CublasLtError:
            return []
        # Long products are measured in few runs, so that tuning ends in time.
        return proposed[: 24 if m * n * k < 1 << 37 else 8]


def library_versions() -> dict[str, str]:
    """Versions that decide which kernels run: PyTorch, its CUDA, and Triton."""
    import triton

    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": triton.__version__,
    }
