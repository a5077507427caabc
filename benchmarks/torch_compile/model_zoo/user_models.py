"""Whole models as users write them, with random weights: twelve kinds, forward and training.

Most are of ``transformers``, with the widths of published models and few layers; those that it does
not have (DiT, a state-space model, LoRA) are in :mod:`.user_modules`.  A
training step computes the loss inside the compiled function, as ``transformers`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.torch_compile.model_zoo.parts import Model, ModuleAndInputs
from benchmarks.torch_compile.model_zoo.user_modules import DiT, StateSpaceModel, add_lora


class WithLoss(nn.Module):
    """A model of ``transformers`` as a function of tensors; returns its loss or its logits."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.model, self.names, self.output = model, inputs, output

    def forward(self, *tensors: Tensor) -> Any:
        result = self.model(**dict(zip(self.names, tensors, strict=True)))
        return getattr(result, self.output)


@dataclass(frozen=True)
class Sizes:
    """Published sizes, or small ones for tests."""

    small: bool

    def __call__(self, published: int, small: int) -> int:
        return small if self.small else published


def _language(model: nn.Module, sizes: Sizes, vocabulary: int, train: bool) -> ModuleAndInputs:
    """A language model with tokens, and with labels if it is trained."""
    tokens = torch.randint(0, vocabulary, (sizes(4, 2), sizes(1024, 6)))
    if not train:
        return WithLoss(model, ("input_ids",), "logits"), (tokens,)
    return WithLoss(model, ("input_ids", "labels"), "loss"), (tokens, tokens)


def _decoder(sizes: Sizes, **changes: Any) -> dict[str, Any]:
    """Configuration that decoders of the Llama family share."""
    width = sizes(2048, 16)
    return {
        "vocab_size": sizes(32000, 50),
        "hidden_size": width,
        "intermediate_size": sizes(5632, 24),
        "num_hidden_layers": sizes(4, 1),
        "num_attention_heads": sizes(16, 2),
        "num_key_value_heads": sizes(4, 1),
        "head_dim": sizes(128, 8),
        "max_position_embeddings": sizes(2048, 16),
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **changes,
    }


def llama(sizes: Sizes, train: bool) -> ModuleAndInputs:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_decoder(sizes))
    return _language(LlamaForCausalLM(config), sizes, config.vocab_size, train)


def qwen(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """Qwen 3: RMS norms of queries and keys, a large vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_decoder(sizes, vocab_size=sizes(151936, 60)))
    return _language(Qwen3ForCausalLM(config), sizes, config.vocab_size, train)


def gemma(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """Gemma 2: capped logits, eager attention, norms before and after blocks."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **_decoder(sizes, sliding_window=sizes(512, 4)), attn_implementation="eager"
    )
    return _language(Gemma2ForCausalLM(config), sizes, config.vocab_size, train)


def gpt2(sizes: Sizes, train: bool) -> ModuleAndInputs:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes(50257, 50),
        n_positions=sizes(1024, 8),
        n_embd=sizes(768, 16),
        n_layer=sizes(6, 1),
        n_head=sizes(12, 2),
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _language(GPT2LMHeadModel(config), sizes, config.vocab_size, train)


def bert(sizes: Sizes, train: bool) -> ModuleAndInputs:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=sizes(30522, 50),
        hidden_size=sizes(768, 16),
        num_hidden_layers=sizes(6, 1),
        num_attention_heads=sizes(12, 2),
        intermediate_size=sizes(3072, 32),
        max_position_embeddings=sizes(1024, 8),
    )
    return _language(BertForMaskedLM(config), sizes, config.vocab_size, train)


def vit(sizes: Sizes, train: bool) -> ModuleAndInputs:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=sizes(768, 16),
        num_hidden_layers=sizes(6, 1),
        num_attention_heads=sizes(12, 2),
        intermediate_size=sizes(3072, 32),
        image_size=sizes(224, 8),
        patch_size=sizes(16, 4),
        num_labels=sizes(1000, 7),
    )
    images = torch.randn(sizes(64, 2), 3, config.image_size, config.image_size)
    model = ViTForImageClassification(config)
    if not train:
        return WithLoss(model, ("pixel_values",), "logits"), (images,)
    labels = torch.randint(0, sizes(1000, 7), (len(images),))
    return WithLoss(model, ("pixel_values", "labels"), "loss"), (images, labels)


