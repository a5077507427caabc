"""Chains of memory-bound operators as users write them, with their input shapes.

Some sizes are powers of two, others are not.  Every chain is a function of tensors.  Backward
passes call ATen's backward operators, so that each method gets the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

HALF, SINGLE, BOOL, INDEX = torch.float16, torch.float32, torch.bool, torch.int64
MIN_CLASSES = 1000
"""Inputs of dtype ``INDEX`` are column numbers below this."""
DROPOUT = 0.1
"""Probability of dropout."""
MAX_ROW_BYTES = 128 << 10
"""Largest row in bytes that fits in an SM's registers (256 KB) with its intermediate values."""
_aten = torch.ops.aten


InputSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of an input."""


@dataclass(frozen=True)
class Chain:
    """A function of tensors, and the shape and dtype of each of its inputs."""

    name: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[InputSpec, ...]
    without_dropout: Callable[..., Tensor] | None = None
    """For a function with dropout: the values of the elements that are not dropped."""

    @property
    def is_single_pass(self) -> bool:
        """Whether one kernel could read every input once: rows fit on chip, no sum over rows."""
        longest = max(shape[-1] * dtype.itemsize for shape, dtype in self.inputs)
        return self.function not in _SUMMING_ROWS and longest <= MAX_ROW_BYTES

    def tensors(self, device: torch.device | str) -> list[Tensor]:
        """Random inputs; under FakeTensorMode no memory is allocated."""
        return [_random_tensor(shape, dtype, device) for shape, dtype in self.inputs]


def _random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    value = torch.rand(shape, device=device)
    if dtype == BOOL:
        return value < 0.8
    return (value * MIN_CLASSES if dtype == INDEX else (value - 0.5) * 4).to(dtype)


def norm_gelu_mask(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight, bias)) * mask


def residual_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    rms = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-6)
    return (total * rms).to(x.dtype) * weight, total


def double_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    first = F.layer_norm(x + residual, x.shape[-1:], weight, bias)
    return F.layer_norm(F.silu(first) + residual, x.shape[-1:], weight, bias)


def norm_quantise(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm, then int8 with a scale for each row."""
    fp32 = x.float()
    normed = fp32 * torch.rsqrt(fp32.square().mean(-1, keepdim=True) + 1e-6) * weight
    scale = normed.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(torch.round(normed / scale), -127, 127).to(torch.int8), scale


def softmax_mask(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x * 0.125, -1e4).softmax(-1)


def softmax_dropout(x: Tensor) -> Tensor:
    return F.dropout(x.softmax(-1), DROPOUT)


def softmax_without_dropout(x: Tensor) -> Tensor:
    """Softmax scaled as dropout scales it: the values of the elements that are not dropped."""
    return x.softmax(-1) / (1 - DROPOUT)


def lse_and_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    fp32 = x.float()
    return torch.logsumexp(fp32, -1), fp32.softmax(-1).to(x.dtype)


def log_softmax_entropy(x: Tensor) -> tuple[Tensor, Tensor]:
    log_p = x.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1), log_p.to(x.dtype)


