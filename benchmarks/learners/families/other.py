"""Models of tables, graphs, sequences and scenes of random size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.learners.families.sizes import Builder, Step, multiple, one_of


def _dense(sizes: list[int], activation: type[nn.Module], norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), *([nn.LayerNorm(after)] if norm else []), activation()]
    return nn.Sequential(*layers[:-1])


def _mlp(rng: np.random.Generator) -> Step:
    sizes = [multiple(rng, 32, 4096) for _ in range(multiple(rng, 3, 12))]
    activation = one_of(rng, nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU)
    network = _dense(sizes, activation, norm=bool(rng.integers(2)))
    rows = torch.empty(multiple(rng, 32, 8192), sizes[0])
    labels = torch.zeros(len(rows), dtype=torch.long)
    is_regression = bool(rng.integers(2))
    if is_regression:
        return lambda: functional.mse_loss(network(rows), torch.zeros(len(rows), sizes[-1]))
    return lambda: functional.cross_entropy(network(rows), labels)


def _recommender(rng: np.random.Generator) -> Step:
    tables, width = multiple(rng, 4, 40), one_of(rng, 16, 32, 64, 128)
    rows, dense = multiple(rng, 64, 8192), multiple(rng, 4, 64)
    lengths = [multiple(rng, 100, 1_000_000) for _ in range(tables)]
    bags = nn.ModuleList(nn.EmbeddingBag(length, width, mode="sum") for length in lengths)
    below = _dense([dense, multiple(rng, 64, 512), width], nn.ReLU)
    pairs = (tables + 1) * tables // 2
    above = _dense([pairs + width, multiple(rng, 64, 1024), multiple(rng, 32, 256), 1], nn.ReLU)
    numbers = torch.empty(rows, dense)
    picks = [torch.randint(0, length, (rows, multiple(rng, 1, 20))) for length in lengths]
    upper = torch.triu_indices(tables + 1, tables + 1, 1)

    def step() -> torch.Tensor:
        first = below(numbers)
        looked_up = [bag(pick) for bag, pick in zip(bags, picks, strict=True)]
        stacked = torch.stack([first, *looked_up], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, upper[0], upper[1]]
        logits = above(torch.cat([first, products], 1))
        return functional.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))

    return step


class _Cell(nn.Module):
    """One step of a recurrent network of several layers."""

    def __init__(self, kind: type[nn.Module], sizes: list[int]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(kind(a, b) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor, states: list[object]) -> tuple[torch.Tensor, list[object]]:
        after: list[object] = []
        for cell, state in zip(self.cells, states, strict=True):
            state = cell(x, state)
            after.append(state)
            x = state[0] if isinstance(state, tuple) else state
        return x, after


def _recurrent(rng: np.random.Generator) -> Step:
    layers, width, vocabulary = multiple(rng, 1, 3), multiple(rng, 64, 1024, 16), 10000
    kind = one_of(rng, nn.LSTMCell, nn.GRUCell)
    cell = _Cell(kind, [width] * (layers + 1))
    embedding, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
    tokens = torch.randint(0, vocabulary, (multiple(rng, 8, 64), multiple(rng, 16, 64)))

    def step() -> torch.Tensor:
        states: list[object] = [None] * layers
        outputs = []
        embedded = embedding(tokens)
        for position in range(tokens.shape[1]):
            output, states = cell(embedded[:, position], states)
            outputs.append(output)
        logits = head(torch.stack(outputs, 1))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return step


class _Convolution(nn.Module):
    """Graph convolution, or attention over the edges of each node."""

    def __init__(self, before: int, after: int, has_attention: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(before, after)
        self.attention = nn.Linear(2 * after, 1) if has_attention else None

    def forward(self, x: torch.Tensor, edges: torch.Tensor, degree: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        messages = x.index_select(0, edges[0])
        if self.attention is not None:
            ends = torch.cat([messages, x.index_select(0, edges[1])], 1)
            scores = functional.leaky_relu(self.attention(ends)).exp()
            total = torch.zeros_like(x[:, :1]).index_add(0, edges[1], scores)
            messages = messages * scores / total.index_select(0, edges[1])
        else:
            messages = messages * degree.index_select(0, edges[0])[:, None]
        return torch.zeros_like(x).index_add(0, edges[1], messages)


def _graph(rng: np.random.Generator) -> Step:
    nodes, width = multiple(rng, 500, 100_000), multiple(rng, 16, 512, 8)
    features, classes = multiple(rng, 16, 1024), multiple(rng, 3, 64)
    sizes = [features, *[width] * multiple(rng, 1, 6), classes]
    has_attention = bool(rng.integers(2))
    layers = [_Convolution(a, b, has_attention) for a, b in pairwise(sizes)]
    x, edges = torch.empty(nodes, features), torch.randint(0, nodes, (2, 8 * nodes))
    degree, labels = torch.empty(nodes), torch.zeros(nodes, dtype=torch.long)

    def step() -> torch.Tensor:
        hidden = x
        for number, layer in enumerate(layers):
            hidden = layer(hidden, edges, degree)
            if number < len(layers) - 1:
                hidden = functional.dropout(functional.relu(hidden), 0.5)
        return functional.nll_loss(functional.log_softmax(hidden, 1), labels)

    return step


class _StateSpace(nn.Module):
    """Selective state-space layer whose scan runs in chunks."""

    def __init__(self, width: int, states: int, chunk: int) -> None:
        super().__init__()
        inner = 2 * width
        self.norm, self.into, self.out = nn.RMSNorm(width), nn.Linear(width, 2 * inner), None
        self.convolution = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.select, self.time = nn.Linear(inner, 2 * states), nn.Linear(inner, inner)
        self.rates = nn.Parameter(torch.empty(inner, states))
        self.out, self.chunk = nn.Linear(inner, width), chunk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, gate = self.into(self.norm(x)).chunk(2, -1)
        hidden = self.convolution(hidden.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        hidden = functional.silu(hidden)
        b, c = self.select(hidden).chunk(2, -1)
        time = functional.softplus(self.time(hidden))
        decay = time[..., None] * -self.rates.exp()
        drive = (time * hidden)[..., None] * b[:, :, None]
        state, outputs = torch.zeros_like(drive[:, 0]), []
        for first in range(0, x.shape[1], self.chunk):
            logs = decay[:, first : first + self.chunk].cumsum(1)
            part = drive[:, first : first + self.chunk]
            states = logs.exp() * (state[:, None] + (part * (-logs).exp()).cumsum(1))
            state = states[:, -1]
            outputs.append((states * c[:, first : first + self.chunk, None]).sum(-1))
        return x + self.out(torch.cat(outputs, 1) * functional.silu(gate))


def _state_space(rng: np.random.Generator) -> Step:
    width, vocabulary = multiple(rng, 64, 1024, 16), multiple(rng, 8000, 50000)
    states, chunk = one_of(rng, 8, 16), one_of(rng, 32, 64)
    layers = [_StateSpace(width, states, chunk) for _ in range(multiple(rng, 2, 12))]
    network = nn.Sequential(
        nn.Embedding(vocabulary, width), *layers, nn.RMSNorm(width), nn.Linear(width, vocabulary)
    )
    tokens = torch.randint(0, vocabulary, (multiple(rng, 1, 8), multiple(rng, 128, 512, 64)))
    return lambda: functional.cross_entropy(network(tokens).flatten(0, 1), tokens.flatten())


class _Dilated(nn.Module):
    """Gated dilated convolution with a residual and a skip output, as in WaveNet."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.gates = nn.Conv1d(width, 2 * width, 2, padding=dilation, dilation=dilation)
        self.residual, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.gates(x)[..., : x.shape[-1]].chunk(2, 1)
        hidden = a.tanh() * b.sigmoid()
        return x + self.residual(hidden), self.skip(hidden)


