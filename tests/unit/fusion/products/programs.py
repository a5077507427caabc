"""Functions with matrix products, and their captured graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from nostall.fusion.capture import CapturedGraph, capture, inference_graph, training_graphs
from nostall.fusion.products.find import Products, find_products

Function = Callable[..., object]


class AsModule(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def captured_forward(function: Function, *inputs: Tensor) -> CapturedGraph:
    return capture(inference_graph(AsModule(function), *inputs))


def found_forward(function: Function, *inputs: Tensor) -> Products:
    return find_products(captured_forward(function, *inputs))


def found_backward(function: Function, *inputs: Tensor) -> Products:
    leaves = [x.requires_grad_() for x in inputs]
    return find_products(capture(training_graphs(AsModule(function), *leaves)[1]))


def feed_forward(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return functional.gelu(x @ first) @ second


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (functional.silu(x @ gate) * (x @ up)) @ down


def residual(x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor, square: Tensor) -> Tensor:
    """Two residual connections, the second one behind a norm."""
    total = kept + functional.linear(x, weight.t(), bias)
    return total + functional.rms_norm(total, (total.shape[-1],)) @ square


def hand_written_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed.to(x.dtype) * weight


def down_projection(gate: Tensor, up: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
    """The second half of a SwiGLU layer, with the residual."""
    return kept + functional.linear(functional.silu(gate) * up, weight)
