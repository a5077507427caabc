"""Linear layers of a model on one GPU, from the sizes of its configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pydantic

from nostall.core.errors import BadInput
from nostall.core.text.suggest import unknown
from nostall.core.validation import first_problem
from nostall.serving.gemm.config import LinearShape


class ModelSizes(pydantic.BaseModel):
    """The fields of a Hugging Face ``config.json`` that decide its linear layers."""

    model_config = pydantic.ConfigDict(extra="ignore")

    hidden_size: int = pydantic.Field(ge=1)
    intermediate_size: int = pydantic.Field(ge=1)
    num_attention_heads: int = pydantic.Field(ge=1)
    num_key_value_heads: pydantic.PositiveInt | None = None
    head_dim: pydantic.PositiveInt | None = None

    def layers(self, ranks: int = 1, dtype: str = "bfloat16") -> dict[str, LinearShape]:
        """The layers of one of ``ranks`` tensor-parallel GPUs.

        Raises :class:`BadInput` if the sizes do not divide by the ranks, or a layer is none that
        the kernel can compute.
        """
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        head_dim = self.head_dim or self.hidden_size // heads
        if heads % ranks or self.intermediate_size % ranks:
            raise BadInput(
                f"{heads} heads and an intermediate size of {self.intermediate_size} on {ranks} "
                "GPUs; allowed are numbers of GPUs that divide both"
            )
        if heads % kv_heads or (kv_heads % ranks and ranks % kv_heads):
            raise BadInput(
                f"{heads} heads, {kv_heads} KV heads and {ranks} GPUs; allowed are KV heads that "
                "divide the heads, and numbers of GPUs that divide the KV heads or are a multiple "
                "of them"
            )
        rank_heads, rank_kv_heads = heads // ranks, max(1, kv_heads // ranks)
        inner = self.intermediate_size // ranks
        sizes = {
            "qkv": ((rank_heads + 2 * rank_kv_heads) * head_dim, self.hidden_size),
            "o": (self.hidden_size, rank_heads * head_dim),
            "gate_up": (2 * inner, self.hidden_size),
            "down": (self.hidden_size, inner),
        }
        return {name: LinearShape(n, k, dtype).check() for name, (n, k) in sizes.items()}


MODELS = {
    name: ModelSizes(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    for name, hidden, intermediate, heads, kv_heads in (
        ("llama3-8b", 4096, 14336, 32, 8),
        ("llama3-70b", 8192, 28672, 64, 8),
        ("llama3-405b", 16384, 53248, 128, 8),
        ("qwen2.5-7b", 3584, 18944, 28, 4),
        ("qwen2.5-32b", 5120, 27648, 40, 8),
        ("qwen2.5-72b", 8192, 29568, 64, 8),
        ("deepseek-67b", 8192, 22016, 64, 8),
    )
}
"""Sizes of models by name, from their published configurations."""


def model_sizes(model: str) -> ModelSizes:
    """The sizes of a model: a name of :data:`MODELS`, a ``config.json``, or a folder with one."""
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise BadInput(unknown("model", model, MODELS) + "; or give the path of a config.json")
    try:
        return ModelSizes.model_validate(json.loads(path.read_text()))
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, pydantic.ValidationError):
            reason = first_problem(error)
        raise BadInput(
            f"{path}: {reason}; give the config.json of a decoder with hidden_size, "
            "intermediate_size and num_attention_heads"
        ) from error
