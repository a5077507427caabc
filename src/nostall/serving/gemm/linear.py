"""Linear layers by entries of the table: y = x W^T + bias for any number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nostall.core.errors import BadInput
from nostall.serving.gemm.config import GemmConfig, LinearShape
from nostall.serving.gemm.cublaslt import Product
from nostall.serving.gemm.kernel import smooth_gemm
from nostall.serving.gemm.table import Cublas, Entry, GemmTable, LtAlgorithm, Padded

PARTIAL_BYTES = 64 << 20
"""Scratch for parts of K at most; a product that needs more runs by F.linear."""
MAX_TILES = 1 << 14


@dataclass(frozen=True, eq=False)
class Scratch:
    """Buffers that all products of a device share; products on one stream run one by one."""

    partial: Tensor
    """fp32 parts of K."""
    arrivals: Tensor
    """int32 (MAX_TILES,), 0 between launches."""

    @staticmethod
    def on(device: torch.device | str) -> Scratch:
        """New buffers on a device; ``cuda``: the current GPU."""
        return Scratch(
            torch.empty(PARTIAL_BYTES // 4, dtype=torch.float32, device=device),
            torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
        )

    def holds(self, config: GemmConfig, m: int, shape: LinearShape) -> bool:
        """Whether a product fits into the buffers."""
        tiles, split = config.grid(m, shape)
        parts = split * m * shape.columns if split > 1 else 0
        return tiles <= len(self.arrivals) and parts <= len(self.partial)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> LinearShape:
    """The layer of tensors. Raises :class:`BadInput` if they do not fit each other."""
    shape = LinearShape(weight.shape[0], weight.shape[1], str(weight.dtype).removeprefix("torch."))
    shape.check()
    if x.dim() != 2 or x.shape[1] != shape.depth or x.dtype != weight.dtype:
        raise BadInput(
            f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype}; "
            "allowed is x (M, K) of the dtype of weight (N, K)"
        )
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise BadInput(
            f"strides of x {x.stride()} and weight {weight.stride()}; both must be contiguous"
        )
    if bias is not None and (bias.shape != (shape.columns,) or bias.dtype != x.dtype):
        raise BadInput(
            f"bias {tuple(bias.shape)} {bias.dtype}; allowed is ({shape.columns},) {x.dtype}"
        )
    return shape


def run_triton(
    config: GemmConfig, x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Scratch
) -> Tensor:
    """The product by the Triton kernel."""
    shape = check_linear(x, weight, bias)
    m = len(x)
    y = x.new_empty(m, shape.columns)
    if m == 0:
        return y
    smooth_gemm[config.grid(m, shape)](
        x, weight, weight if bias is None else bias, y, scratch.partial, scratch.arrivals,
        m, shape.columns, shape.depth, y.stride(0),
        ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth, SPLIT=config.split,
        GROUP=config.group, SWAP=config.swap, BIAS=bias is not None,
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return y


def run_entry(
    entry: Entry, x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Scratch
) -> Tensor:
    """The product as an entry says; by F.linear where the entry cannot run."""
    shape = LinearShape(weight.shape[0], weight.shape[1], str(weight.dtype).removeprefix("torch."))
    match entry:
        case GemmConfig() if scratch.holds(entry, len(x), shape) and len(x):
            return run_triton(entry, x, weight, bias, scratch)
        case Padded(multiple) if len(x) % multiple:
            rows = -(-len(x) // multiple) * multiple
            padded = x.new_empty(rows, x.shape[1])
            padded[: len(x)] = x
            return torch.nn.functional.linear(padded, weight, bias)[: len(x)]
        case LtAlgorithm(algorithm) if len(x):
            m, (n, k) = len(x), weight.shape
            product = Product.of(m, n, k, x.dtype, bias is not None, x.device.index or 0)
            if product.is_usable(algorithm):
                y = x.new_empty(m, n)
                product.run(algorithm, x, weight, y, bias)
                return y
    return torch.nn.functional.linear(x, weight, bias)


def linear(
    table: GemmTable | None, x: Tensor, weight: Tensor, bias: Tensor | None, scratch: Scratch
) -> Tensor:
    """y = x W^T + bias, as the table of the layer says; x is (M, K), ``weight`` (N, K)."""
    entry = table.entry(len(x)) if table is not None else Cublas()
    return run_entry(entry, x, weight, bias, scratch)
