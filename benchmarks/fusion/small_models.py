"""Models and parts of models with random weights, for benchmarks and tests of fusion.

Sizes are those of the published models or of a part of them; ``models(small=True)`` has small sizes
for tests that compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

ModuleAndInputs = tuple[nn.Module, tuple[Tensor, ...]]


class Attention(nn.Module):
    """Self-attention written out, with an optional causal mask and dropout."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        if self.causal:
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        weights = self.dropout(scores.softmax(-1))
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Bert(nn.Module):
    """BERT without embeddings: LayerNorm and dropout, then layers with post-norm."""

    def __init__(self, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(BertLayer(width, heads, dropout) for _ in range(layers))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.dropout(self.first(x + positions))
        for layer in self.layers:
            x = layer(x)
        return x


class BertLayer(nn.Module):
    """A transformer layer with post-norm (LayerNorm after the residual addition) and GELU."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, False, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.dropout(self.attention(x)))
        y = self.down(F.gelu(self.up(x)))
        return self.norms[1](x + self.dropout(y))


class GptLayer(nn.Module):
    """A transformer layer with pre-norm, causal attention and tanh-GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, True, 0.0)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class LlamaLayer(nn.Module):
    """Llama's MLP block: RMSNorm, SwiGLU and the residual, without attention."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ResNetBlock(nn.Module):
    """Two convolutions with BatchNorm and ReLU, and the residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(self.norms[1](self.convs[1](y)) + x)


class DienCell(nn.Module):
    """DIEN: attention over a user's history, Dice activation, and a GRU gated by scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.score = nn.Linear(width, 80), nn.Linear(80, 1)
        self.alpha = nn.Parameter(torch.zeros(80))
        self.gates_x, self.gates_h = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, history: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        pre = self.hidden(history * target.unsqueeze(1))
        normed = (pre - pre.mean(0)) * (pre.var(0, unbiased=False) + 1e-8).rsqrt()
        gate = torch.sigmoid(normed)
        active = gate * pre + (1 - gate) * self.alpha * pre
        score = self.score(active).squeeze(-1).masked_fill(mask, -1e9).softmax(-1)
        state = torch.zeros_like(target)
        for step in range(4):
            x = self.gates_x(history[:, step]).chunk(3, -1)
            h = self.gates_h(state).chunk(3, -1)
            reset, update = torch.sigmoid(x[0] + h[0]), torch.sigmoid(x[1] + h[1])
            new = torch.tanh(x[2] + reset * h[2])
            update = update * score[:, step].unsqueeze(-1)
            state = (1 - update) * state + update * new
        return state + (history * score.unsqueeze(-1)).sum(1)


class ConformerBlock(nn.Module):
    """Conformer: half-step feed-forward, attention, convolution with GLU, feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.attention = Attention(width, heads, False, 0.1)
        self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.depth = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self._feed_forward(x, 0)
        x = x + self.dropout(self.attention(self.norms[1](x)))
        y = F.glu(self.into(self.norms[2](x)), dim=-1).transpose(1, 2)
        y = F.silu(self.batch_norm(self.depth(y))).transpose(1, 2)
        x = x + self.dropout(self.out(y))
        return self.norms[4](x + 0.5 * self._feed_forward(x, 1))

    def _feed_forward(self, x: Tensor, index: int) -> Tensor:
        y = F.silu(self.ups[index](self.norms[3 * index](x)))
        return self.dropout(self.downs[index](self.dropout(y)))


class RnnCells(nn.Module):
    """An LSTM with LayerNorm on its gates, unrolled over some steps."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.gates_x, self.gates_h = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = torch.zeros_like(x[:, 0])
        for step in range(self.steps):
            gates = self.norm(self.gates_x(x[:, step]) + self.gates_h(state))
            into, forget, new, out = gates.chunk(4, -1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
            state = torch.sigmoid(out) * torch.tanh(cell)
        return state


class DoubleNorm(nn.Module):
    """LayerNorm, dropout, residual, LayerNorm and GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.gelu(self.norms[1](residual + self.dropout(self.norms[0](x))))


