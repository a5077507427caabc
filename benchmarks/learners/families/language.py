"""Transformers for text and sound of random size, from the configurations of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from benchmarks.learners.families.sizes import Builder, Step, multiple, one_of


def _text(rng: np.random.Generator, vocabulary: int) -> torch.Tensor:
    batch, length = multiple(rng, 1, 16), multiple(rng, 64, 1024, 32)
    return torch.randint(0, vocabulary, (batch, length))


def _width_and_heads(rng: np.random.Generator) -> tuple[int, int]:
    heads = one_of(rng, 4, 8, 12, 16)
    return heads * one_of(rng, 32, 64, 128), heads


def _encoder(model: str) -> Builder:
    def build(rng: np.random.Generator) -> Step:
        width, heads = _width_and_heads(rng)
        config = getattr(hf, f"{model}Config")(
            hidden_size=width,
            num_hidden_layers=multiple(rng, 2, 16),
            num_attention_heads=heads,
            intermediate_size=4 * width,
            vocab_size=multiple(rng, 8000, 50000),
            max_position_embeddings=1100,
        )
        network = getattr(hf, f"{model}ForMaskedLM")(config)
        tokens = _text(rng, config.vocab_size)
        return lambda: network(tokens, labels=tokens).loss

    return build


def _distilbert(rng: np.random.Generator) -> Step:
    width, heads = _width_and_heads(rng)
    config = hf.DistilBertConfig(
        dim=width, n_layers=multiple(rng, 2, 8), n_heads=heads, hidden_dim=4 * width,
        max_position_embeddings=1100,
    )  # fmt: skip
    network = hf.DistilBertForMaskedLM(config)
    tokens = _text(rng, config.vocab_size)
    return lambda: network(tokens, labels=tokens).loss


def _gpt2(rng: np.random.Generator) -> Step:
    width, heads = _width_and_heads(rng)
    config = hf.GPT2Config(
        n_embd=width, n_layer=multiple(rng, 2, 24), n_head=heads, n_positions=1100,
        vocab_size=multiple(rng, 8000, 50000),
    )  # fmt: skip
    network = hf.GPT2LMHeadModel(config)
    tokens = _text(rng, config.vocab_size)
    return lambda: network(tokens, labels=tokens).loss


def _decoder(model: str, **more: Any) -> Builder:
    def build(rng: np.random.Generator) -> Step:
        width, heads = _width_and_heads(rng)
        if "num_key_value_heads" in more:
            more["num_key_value_heads"] = heads // one_of(rng, 1, 2, 4)
        config = getattr(hf, f"{model}Config")(
            hidden_size=width,
            num_hidden_layers=multiple(rng, 2, 20),
            num_attention_heads=heads,
            intermediate_size=width * one_of(rng, 2, 3, 4),
            vocab_size=multiple(rng, 16000, 64000),
            max_position_embeddings=2048,
            use_cache=False,
            **more,
        )
        network = getattr(hf, f"{model}ForCausalLM")(config)
        tokens = _text(rng, config.vocab_size)
        return lambda: network(tokens, labels=tokens).loss

    return build


def _t5(rng: np.random.Generator) -> Step:
    heads = one_of(rng, 4, 8, 12)
    config = hf.T5Config(
        d_model=heads * 64, d_kv=64, num_heads=heads, d_ff=heads * 64 * one_of(rng, 2, 4),
        num_layers=multiple(rng, 2, 12), use_cache=False,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    network = hf.T5ForConditionalGeneration(config)
    source, target = _text(rng, config.vocab_size), _text(rng, config.vocab_size)
    target = target[:1].repeat(len(source), 1)
    return lambda: network(source, labels=target).loss


def _bart(rng: np.random.Generator) -> Step:
    width, heads = _width_and_heads(rng)
    layers = multiple(rng, 2, 12)
    config = hf.BartConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers, use_cache=False,
        encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, max_position_embeddings=1100,
    )  # fmt: skip
    network = hf.BartForConditionalGeneration(config)
    source, target = _text(rng, config.vocab_size), _text(rng, config.vocab_size)
    target = target[:1].repeat(len(source), 1)
    return lambda: network(source, labels=target).loss


def _whisper(rng: np.random.Generator) -> Step:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    width, heads = _width_and_heads(rng)
    config = hf.WhisperConfig(
        d_model=width, encoder_layers=multiple(rng, 2, 16), encoder_attention_heads=heads,
        encoder_ffn_dim=4 * width, num_mel_bins=one_of(rng, 80, 128),
    )  # fmt: skip
    network = WhisperEncoder(config)
    sound = torch.empty(multiple(rng, 1, 8), config.num_mel_bins, 3000)
    return lambda: network(sound).last_hidden_state.mean()


def _wav2vec2(rng: np.random.Generator) -> Step:
    width, heads = _width_and_heads(rng)
    config = hf.Wav2Vec2Config(
        hidden_size=width, num_hidden_layers=multiple(rng, 2, 12), num_attention_heads=heads,
        intermediate_size=4 * width, apply_spec_augment=False, layerdrop=0.0,
        num_conv_pos_embedding_groups=4, num_conv_pos_embeddings=16,
    )  # fmt: skip
    network = hf.Wav2Vec2Model(config)
    sound = torch.empty(multiple(rng, 1, 8), multiple(rng, 16000, 64000))
    return lambda: network(sound).last_hidden_state.mean()


class _Experts(nn.Module):
    """A mixture of experts with a capacity for each expert, as in GShard."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.gate, self.chosen = nn.Linear(width, experts, bias=False), chosen
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, experts = x.flatten(0, 1), self.up.shape[0]
        capacity = max(4, self.chosen * len(tokens) // experts)
        shares = self.gate(tokens).softmax(-1)
        weights, chosen = shares.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = functional.one_hot(chosen.flatten(), experts)
        place = (mask.cumsum(0) * mask).sum(-1).clamp(max=capacity) - 1
        slot = chosen.flatten() * capacity + place
        routed = tokens.new_zeros(experts * capacity, tokens.shape[1])
        routed = routed.index_copy(0, slot, tokens.repeat_interleave(self.chosen, 0))
        hidden = functional.silu(torch.bmm(routed.view(experts, capacity, -1), self.up))
        output = torch.bmm(hidden, self.down).flatten(0, 1)
        gathered = output.index_select(0, slot) * weights.flatten()[:, None]
        return gathered.view(len(tokens), self.chosen, -1).sum(1).view_as(x)


class _MoeLayer(nn.Module):
    def __init__(self, width: int, heads: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = _Experts(width, 2 * width, experts, chosen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.experts(self.norms[1](x))


def _moe(rng: np.random.Generator) -> Step:
    width, heads = _width_and_heads(rng)
    experts, chosen = one_of(rng, 4, 8, 16, 64), one_of(rng, 1, 2, 4)
    layers = [_MoeLayer(width, heads, experts, chosen) for _ in range(multiple(rng, 2, 16))]
    vocabulary = multiple(rng, 16000, 64000)
    embedding, head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
    network = nn.Sequential(embedding, *layers, nn.RMSNorm(width), head)
    tokens = _text(rng, vocabulary)
    return lambda: functional.cross_entropy(network(tokens).flatten(0, 1), tokens.flatten())


LANGUAGE: dict[str, tuple[Builder, ...]] = {
    "encoder": (_encoder("Bert"), _encoder("Roberta"), _distilbert),
    "decoder": (_gpt2, _decoder("GPTNeoX")),
    "llama": tuple(
        _decoder(model, num_key_value_heads=1) for model in ("Llama", "Qwen2", "Mistral")
    ),
    "encoder-decoder": (_t5, _bart),
    "speech": (_whisper, _wav2vec2),
    "mixture-of-experts": (_moe,),
}
