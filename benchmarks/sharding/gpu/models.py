"""Models of ``benchmarks.sharding.gpu.plans``: a GPT and a wide classifier.

Names of parameters are those that the rule ``megatron`` knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nostall.parallel.module import Job


class Attention(nn.Module):
    """Causal attention; the number of heads follows from the width of its projections."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(attention.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """Two matrix products with a GELU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class DecoderLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, head), FeedForward(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """A decoder that maps tokens to logits."""

    def __init__(self, layers: int, width: int, head: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([DecoderLayer(width, head) for _ in range(layers)])
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class ResidualFeedForward(FeedForward):
    """A feed-forward network with a skip connection."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Classifier(nn.Module):
    """Residual feed-forward networks and a classifier of many classes."""

    def __init__(self, layers: int, width: int, classes: int) -> None:
        super().__init__()
        networks = [ResidualFeedForward(width, 2 * width) for _ in range(layers)]
        self.layers = nn.ModuleList(networks)
        self.lm_head = nn.Linear(width, classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


@dataclass(frozen=True)
class GpuModel:
    """A module on the current default device, and its batch."""

    module: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def job(self) -> Job:
        return Job(self.module, (self.inputs,), self.targets, cross_entropy)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over tokens or samples."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def gpt(tiny: bool) -> GpuModel:
    """Four layers of width 4,096 and a vocabulary of 32,000; 8,192 tokens."""
    layers, width, head, vocabulary = (2, 64, 8, 64) if tiny else (4, 4096, 128, 32_000)
    samples, length = (8, 16) if tiny else (16, 512)
    dtype = torch.float32 if tiny else torch.bfloat16
    module = Gpt(layers, width, head, vocabulary).to(dtype)
    tokens = torch.randint(0, vocabulary, (samples, length))
    return GpuModel(module, tokens, tokens.roll(-1, 1))


def classifier(tiny: bool) -> GpuModel:
    """Two networks of width 8,192 and 32,768 classes; 4,096 samples."""
    layers, width, classes, samples = (2, 64, 128, 16) if tiny else (2, 8192, 32_768, 4096)
    dtype = torch.float32 if tiny else torch.bfloat16
    module = Classifier(layers, width, classes).to(dtype)
    inputs, targets = torch.randn(samples, width).to(dtype), torch.randint(0, classes, (samples,))
    return GpuModel(module, inputs, targets)


MODELS = {"gpt": gpt, "classifier": classifier}