def cross_entropy(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, and the gradient of the sum of the losses."""
    log_p = x.float().log_softmax(-1)
    loss = F.nll_loss(log_p, target, reduction="none")
    hit = torch.arange(x.shape[-1], device=x.device) == target[:, None]
    return loss, (log_p.exp() - hit.float()).to(x.dtype)


def norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _aten.native_layer_norm_backward(
        dy, x, list(x.shape[-1:]), mean, rstd, weight, bias, [True, True, True]
    )
    return gradients


def rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed, gradient = x.float() * rstd, dy.float() * weight
    projection = (gradient * normed).mean(-1, keepdim=True)
    dx = (gradient - normed * projection) * rstd
    return dx.to(x.dtype), (dy.float() * normed).sum(0).to(weight.dtype)


def softmax_backward(dy: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    gradient = _aten._softmax_backward_data(dy, y, -1, y.dtype)
    return torch.where(mask, gradient * 0.125, 0.0)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def swiglu_backward(dy: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(a)
    silu = a * gate
    return dy * b * (gate + silu * (1 - gate)), dy * silu


def geglu(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * b


def bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx = _aten.gelu_backward(dy, x + bias)
    return dx, dx.sum(0)


def lstm_cell(gates: Tensor, bias: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (gates + bias).chunk(4, -1)
    new = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new), new


def gru_cell(from_input: Tensor, from_state: Tensor, state: Tensor) -> Tensor:
    """A GRU step from the gate pre-activations of the input and of the state."""
    read, forget, new = from_input.chunk(3, -1)
    read_held, forget_held, new_held = from_state.chunk(3, -1)
    forget = torch.sigmoid(forget + forget_held)
    candidate = torch.tanh(new + torch.sigmoid(read + read_held) * new_held)
    return candidate + forget * (state - candidate)


def pooled_attention(scores: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Attention pooling of a history: scores (batch, time), values (batch, time, width)."""
    weights = torch.where(mask, scores, -1e4).softmax(-1)
    return (weights[..., None] * values).sum(1)


def channel_softmax(x: Tensor) -> Tensor:
    """Softmax over the channel axis, which is not the innermost."""
    return x.softmax(1)


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GroupNorm over 16 channels, then SiLU.

    Written out, because ATen's group norm changes the strides of its result.
    """
    batch, channels = x.shape[:2]
    grouped = x.float().view(batch, channels // 16, -1)
    mean = grouped.mean(-1, keepdim=True)
    variance = (grouped - mean).square().mean(-1, keepdim=True)
    normed = ((grouped - mean) * torch.rsqrt(variance + 1e-5)).view(x.shape)
    return F.silu(normed * weight[:, None, None] + bias[:, None, None]).to(x.dtype)


def short_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention over sequences of a few dozen tokens, as in ranking models."""
    scores = torch.where(mask, (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5, -1e4)
    return scores.softmax(-1) @ v


def short_attention_backward(
    weights: Tensor, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight_gradient = gradient @ v.transpose(-1, -2)
    scores = _aten._softmax_backward_data(weight_gradient, weights, -1, weights.dtype)
    return scores @ k, scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient


def query_attention(x: Tensor, query: Tensor) -> Tensor:
    """Attention of one query over a sequence, as in DIEN."""
    weights = torch.einsum("btd,bd->bt", x, query).softmax(-1)
    return torch.einsum("bt,btd->bd", weights, x)


def _rows(rows: int, columns: int, dtype: torch.dtype = HALF) -> InputSpec:
    return (rows, columns), dtype


def _vector(columns: int, dtype: torch.dtype = HALF) -> InputSpec:
    return (columns,), dtype


def _norm_inputs(rows: int, columns: int) -> Sequence[InputSpec]:
    return [_rows(rows, columns), *[_rows(rows, 1, SINGLE)] * 2, *[_vector(columns)] * 2]


def _chains() -> list[Chain]:
    chains: list[Chain] = []

    def add(
        name: str,
        function: Callable[..., object],
        *inputs: object,
        without_dropout: Callable[..., Tensor] | None = None,
    ) -> None:
        chains.append(Chain(name, function, tuple(inputs), without_dropout))  # type: ignore[arg-type]

    for m, n in ((65536, 768), (4096, 5000), (16384, 3000)):
        add(f"norm + gelu + mask {m}x{n}", norm_gelu_mask,
            _rows(m, n), _vector(n), _vector(n), _rows(m, n))  # fmt: skip
    for m, n in ((16384, 4096), (8192, 5120), (4096, 12288)):
        add(f"residual + RMSNorm {m}x{n}", residual_norm, _rows(m, n), _rows(m, n), _vector(n))
    for m, n in ((16384, 2048), (16384, 2500)):
        add(f"double norm {m}x{n}", double_norm,
            _rows(m, n), _rows(m, n), _vector(n), _vector(n))  # fmt: skip
    for m, n in ((16384, 4096), (8192, 7168)):
        add(f"RMSNorm + int8 {m}x{n}", norm_quantise, _rows(m, n), _vector(n))
    for m, n in ((32768, 1024), (16384, 3000)):
        add(f"softmax + mask {m}x{n}", softmax_mask, _rows(m, n), _rows(m, n, BOOL))
        add(f"softmax backward {m}x{n}", softmax_backward,
            _rows(m, n), _rows(m, n), _rows(m, n, BOOL))  # fmt: skip
    for m, n in ((16384, 2048), (16384, 5000)):
        add(
            f"softmax + dropout {m}x{n}",
            softmax_dropout,
            _rows(m, n),
            without_dropout=softmax_without_dropout,
        )
    for m, n in ((4096, 32000), (4096, 50257)):
        add(f"cross-entropy {m}x{n}", cross_entropy, _rows(m, n), _vector(m, INDEX))
    for m, n in ((8192, 32000), (64, 131072)):
        add(f"log-sum-exp + softmax {m}x{n}", lse_and_gradient, _rows(m, n))
    add("log-softmax + entropy 8192x5000", log_softmax_entropy, _rows(8192, 5000))
    for m, n in ((8192, 4096), (16384, 3000)):
        add(f"norm backward {m}x{n}", norm_backward, _rows(m, n), *_norm_inputs(m, n))
    add("RMSNorm backward 8192x4096", rms_norm_backward, *[_rows(8192, 4096)] * 2,
        _rows(8192, 1, SINGLE), _vector(4096))  # fmt: skip
    add("GeGLU 8192x11008", geglu, _rows(8192, 11008), _rows(8192, 11008))
    add("SwiGLU 16384x5504", swiglu, _rows(16384, 5504), _rows(16384, 5504))
    add("SwiGLU backward 16384x5504", swiglu_backward, *[_rows(16384, 5504)] * 3)
    add("bias + gelu backward 16384x3072", bias_gelu_backward,
        _rows(16384, 3072), _rows(16384, 3072), _vector(3072))  # fmt: skip
    add("LSTM cell 8192x1024", lstm_cell, _rows(8192, 4096), _vector(4096), _rows(8192, 1024))
    add("GRU cell 8192x1024", gru_cell,
        *[_rows(8192, 3072)] * 2, _rows(8192, 1024))  # fmt: skip
    add("attention pooling 2048x200x128", pooled_attention,
        _rows(2048, 200), _rows(2048, 200, BOOL), ((2048, 200, 128), HALF))  # fmt: skip
    for batch in (64, 512):
        heads = ((batch, 12, 48, 64), HALF)
        add(f"short attention {batch}x12x48x64", short_attention,
            heads, heads, heads, ((batch, 1, 1, 48), BOOL))  # fmt: skip
    for batch in (64, 256):
        heads = ((batch, 12, 48, 64), HALF)
        add(f"short attention backward {batch}x12x48x64", short_attention_backward,
            ((batch, 12, 48, 48), HALF), heads, heads, heads, heads)  # fmt: skip
    for batch in (4096, 16384):
        add(f"attention by a query {batch}x100x64", query_attention,
            ((batch, 100, 64), HALF), _rows(batch, 64))  # fmt: skip
    for batch in (32, 128):
        add(f"softmax over channels {batch}x150x64x64", channel_softmax,
            ((batch, 150, 64, 64), HALF))  # fmt: skip
        add(f"group norm + silu {batch}x512x32x32", group_norm_silu,
            ((batch, 512, 32, 32), HALF), _vector(512), _vector(512))  # fmt: skip
    return chains


_SUMMING_ROWS = (norm_backward, rms_norm_backward, bias_gelu_backward)
CHAINS = {chain.name: chain for chain in _chains()}