def dit(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """DiT with adaptive layer norms; the output is the predicted noise."""
    width, batch = sizes(1152, 16), sizes(16, 2)
    module = DiT(width, sizes(16, 2), sizes(4, 1), sizes(4, 3))
    return module, (
        torch.randn(batch, sizes(256, 6), sizes(4, 3)),
        torch.rand(batch) * 1000,
        torch.randint(0, sizes(1000, 7), (batch,)),
    )


def t5(sizes: Sizes, train: bool) -> ModuleAndInputs:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=sizes(32128, 50),
        d_model=sizes(768, 16),
        d_kv=sizes(64, 8),
        d_ff=sizes(2048, 24),
        num_layers=sizes(3, 1),
        num_heads=sizes(12, 2),
        feed_forward_proj="gated-gelu",
        use_cache=False,
        decoder_start_token_id=0,
    )
    tokens = torch.randint(1, config.vocab_size, (sizes(8, 2), sizes(512, 6)))
    model = T5ForConditionalGeneration(config)
    names = ("input_ids", "labels" if train else "decoder_input_ids")
    return WithLoss(model, names, "loss" if train else "logits"), (tokens, tokens)


def whisper(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """The encoder of Whisper; frames are half the length of the spectrogram."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=sizes(768, 16),
        encoder_layers=sizes(6, 1),
        encoder_attention_heads=sizes(12, 2),
        encoder_ffn_dim=sizes(3072, 32),
        num_mel_bins=sizes(80, 5),
        max_source_positions=sizes(1500, 6),
    )
    spectrogram = torch.randn(sizes(8, 2), config.num_mel_bins, 2 * config.max_source_positions)
    module = WithLoss(WhisperEncoder(config), ("input_features",), "last_hidden_state")
    return module, (spectrogram,)


def state_space(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """A Mamba-like model; the output is the last hidden state."""
    width = sizes(1024, 8)
    module = StateSpaceModel(width, sizes(64, 4), sizes(64, 4), sizes(64, 3), sizes(4, 1))
    return module, (torch.randn(sizes(4, 2), sizes(1024, 6), width),)


def mixture(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """Mixtral: the experts of each token are chosen by its router."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_decoder(sizes, num_hidden_layers=sizes(2, 1), intermediate_size=sizes(2048, 24)),
        num_local_experts=sizes(8, 2),
        num_experts_per_tok=sizes(2, 1),
    )
    return _language(MixtralForCausalLM(config), sizes, config.vocab_size, train)


def lora(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """Llama with adapters of low rank on its projections; only these are trained."""
    module, inputs = llama(sizes, train)
    add_lora(module, rank=sizes(16, 2))
    return module, inputs


def llama3(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """Llama 3 with its vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_decoder(sizes, vocab_size=sizes(128256, 60)))
    return _language(LlamaForCausalLM(config), sizes, config.vocab_size, train)


def olmo2(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """OLMo 2 with its vocabulary: norms behind blocks, and of queries and keys."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(**_decoder(sizes, vocab_size=sizes(100352, 60)))
    return _language(Olmo2ForCausalLM(config), sizes, config.vocab_size, train)


def cohere(sizes: Sizes, train: bool) -> ModuleAndInputs:
    """Command R: parallel blocks, scaled logits, a vocabulary of 256,000."""
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(**_decoder(sizes, vocab_size=sizes(256000, 60), num_hidden_layers=2))
    return _language(CohereForCausalLM(config), sizes, config.vocab_size, train)


KINDS: dict[str, Callable[[Sizes, bool], ModuleAndInputs]] = {
    "llama": llama,
    "qwen": qwen,
    "gemma": gemma,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "dit": dit,
    "t5": t5,
    "whisper": whisper,
    "state-space": state_space,
    "mixture": mixture,
    "lora": lora,
}
"""Functions that make a module and its inputs, by kind."""


VOCABULARY_KINDS = {
    "gpt2": gpt2,
    "qwen": qwen,
    "llama3": llama3,
    "olmo2": olmo2,
    "cohere": cohere,
}
"""Kinds with at least 50,000 words, whose logits take much of a training step's memory."""


def vocabulary_models(small: bool = False) -> dict[str, Model]:
    """Training steps of the kinds with large vocabularies; ``small`` for tests."""
    sizes = Sizes(small)
    return {
        f"{kind}-train": Model(lambda make=make: make(sizes, True), True)  # type: ignore[misc]
        for kind, make in VOCABULARY_KINDS.items()
    }


def user_models(small: bool = False) -> dict[str, Model]:
    """Training steps of every kind, then forward steps; ``small`` for tests."""
    sizes, made = Sizes(small), {}
    for step, train in (("train", True), ("forward", False)):
        for kind, make in KINDS.items():
            made[f"{kind}-{step}"] = Model(
                lambda make=make, train=train: make(sizes, train),  # type: ignore[misc]
                train,
            )
    return made
