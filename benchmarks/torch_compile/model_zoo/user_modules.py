"""Models that ``transformers`` does not have: DiT, a state-space model, and LoRA adapters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def timestep_embedding(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of time steps (batch), as (batch, width)."""
    half = width // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=steps.device) / half)
    angles = steps.float()[:, None] * rates[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], -1)


class DiTBlock(nn.Module):
    """A transformer block whose norms are shifted, scaled and gated by a condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        shift, scale, gate, shift_up, scale_up, gate_up = parts
        y = self._attend(self.norms[0](x) * (1 + scale) + shift)
        x = x + gate * y
        y = self.norms[1](x) * (1 + scale_up) + shift_up
        return x + gate_up * self.down(F.gelu(self.up(y), approximate="tanh"))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.into(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class DiT(nn.Module):
    """DiT (arXiv:2212.09748) on tokens of a latent image."""

    def __init__(self, width: int, heads: int, layers: int, channels: int) -> None:
        super().__init__()
        self.width = width
        self.into = nn.Linear(channels, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(1001, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, channels)

    def forward(self, x: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        x = self.into(x)
        times = timestep_embedding(steps, self.width).to(x.dtype)
        condition = self.time(times) + self.classes(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, -1)
        return self.out(self.norm(x) * (1 + scale) + shift)


class StateSpaceBlock(nn.Module):
    """A gated state-space block: convolution and chunked scan, as Mamba-2 (arXiv:2405.21060)."""

    def __init__(self, width: int, head: int, state: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.head, self.state, self.chunk = 2 * width // head, head, state, chunk
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, 4 * width + 2 * state + self.heads, bias=False)
        self.convolution = nn.Conv1d(
            2 * width + 2 * state, 2 * width + 2 * state, 4, padding=3, groups=2 * width + 2 * state
        )
        self.step_bias = nn.Parameter(torch.zeros(self.heads))
        self.decay = nn.Parameter(torch.zeros(self.heads))
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.out_norm, self.out = nn.RMSNorm(2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        sizes = (2 * width, 2 * width + 2 * self.state, self.heads)
        gate, mixed, steps = self.into(self.norm(x)).split(sizes, -1)
        mixed = F.silu(self.convolution(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        values, into, out = mixed.split((2 * width, self.state, self.state), -1)
        steps = F.softplus(steps + self.step_bias)
        values = values.reshape(batch, length, self.heads, self.head)
        scanned = self._scan(values * steps[..., None], -steps * self.decay.exp(), into, out)
        scanned = (scanned + values * self.skip[:, None]).reshape(batch, length, 2 * width)
        return x + self.out(self.out_norm(scanned * F.silu(gate)))

    def _scan(self, values: Tensor, decays: Tensor, into: Tensor, out: Tensor) -> Tensor:
        """The recurrence h = exp(decay) h + into value, read by ``out``, chunk by chunk."""
        batch, length, heads, head = values.shape
        chunks = length // self.chunk
        values = values.view(batch, chunks, self.chunk, heads, head)
        into = into.view(batch, chunks, self.chunk, self.state)
        out = out.view(batch, chunks, self.chunk, self.state)
        sums = decays.float().view(batch, chunks, self.chunk, heads).permute(0, 3, 1, 2).cumsum(-1)
        within = sums[..., :, None] - sums[..., None, :]
        seen = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=values.device).tril()
        weights = within.masked_fill(~seen, -math.inf).exp().to(values.dtype)
        scores = torch.einsum("bcln,bcsn->bcls", out, into)
        local = torch.einsum("bcls,bhcls,bcshp->bclhp", scores, weights, values)
        left = (sums[..., -1:] - sums).exp().to(values.dtype)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", into, left, values)
        carried = self._carry(states, sums[..., -1])
        entered = sums.exp().to(values.dtype)
        past = torch.einsum("bcln,bchpn,bhcl->bclhp", out, carried, entered)
        return (local + past).reshape(batch, length, heads, head)

    def _carry(self, states: Tensor, totals: Tensor) -> Tensor:
        """The state with which each chunk starts."""
        chunks = states.shape[1]
        sums = F.pad(totals, (1, 0)).cumsum(-1)
        between = sums[..., :-1, None] - sums[..., None, 1:]
        earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=states.device).tril(-1)
        weights = between.masked_fill(~earlier, -math.inf).exp().to(states.dtype)
        return torch.einsum("bhcs,bshpn->bchpn", weights, states)


class StateSpaceModel(nn.Module):
    """Blocks of a state-space model on embedded tokens."""

    def __init__(self, width: int, head: int, state: int, chunk: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            StateSpaceBlock(width, head, state, chunk) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained adapter of low rank (arXiv:2106.09685), with dropout."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


def add_lora(module: nn.Module, rank: int) -> None:
    """Freeze a model's weights and put adapters on the linear layers of its blocks."""
    module.requires_grad_(False)
    layers = [
        (parent, name, child)
        for path, parent in module.named_modules()
        if "layers" in path
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    for parent, name, child in layers:
        setattr(parent, name, LoraLinear(child, rank))