def _wavenet(rng: np.random.Generator) -> Step:
    width, values = multiple(rng, 16, 256, 8), 256
    layers = [_Dilated(width, 2 ** (i % 10)) for i in range(multiple(rng, 4, 40))]
    start, end = nn.Embedding(values, width), nn.Sequential(
        nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, values, 1)
    )  # fmt: skip
    samples = torch.randint(0, values, (multiple(rng, 1, 16), multiple(rng, 2048, 16384)))

    def step() -> torch.Tensor:
        x = start(samples).transpose(1, 2)
        total = torch.zeros_like(x)
        for layer in layers:
            x, skip = layer(x)
            total = total + skip
        return functional.cross_entropy(end(total), samples)

    return step


def _radiance(rng: np.random.Generator) -> Step:
    rays, samples, bands = multiple(rng, 256, 4096), multiple(rng, 16, 192), multiple(rng, 4, 12)
    width = multiple(rng, 64, 512, 16)
    body = _dense([6 * bands, *[width] * multiple(rng, 3, 9)], nn.ReLU)
    density, colour = nn.Linear(width, 1), _dense([width, width // 2, 3], nn.ReLU)
    points, depths = torch.empty(rays, samples, 3), torch.empty(rays, samples)
    frequencies, target = 2.0 ** torch.arange(bands), torch.empty(rays, 3)

    def step() -> torch.Tensor:
        phases = (points[..., None] * frequencies).flatten(-2)
        hidden = body(torch.cat([phases.sin(), phases.cos()], -1))
        gaps = functional.pad(depths[:, 1:] - depths[:, :-1], (0, 1), value=1e10)
        opacity = 1 - torch.exp(-functional.relu(density(hidden)[..., 0]) * gaps)
        light = torch.cumprod(1 - opacity + 1e-10, -1)
        weights = opacity * light
        image = (weights[..., None] * colour(hidden).sigmoid()).sum(1)
        return functional.mse_loss(image, target)

    return step


OTHER: dict[str, tuple[Builder, ...]] = {
    "mlp": (_mlp,),
    "recommender": (_recommender,),
    "recurrent": (_recurrent,),
    "graph-network": (_graph,),
    "state-space": (_state_space,),
    "dilated-convolution": (_wavenet,),
    "radiance-field": (_radiance,),
}