class MaskedSoftmax(nn.Module):
    """Scaled and masked softmax with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        return self.dropout((scores * 0.125).masked_fill(mask, -math.inf).softmax(-1))


class CrossEntropy(nn.Module):
    """Cross-entropy with label smoothing and a z-loss."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        return loss + 1e-4 * torch.logsumexp(logits, -1).square().mean()


class QuantisedNorm(nn.Module):
    """Residual and RMSNorm, then quantization to int8 with one scale for each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x + residual
        normed = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight
        scale = normed.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127.0
        return total, (normed / scale).round().clamp(-128, 127).to(torch.int8), scale


class GatedPooling(nn.Module):
    """GroupNorm, a gated hardswish, and attention pooling."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.query = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm(x)) * torch.sigmoid(x)
        weights = (y * self.query[:, None]).sum(1, keepdim=True).softmax(-1)
        return (y * weights).sum(-1)


def models(small: bool = False) -> dict[str, Callable[[], ModuleAndInputs]]:
    """Functions by name that make a module and its inputs; ``small`` for tests that compute."""

    def size(published: int, small_size: int) -> int:
        return small_size if small else published

    width, heads, rows = size(768, 12), size(12, 2), size(512, 5)

    def sequence(batch: int, length: int, features: int) -> Tensor:
        return torch.randn(size(batch, 2), length, features, requires_grad=True)

    def labels(count: int, classes: int) -> Tensor:
        return torch.randint(0, classes, (count,))

    return {
        "bert": lambda: (
            Bert(width, heads, 1, 0.1),
            (sequence(12, rows, width), torch.randn(rows, width)),
        ),
        "gpt": lambda: (GptLayer(width, heads), (sequence(8, rows, width),)),
        "llama-mlp": lambda: (
            LlamaLayer(size(2048, 6), size(5632, 10)),
            (sequence(4, rows, size(2048, 6)),),
        ),
        "resnet-block": lambda: (
            ResNetBlock(size(64, 3)),
            (torch.randn(size(64, 2), size(64, 3), size(56, 4), size(56, 4), requires_grad=True),),
        ),
        "dien": lambda: (
            DienCell(size(36, 6)),
            (
                sequence(256, size(100, 5), size(36, 6)),
                torch.randn(size(256, 2), size(36, 6)),
                torch.rand(size(256, 2), size(100, 5)) > 0.5,
            ),
        ),
        "conformer": lambda: (
            ConformerBlock(size(256, 8), size(4, 2)),
            (sequence(16, size(400, 5), size(256, 8)),),
        ),
        "lstm": lambda: (RnnCells(size(512, 4), 3), (sequence(64, 3, size(512, 4)),)),
        "double-norm": lambda: (
            DoubleNorm(size(5000, 7)),
            (sequence(1, size(4096, 3), size(5000, 7)), torch.randn(size(4096, 3), size(5000, 7))),
        ),
        "masked-softmax": lambda: (
            MaskedSoftmax(),
            (
                sequence(16, size(1024, 3), size(3000, 5)),
                torch.rand(size(1024, 3), size(3000, 5)) > 0.9,
            ),
        ),
        "cross-entropy": lambda: (
            CrossEntropy(),
            (
                torch.randn(size(8192, 4), size(32000, 7), requires_grad=True),
                labels(size(8192, 4), size(32000, 7)),
            ),
        ),
        "quantised-norm": lambda: (
            QuantisedNorm(size(3000, 6)),
            (sequence(8, size(1024, 3), size(3000, 6)), torch.randn(size(3000, 6))),
        ),
        "gated-pooling": lambda: (
            GatedPooling(size(256, 8)),
            (sequence(32, size(256, 8), size(784, 5)),),
        ),
    }
