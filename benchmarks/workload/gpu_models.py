"""The models whose steps are profiled, with random weights: like ResNet-50, BERT and GPT-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

MODELS = ("resnet", "bert", "gpt")


@dataclass(frozen=True)
class Model:
    """A module in training mode, a batch on the host, and what makes the output a scalar."""

    name: str
    module: torch.nn.Module
    batch: dict[str, torch.Tensor]
    loss: Callable[[Any], torch.Tensor]
    samples: int


def make(name: str, device: str, tiny: bool = False) -> Model:
    """Build a model in bfloat16 on ``device``; ``tiny`` ones are for trials on a processor."""
    torch.manual_seed(0)
    module, batch, samples = {"resnet": _resnet, "bert": _bert, "gpt": _gpt}[name](tiny)
    module = module.to(device=device, dtype=torch.bfloat16).train()
    if name == "resnet":
        module = module.to(memory_format=torch.channels_last)
    if device == "cuda":
        batch = {key: value.pin_memory() for key, value in batch.items()}
    return Model(name, module, batch, lambda out: out.loss, samples)


def on_device(model: Model, device: str) -> dict[str, torch.Tensor]:
    """The batch, copied as a training loop does it."""
    return {key: value.to(device, non_blocking=True) for key, value in model.batch.items()}


def train_step(model: Model, device: str, module: torch.nn.Module | None = None) -> None:
    """Input, forward, backward; without an optimiser, which module features do not count."""
    runs = module or model.module
    runs.zero_grad(set_to_none=True)
    model.loss(runs(**on_device(model, device))).backward()


def _resnet(tiny: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
    samples, side = (2, 32) if tiny else (128, 224)
    sizes: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 1]} if tiny else {}
    config = transformers.ResNetConfig(num_labels=1000, **sizes)
    pixels = torch.randn(samples, 3, side, side, dtype=torch.bfloat16)
    batch = {
        "pixel_values": pixels.contiguous(memory_format=torch.channels_last),
        "labels": torch.randint(1000, (samples,)),
    }
    return transformers.ResNetForImageClassification(config), batch, samples


def _bert(tiny: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
    samples, length, vocabulary = (2, 16, 128) if tiny else (48, 512, 30528)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64} if tiny else {}
    heads = {"num_attention_heads": 2} if tiny else {}
    config = transformers.BertConfig(
        vocab_size=vocabulary, attention_probs_dropout_prob=0.0, **sizes, **heads
    )
    tokens = torch.randint(vocabulary, (samples, length))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return transformers.BertForMaskedLM(config), batch, samples


def _gpt(tiny: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
    # A vocabulary that is a multiple of 64, as trainers pad it for tensor cores.
    samples, length, vocabulary = (2, 16, 128) if tiny else (12, 1024, 50304)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2} if tiny else {}
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=length, attn_pdrop=0.0, use_cache=False, **sizes
    )
    tokens = torch.randint(vocabulary, (samples, length))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return transformers.GPT2LMHeadModel(config), batch, samples
