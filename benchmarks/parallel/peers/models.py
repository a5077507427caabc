"""Models of ``parallel.peers``: published widths, with fewer layers, in bfloat16.

Each function builds a job on torch's default device; with ``NOSTALL_TINY=1`` a narrow one in
float32.  Names of modules are those that PyTorch's tensor parallelism and the rule ``megatron``
find.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import DTensor

from nostall.parallel.module import Job

IS_TINY = os.environ.get("NOSTALL_TINY") == "1"
IS_PLANNED = os.environ.get("NOSTALL_PLANNED") == "1"
"""Whether the jobs are only planned: their tensors have no values."""
RATE = 1e-4
"""Learning rate of all arms."""


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of all arms; a fused step takes no DTensors beside other tensors."""
    own = list(parameters)
    kinds = (
        [p for p in own if isinstance(p, DTensor) is is_dtensor] for is_dtensor in (True, False)
    )
    groups = [{"params": kind} for kind in kinds if kind]
    return torch.optim.AdamW(groups, lr=RATE, fused=own[0].device.type == "cuda")


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over tokens or samples."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Attention(nn.Module):
    """Attention; the numbers of heads follow from the widths of its projections."""

    def __init__(
        self, width: int, head: int, kv_heads: int, *, bias: bool, is_causal: bool, turns: bool
    ) -> None:
        super().__init__()
        self.head, self.is_causal, self.turns = head, is_causal, turns
        self.q_proj = nn.Linear(width, width, bias)
        self.k_proj = nn.Linear(width, kv_heads * head, bias)
        self.v_proj = nn.Linear(width, kv_heads * head, bias)
        self.o_proj = nn.Linear(width, width, bias)

    def forward(self, x: Any, cos: Any = None, sin: Any = None) -> Any:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.turns:
            query, key = _turned(query, cos, sin), _turned(key, cos, sin)
        copies = query.shape[1] // key.shape[1]
        if copies > 1:
            key, value = (
                t[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2) for t in (key, value)
            )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.o_proj(found.transpose(1, 2).reshape(batch, length, -1))


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions, the second half of a head after the first."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class FeedForward(nn.Module):
    """Two matrix products with a GELU between them."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.gelu(self.up_proj(x)))


class GatedFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Feed-forward networks of experts, each on its own tokens (experts, tokens, width)."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: Any) -> Any:
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)


class Mixture(nn.Module):
    """Two experts a token with a capacity for each sample (GShard, Lepikhin et al. 2021)."""

    def __init__(self, width: int, experts: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts, self.count = Experts(experts, width, inner), experts

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        capacity = length * 5 // (2 * self.count)
        gates = self.router(x).float().softmax(-1)
        numbers = torch.arange(self.count, device=x.device)
        first = (gates.argmax(-1, keepdim=True) == numbers).float()
        second = ((gates - 2 * first).argmax(-1, keepdim=True) == numbers).float()
        places = torch.arange(capacity, device=x.device)
        taken, combine = torch.zeros_like(first[:, :1]), 0.0
        for chosen in (first, second):
            place = chosen.cumsum(1) - 1 + taken
            taken = taken + chosen.sum(1, keepdim=True)
            at = (place.unsqueeze(-1) == places) & (chosen.unsqueeze(-1) > 0)
            combine = combine + (gates * chosen).unsqueeze(-1) * at
        weights = combine.to(x.dtype).flatten(2)  # (batch, tokens, experts * capacity)
        sent = torch.bmm((weights > 0).to(x.dtype).transpose(1, 2), x)
        sent = sent.view(batch, self.count, capacity, width).transpose(0, 1).flatten(1, 2)
        found = self.experts(sent).view(self.count, batch, capacity, width).transpose(0, 1)
        return torch.bmm(weights, found.reshape(batch, -1, width))


class Layer(nn.Module):
    """A transformer layer, pre-norm unless ``is_post``."""

    def __init__(self, norm: Any, attention: Attention, mlp: nn.Module, is_post: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(), norm()
        self.attention, self.mlp, self.is_post = attention, mlp, is_post

    def forward(self, x: Any, cos: Any = None, sin: Any = None) -> Any:
        if self.is_post:
            x = self.norm_1(x + self.attention(x))
            return self.norm_2(x + self.mlp(x))
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """Tokens to logits."""

    def __init__(self, width: int, words: int, norm: Any, layers: list[Layer]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(layers)
        self.norm, self.lm_head = norm(), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Any) -> Any:
        x, turns = self.embed_tokens(tokens), ()
        if self.layers[0].attention.turns:
            turns = _angles(tokens.shape[1], self.layers[0].attention.head, x)
        for layer in self.layers:
            x = layer(x, *turns)
        return self.lm_head(self.norm(x))


def _angles(length: int, head: int, like: Any) -> tuple[Any, Any]:
    """Cosines and sines of rotary positions."""
    rates = 500_000.0 ** -(torch.arange(0, head, 2, device=like.device).float() / head)
    angles = torch.outer(torch.arange(length, device=like.device).float(), rates)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Classifier(nn.Module):
    """Residual feed-forward networks and a classifier of many classes."""

    def __init__(self, layers: int, width: int, inner: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(width, inner, bias=False) for _ in range(layers))
        self.lm_head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class Residual(FeedForward):
    """A feed-forward network with a skip connection."""

    def forward(self, x: Any) -> Any:
        return x + super().forward(x)


def _without_values(build: Callable[[], Job]) -> Callable[[], Job]:
    """The job on the device ``meta`` if it is only planned."""

    @wraps(build)
    def job() -> Job:
        with torch.device("meta") if IS_PLANNED else nullcontext():
            return build()

    return job


def _transformer(sizes: tuple[int, ...], make: Callable[[int, int, Any], Layer], norm: Any) -> Job:
    """``sizes``: layers, width, head, words, samples, length."""
    layers, width, head, words, samples, length = (2, 64, 16, 96, 8, 16) if IS_TINY else sizes
    own = norm(width)
    module = Transformer(width, words, own, [make(width, head, own) for _ in range(layers)])
    tokens = torch.randint(0, words, (samples, length))
    return _job(module, tokens, torch.randint(0, words, (samples, length)))


def _job(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Job:
    module = module.to(torch.float32 if IS_TINY else torch.bfloat16)
    return Job(module, (inputs,), targets, cross_entropy, optimizer=adamw)


def _layer_norm(width: int) -> Any:
    return lambda: nn.LayerNorm(width)


def _rms_norm(width: int) -> Any:
    return lambda: nn.RMSNorm(width)


@_without_values
def gpt() -> Job:
    """Width and heads of GPT-3 1.3B (Brown et al. 2020), 6 of 24 layers; 8,192 tokens."""

    def layer(width: int, head: int, norm: Any) -> Layer:
        attention = Attention(width, head, width // head, bias=True, is_causal=True, turns=False)
        return Layer(norm, attention, FeedForward(width, 4 * width, bias=True), is_post=False)

    return _transformer((6, 2048, 128, 32_000, 8, 1024), layer, _layer_norm)


@_without_values
def llama() -> Job:
    """Blocks of Llama 3 8B: 32 heads, 8 of keys and values, 2 of 32 layers; 8,192 tokens."""

    def layer(width: int, head: int, norm: Any) -> Layer:
        attention = Attention(
            width, head, width // head // (2 if IS_TINY else 4), bias=False, is_causal=True,
            turns=True,
        )  # fmt: skip
        return Layer(norm, attention, GatedFeedForward(width, width * 7 // 2), is_post=False)

    return _transformer((2, 4096, 128, 32_000, 8, 1024), layer, _rms_norm)


@_without_values
def bert() -> Job:
    """BERT-large, 8 of 24 layers, with its vocabulary; 8,192 tokens."""

    def layer(width: int, head: int, norm: Any) -> Layer:
        attention = Attention(width, head, width // head, bias=True, is_causal=False, turns=False)
        return Layer(norm, attention, FeedForward(width, 4 * width, bias=True), is_post=True)

    return _transformer((8, 1024, 64, 30_522, 16, 512), layer, _layer_norm)


@_without_values
def moe() -> Job:
    """8 experts of 4,096 at width 2,048, two a token, 3 layers; 8,192 tokens."""

    def layer(width: int, head: int, norm: Any) -> Layer:
        attention = Attention(width, head, width // head, bias=False, is_causal=True, turns=False)
        return Layer(norm, attention, Mixture(width, 4 if IS_TINY else 8, 2 * width), is_post=False)

    return _transformer((3, 2048, 128, 32_000, 16, 512), layer, _rms_norm)


@_without_values
def classifier() -> Job:
    """Two networks of width 8,192 and 32,768 classes; 4,096 samples."""
    layers, width, classes, samples = (2, 64, 128, 16) if IS_TINY else (2, 8192, 32_768, 4096)
    module = Classifier(layers, width, 2 * width, classes)
    dtype = torch.float32 if IS_TINY else torch.bfloat16
    inputs = torch.randn(samples, width).to(dtype)
    return _job(module, inputs, torch.randint(0, classes, (samples,)))


MODELS: dict[str, Callable[[], Job]] = {
    "gpt": gpt, "llama": llama, "bert": bert, "moe": moe, "classifier": classifier,
}  # fmt: skip
