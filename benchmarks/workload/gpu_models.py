"""Models whose training steps are profiled: ResNet-50, BERT and GPT-2 with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

MODELS = ("resnet", "bert", "gpt")


@dataclass(frozen=True)
class Model:
    """A module in training mode with its batch."""

    name: str
    module: torch.nn.Module
    batch: dict[str, torch.Tensor]
    """Keyword arguments of the module, in host memory."""
    loss: Callable[[Any], torch.Tensor]
    """Maps the output of the module to a scalar."""
    samples: int


def build_model(name: str, device: str, tiny: bool = False) -> Model:
    """Build a model in bfloat16 on ``device``; ``tiny`` models are for test runs on a CPU."""
    torch.manual_seed(0)
    module, batch, samples = {"resnet": _resnet, "bert": _bert, "gpt": _gpt}[name](tiny)
    module = module.to(device=device, dtype=torch.bfloat16).train()
    if name == "resnet":
        module = module.to(memory_format=torch.channels_last)
    if device == "cuda":
        batch = {key: value.pin_memory() for key, value in batch.items()}
    return Model(name, module, batch, lambda out: out.loss, samples)


def batch_on_device(model: Model, device: str) -> dict[str, torch.Tensor]:
    """The batch, copied asynchronously as in a training loop."""
    return {key: value.to(device, non_blocking=True) for key, value in model.batch.items()}


def train_step(model: Model, device: str, module: torch.nn.Module | None = None) -> None:
    """Input copy, forward and backward; no optimiser, because module features do not count it.

    ``module`` is called instead of ``model.module`` if it is given (DistributedDataParallel).
    """
    called = module or model.module
    called.zero_grad(set_to_none=True)
    model.loss(called(**batch_on_device(model, device))).backward()


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
    # The vocabulary is padded to a multiple of 64 for tensor cores, as is common in training.
    samples, length, vocabulary = (2, 16, 128) if tiny else (12, 1024, 50304)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2} if tiny else {}
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=length, attn_pdrop=0.0, use_cache=False, **sizes
    )
    tokens = torch.randint(vocabulary, (samples, length))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return transformers.GPT2LMHeadModel(config), batch, samples
