"""Models with random weights for ``benchmarks.torch_compile.models``, also in small sizes.

BERT has the sizes of BERT-base; the others are parts of the published models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.fusion.small_models import Bert, ConformerBlock, DienCell, RnnCells

ModuleAndInputs = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Model:
    """A model of the benchmark."""

    make: Callable[[], ModuleAndInputs]
    """Makes the module and its inputs, in fp32 on the CPU."""
    train: bool
    """Whether a step is a forward and a backward pass; otherwise a forward pass only."""
    varies: bool = False
    """Whether the first dimension of the first input is marked dynamic."""


class DecoderStep(nn.Module):
    """Decoder layers for one new token of each sequence, with a key-value cache."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.into = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for layer in range(len(self.into)):
            query, key, value = self.into[layer](self.norms[2 * layer](x)).chunk(3, -1)
            all_keys = torch.cat([keys[layer], self._split(key)], 2)
            all_values = torch.cat([values[layer], self._split(value)], 2)
            scores = self._split(query) @ all_keys.transpose(-1, -2) * all_keys.shape[-1] ** -0.5
            attended = (scores.softmax(-1) @ all_values).transpose(1, 2).reshape(x.shape)
            x = x + self.out[layer](attended)
            x = x + self.down[layer](F.gelu(self.up[layer](self.norms[2 * layer + 1](x))))
        return x

    def _split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)


class Crnn(nn.Module):
    """CRNN for OCR: convolutions over a line of text, then an LSTM over its columns."""

    def __init__(self, channels: int, width: int, steps: int, classes: int) -> None:
        super().__init__()
        sizes = [1, channels, 2 * channels, 4 * channels]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in sizes[1:])
        self.into = nn.LazyLinear(width)
        self.cells = RnnCells(width, steps)
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(conv(x))), (2, 2))
        columns = x.permute(0, 3, 1, 2).flatten(2)
        return self.out(self.cells(torch.tanh(self.into(columns)))).log_softmax(-1)


def models(small: bool = False) -> dict[str, Model]:
    """Models of the benchmark by name; ``small`` for tests."""

    def size(published: int, small_size: int) -> int:
        return small_size if small else published

    width, heads, layers = size(768, 12), size(12, 2), size(12, 1)

    def bert(batch: int, dropout: float) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
        length = size(512, 5)
        return lambda: (
            Bert(width, heads, layers, dropout),
            (torch.randn(size(batch, 2), length, width), torch.randn(length, width)),
        )

    def decoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
        batch, past, depth = size(64, 2), size(511, 3), size(6, 1)
        cache_shape = (depth, batch, heads, past, width // heads)
        module = DecoderStep(width, heads, depth)
        return module, (
            torch.randn(batch, 1, width),
            torch.randn(cache_shape),
            torch.randn(cache_shape),
        )

    def dien() -> tuple[nn.Module, tuple[Tensor, ...]]:
        batch, length, line_width = size(256, 2), size(100, 5), size(36, 6)
        mask = torch.rand(batch, length) > 0.5
        return DienCell(line_width), (
            torch.randn(batch, length, line_width),
            torch.randn(batch, line_width),
            mask,
        )

    def crnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
        line_height, line_width, steps = size(32, 8), size(128, 16), size(16, 2)
        module = Crnn(size(64, 2), size(256, 4), steps, size(5000, 7))
        lines = torch.randn(size(32, 2), 1, line_height, line_width)
        module(lines)
        return module, (lines,)

    def conformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
        module = ConformerBlock(size(256, 8), size(4, 2))
        return module, (torch.randn(size(16, 2), size(400, 5), size(256, 8)),)

    return {
        "bert-train": Model(bert(12, 0.1), train=True),
        "bert-infer": Model(bert(32, 0.0), train=False),
        "decoder-step": Model(decoder, train=False),
        "dien-train": Model(dien, train=True),
        "crnn-infer": Model(crnn, train=False),
        "conformer-train": Model(conformer, train=True),
        "conformer-varying": Model(conformer, train=True, varies=True),
    }
