"""PyTorch functions for ``tools.compare_behaviour`` that together use all kernel schemes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_HALF = {"dtype": torch.float16}


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.float() * 0.125, -1).to(x.dtype)


def softmax_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(2048, 1000, **_HALF),)


def wide_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x.float(), -1)


def wide_softmax_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(256, 50257, **_HALF),)


def layer_norm_backward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, weight.shape, weight, bias))


def layer_norm_backward_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(4096, 768, **_HALF), torch.ones(768, **_HALF), torch.zeros(768, **_HALF))


def column_sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    product = x * y
    return product.sum(0), product.square().sum(0)


def column_sums_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(8192, 1024, **_HALF), torch.zeros(8192, 1024, **_HALF))


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def batch_norm_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(32, 64, 28, 28), torch.ones(64), torch.zeros(64))


def transposed_add(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x.transpose(1, 2).contiguous() + y)


def transposed_add_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(16, 128, 384, **_HALF), torch.zeros(16, 384, 128, **_HALF))


def small_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


def small_attention_inputs() -> tuple[Tensor, ...]:
    return tuple(torch.zeros(512, 50, 16, **_HALF) for _ in range(3))


def embedding_sum(table: Tensor, index: Tensor, y: Tensor) -> Tensor:
    return F.silu(table[index] + y).mean(-1)


def embedding_sum_inputs() -> tuple[Tensor, ...]:
    index = torch.zeros(1024, 64, dtype=torch.int64)
    return (torch.zeros(30000, 256), index, torch.zeros(1024, 64, 256))


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    return torch.clamp(torch.round(x.float() / scale), -127, 127).to(torch.int8), scale


def quantized_rows_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(4096, 4096, dtype=torch.bfloat16),)


def two_chains(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(x) * x, torch.exp(y - y.amax(-1, keepdim=True))


def two_chains_inputs() -> tuple[Tensor, ...]:
    return (torch.zeros(1000, 333), torch.zeros(1000, 777))
