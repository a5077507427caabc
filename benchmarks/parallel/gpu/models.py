"""Models of ``benchmarks.parallel.predicted_vs_measured``: a chain of unequal layers, and a GPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nostall.parallel.module import Job

HIDDEN = (1, 1, 2, 1, 4, 1, 1, 8, 2, 1, 1, 4, 1, 2, 8, 8)
"""Inner width of each block of the chain as a multiple of its outer width."""


class Block(nn.Module):
    """A residual block of two matrix products."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: causal attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A decoder that maps tokens to logits."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([TransformerBlock(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def chain(tiny: bool) -> Job:
    """16 blocks whose costs differ by a factor of up to 8."""
    torch.manual_seed(0)
    width, rows, samples = (32, 4, 4) if tiny else (3072, 256, 16)
    dtype = torch.float32 if tiny else torch.bfloat16
    module = nn.Sequential(*[Block(width, width * k) for k in HIDDEN]).to(dtype)
    x = torch.randn(samples, rows, width).to(dtype)
    return Job(module, (x,), torch.zeros_like(x), F.mse_loss)


def gpt(tiny: bool) -> Job:
    """12 equal blocks between an embedding and a head with a vocabulary of 32,000."""
    torch.manual_seed(0)
    size = (4, 32, 2, 50, 16) if tiny else (12, 2048, 16, 32_000, 512)
    samples = 4 if tiny else 8
    module = Gpt(*size).to(torch.float32 if tiny else torch.bfloat16)
    tokens = torch.randint(0, size[3], (samples, size[4]))
    return Job(module, (tokens,), tokens, next_token_loss)


MODELS = {"chain": chain, "gpt": gpt}
