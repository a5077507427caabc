"""Generated chains of memory-bound operators: every kind of chain on shapes that models have.

The chains are split once and for all: the name of a chain decides whether schedules and cost models
may be fitted on it (``train``) or only judged on it (``test``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.fusion.chains.programs import Chain, InputSpec

Split = Literal["train", "test"]
BF16, FP32, BOOL, INDEX = torch.bfloat16, torch.float32, torch.bool, torch.int64
BLOCK = 128
"""Elements that share a scale in block-wise quantisation."""
MAX_ELEMENTS = 1 << 28
"""Elements of the largest tensor: 512 MB in bf16."""
SHAPES: tuple[tuple[int, int], ...] = (
    (1, 1 << 20),
    (8, 151936),
    (64, 50304),
    (1, 4096),
    (32, 3000),
    (512, 128),
    (1024, 1536),
    (2048, 151936),
    (4096, 50304),
    (4096, 3000),
    (8192, 4096),
    (16384, 768),
    (16384, 5120),
    (65536, 1024),
    (262144, 128),
    (1 << 20, 64),
)
"""Rows and columns: from one row to a million, and the last dimensions of heads, hidden states,
and vocabularies."""
_aten = torch.ops.aten


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    fp32 = x.float()
    return (fp32 * torch.rsqrt(fp32.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def layer_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.layer_norm(x, x.shape[-1:], weight, bias))


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    fp32, scaled = x.float(), g.float() * weight.float()
    inverse = torch.rsqrt(fp32.square().mean(-1, keepdim=True) + 1e-6)
    unit = fp32 * inverse
    dx = inverse * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g.float() * unit).sum(0).to(weight.dtype)


def norm_quantise_blocks(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm, then int8 with a scale for each block of a row."""
    blocks = rms_norm(x, weight).float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    quantised = torch.clamp(torch.round(blocks / scale), -127, 127).to(torch.int8)
    return quantised.flatten(-2), scale.squeeze(-1)


def dequantise_gelu(q: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(q.float() * scale + bias.float()).to(BF16)


def swiglu(x: Tensor, gate: Tensor) -> Tensor:
    return F.silu(gate.float()).to(x.dtype) * x


def geglu_backward(g: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    activated = F.gelu(gate, approximate="tanh")
    return g * activated, _aten.gelu_backward(g * x, gate, approximate="tanh")


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return x.float().masked_fill(~mask, -1e9).softmax(-1).to(x.dtype)


def softcap_softmax(x: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(30 * torch.tanh(x.float() / 30) + bias.float(), -1).to(x.dtype)


def softmax_backward(g: Tensor, y: Tensor) -> Tensor:
    product = g.float() * y.float()
    return (product - y.float() * product.sum(-1, keepdim=True)).to(g.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def log_probability_entropy(x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(x.float(), -1)
    return log_p.gather(-1, label[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def cross_entropy_backward(x: Tensor, label: Tensor, scale: Tensor) -> Tensor:
    one_hot = torch.zeros_like(x, dtype=FP32).scatter(1, label[:, None], 1.0)
    return ((torch.softmax(x.float(), -1) - one_hot) * scale[:, None]).to(x.dtype)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x.float(), y.float(), dim=-1)


def adam_step(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    fp32 = g.float()
    m, v = m * 0.9 + fp32 * 0.1, v * 0.999 + fp32.square() * 0.001
    return w * (1 - 1e-4) - 1e-3 * m / (v.sqrt() + 1e-8), m, v


def _tensor(*shape: int, dtype: torch.dtype = BF16) -> InputSpec:
    return shape, dtype


Inputs = Callable[[int, int], tuple[InputSpec, ...]]


def _matrices(count: int, vectors: int = 0) -> Inputs:
    return lambda r, c: (*[_tensor(r, c)] * count, *[_tensor(c)] * vectors)


KINDS: dict[str, tuple[Callable[..., object], Inputs]] = {
    "rms norm": (rms_norm, _matrices(1, 1)),
    "residual + rms norm": (residual_rms_norm, _matrices(2, 1)),
    "layer norm + silu": (layer_norm_silu, _matrices(1, 2)),
    "rms norm backward": (rms_norm_backward, _matrices(2, 1)),
    "rms norm + block quantisation": (norm_quantise_blocks, _matrices(1, 1)),
    "dequantise + gelu": (
        dequantise_gelu,
        lambda r, c: (_tensor(r, c, dtype=torch.int8), _tensor(r, 1, dtype=FP32), _tensor(c)),
    ),
    "swiglu": (swiglu, _matrices(2)),
    "geglu backward": (geglu_backward, _matrices(3)),
    "masked softmax": (masked_softmax, lambda r, c: (_tensor(r, c), _tensor(r, c, dtype=BOOL))),
    "softcap softmax": (softcap_softmax, _matrices(1, 1)),
    "softmax backward": (softmax_backward, _matrices(2)),
    "rotary": (rotary, _matrices(3)),
    "log probability + entropy": (
        log_probability_entropy,
        lambda r, c: (_tensor(r, c), _tensor(r, dtype=INDEX)),
    ),
    "cross-entropy backward": (
        cross_entropy_backward,
        lambda r, c: (_tensor(r, c), _tensor(r, dtype=INDEX), _tensor(r, dtype=FP32)),
    ),
    "cosine": (cosine, _matrices(2)),
    "adam step": (
        adam_step,
        lambda r, c: tuple(_tensor(r, c, dtype=d) for d in (FP32, BF16, FP32, FP32)),
    ),
}
"""Function and inputs of each kind of chain, for a number of rows and of columns."""
NEEDS_BLOCKS, NEEDS_LABELS = (
    {"rms norm + block quantisation"},
    {
        "log probability + entropy",
        "cross-entropy backward",
    },
)


def _chains() -> Iterator[Chain]:
    for kind, (function, inputs) in KINDS.items():
        for rows, columns in SHAPES:
            # Random labels are below 1,000 (programs.MIN_CLASSES).
            has_labels = kind not in NEEDS_LABELS or columns >= 1000
            has_blocks = kind not in NEEDS_BLOCKS or columns % BLOCK == 0
            if rows * columns <= MAX_ELEMENTS * 2 and has_labels and has_blocks:
                name = f"{kind} {rows}x{columns}"
                yield Chain(name, function, inputs(rows, columns))  # type: ignore[arg-type]


GENERATED: dict[str, Chain] = {chain.name: chain for chain in _chains()}
"""All generated chains by name."""


def split_of(name: str) -> Split:
    """The half that a chain belongs to: the lowest bit of the SHA-256 of its name."""
    return "test" if hashlib.sha256(name.encode()).digest()[0] & 1 else "train"


def generated_names(split: Split) -> list[str]:
    """The names of the chains of one half."""
    return [name for name in GENERATED if split_of(name) == split]
