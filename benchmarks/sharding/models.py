"""Training jobs of eight kinds of models, at any width and number of layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nostall.parallel.module import Job

IGNORED = -100
"""Target of a position that does not count in the loss."""


@dataclass(frozen=True)
class Size:
    """Size of a model; dropout is off."""

    layers: int = 2
    width: int = 16
    heads: int = 4
    inner: int = 32
    """Width of the feed-forward network, or of the fully connected layers of a VGG."""
    vocabulary: int = 32
    length: int = 8
    """Tokens of a sample, or pixels along each side of an image."""
    samples: int = 4
    experts: int = 4
    dtype: torch.dtype = torch.float64


def bert(size: Size) -> Job:
    """BERT with its masked-language head; some positions do not count in the loss."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        max_position_embeddings=size.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    tokens = _tokens(size)
    targets = tokens.masked_fill(tokens % 3 == 1, IGNORED)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return Job(BertForMaskedLM(config).to(size.dtype), inputs, targets, each_token)


def gpt2(size: Size) -> Job:
    """GPT-2, whose embedding and head share their weights and whose attention weights are fused."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.heads,
        n_inner=size.inner,
        vocab_size=size.vocabulary,
        n_positions=size.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = _tokens(size)
    module = GPT2LMHeadModel(config).to(size.dtype)
    return Job(module, {"input_ids": tokens, "use_cache": False}, tokens, next_token)


class RmsNorm(nn.Module):
    """HF's RMSNorm without the cast to single precision, whose rounding depends on the sharding."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def _in_own_precision(module: nn.Module) -> nn.Module:
    """A module of double precision with :class:`RmsNorm`; others stay as they are."""
    if next(module.parameters()).dtype is not torch.float64:
        return module
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
                setattr(parent, name, RmsNorm(child.weight, child.variance_epsilon))
    return module


def llama(size: Size) -> Job:
    """Llama: RMSNorm, rotary embeddings, gated feed-forward network."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.length,
        attention_dropout=0.0,
    )
    tokens = _tokens(size)
    module = _in_own_precision(LlamaForCausalLM(config).to(size.dtype))
    return Job(module, {"input_ids": tokens, "use_cache": False}, tokens, next_token)


def t5(size: Size) -> Job:
    """T5 with as many encoder as decoder layers; relative position biases, tied embeddings."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_kv=size.width // size.heads,
        d_ff=size.inner,
        num_layers=size.layers,
        num_decoder_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    tokens = _tokens(size)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens.clone(), "use_cache": False}
    module = _in_own_precision(T5ForConditionalGeneration(config).to(size.dtype))
    return Job(module, inputs, tokens.clone(), each_token)


def vgg(size: Size) -> Job:
    """VGG: two convolutions and a pooling for each layer, then three fully connected layers."""
    widths = [3, *(size.width * 2**i for i in range(size.layers))]
    parts: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        parts += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
        parts += [nn.Conv2d(outside, outside, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    side = size.length // 2**size.layers
    parts += [nn.Flatten(), nn.Linear(widths[-1] * side * side, size.inner), nn.ReLU()]
    parts += [nn.Linear(size.inner, size.inner), nn.ReLU()]
    parts += [nn.Linear(size.inner, size.vocabulary)]
    return _classifier(nn.Sequential(*parts), size)


class ResidualBlock(nn.Module):
    """Two convolutions with group norm and a skip connection; BatchNorm in training mode would
    take its statistics from shards."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, outside)
        self.skip = nn.Conv2d(inside, outside, 1, bias=False) if inside != outside else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x if self.skip is None else self.skip(x)
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)) + skip)


def resnet(size: Size) -> Job:
    """A residual network with group norm."""
    blocks = [ResidualBlock(3, size.width)]
    blocks += [ResidualBlock(size.width, size.width) for _ in range(size.layers - 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size.width, size.vocabulary)]
    return _classifier(nn.Sequential(*blocks, *head), size)


def wide_classifier(size: Size) -> Job:
    """Fully connected layers and a classifier whose classes are many."""
    parts: list[nn.Module] = []
    for _ in range(size.layers):
        parts += [nn.Linear(size.width, size.width), nn.ReLU()]
    module = nn.Sequential(*parts, nn.Linear(size.width, size.vocabulary)).to(size.dtype)
    inputs = torch.randn(size.samples, size.width, dtype=size.dtype)
    targets = torch.randint(0, size.vocabulary, (size.samples,))
    return Job(module, (inputs,), targets, F.cross_entropy)


class Experts(nn.Module):
    """A mixture of experts in dense form: each token is weighted by the router's probabilities."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.experts, bias=False)
        scale = size.width**-0.5
        self.up = nn.Parameter(torch.randn(size.experts, size.width, size.inner) * scale)
        self.down = nn.Parameter(torch.randn(size.experts, size.inner, size.width) * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights = self.router(tokens).softmax(-1)
        each = tokens.expand(self.up.shape[0], *tokens.shape)
        results = torch.bmm(F.relu(torch.bmm(each, self.up)), self.down)
        mixed = (results * weights.t().unsqueeze(-1)).sum(0)
        return x + mixed.view(x.shape)


def experts(size: Size) -> Job:
    """Layers of mixtures of experts between an embedding and a head."""
    module = nn.Sequential(
        nn.Embedding(size.vocabulary, size.width),
        *(Experts(size) for _ in range(size.layers)),
        nn.Linear(size.width, size.vocabulary, bias=False),
    ).to(size.dtype)
    tokens = _tokens(size)
    return Job(module, (tokens,), tokens.clone(), _flat_cross_entropy)


def each_token(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each position; positions with :data:`IGNORED` do not count."""
    return _flat_cross_entropy(output.logits, targets)


def next_token(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token; the last position does not count."""
    last = torch.full_like(tokens[:, :1], IGNORED)
    return _flat_cross_entropy(output.logits, torch.cat([tokens[:, 1:], last], 1))


def _flat_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _tokens(size: Size) -> torch.Tensor:
    return torch.randint(1, size.vocabulary, (size.samples, size.length))


def _classifier(module: nn.Module, size: Size) -> Job:
    images = torch.randn(size.samples, 3, size.length, size.length, dtype=size.dtype)
    targets = torch.randint(0, size.vocabulary, (size.samples,))
    return Job(module.to(size.dtype), (images,), targets, F.cross_entropy)


MODELS: dict[str, Callable[[Size], Job]] = {
    "bert": bert,
    "gpt2": gpt2,
    "t5": t5,
    "llama": llama,
    "vgg": vgg,
    "resnet": resnet,
    "wide_classifier": wide_classifier,
    "experts": experts,
}
"""Models by name; the caller seeds PyTorch before it builds one."""
