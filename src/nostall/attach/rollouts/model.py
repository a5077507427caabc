"""The configuration of a model whose rollouts are measured, and the memory that an engine needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pydantic

from nostall.attach.rollouts.workload import VOCABULARY
from nostall.core.errors import BadInput
from nostall.core.validation import first_problem

GIB = float(1 << 30)
ELEMENT_BYTES = 2
BESIDE_GIB = 8.0
"""Memory of an engine beside weights, keys and values: graphs, activations, CUDA's context."""
USABLE = 0.95
"""Share of the free memory that engines may take."""


class ModelConfig(pydantic.BaseModel):
    """The fields of a Hugging Face ``config.json`` that decide memory and longest context."""

    model_config = pydantic.ConfigDict(extra="ignore")

    architectures: list[str] = pydantic.Field(min_length=1)
    hidden_size: int = pydantic.Field(ge=1)
    intermediate_size: int = pydantic.Field(ge=1)
    num_hidden_layers: int = pydantic.Field(ge=1)
    num_attention_heads: int = pydantic.Field(ge=1)
    num_key_value_heads: int | None = pydantic.Field(None, ge=1)
    head_dim: int | None = pydantic.Field(None, ge=1)
    vocab_size: int = pydantic.Field(ge=VOCABULARY)
    max_position_embeddings: int | None = pydantic.Field(None, ge=1)
    num_local_experts: int | None = pydantic.Field(None, ge=1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in bf16; more than a quantised model has."""
        heads, kv_heads, head_dim = self._attention
        attention = self.hidden_size * head_dim * 2 * (heads + kv_heads)
        experts = (self.num_local_experts or 1) * 3 * self.hidden_size * self.intermediate_size
        words = 2 * self.vocab_size * self.hidden_size
        return ELEMENT_BYTES * (self.num_hidden_layers * (attention + experts) + words)

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's keys and values in bf16."""
        _, kv_heads, head_dim = self._attention
        return 2 * ELEMENT_BYTES * self.num_hidden_layers * kv_heads * head_dim

    @property
    def _attention(self) -> tuple[int, int, int]:
        heads = self.num_attention_heads
        head_dim = self.head_dim or max(1, self.hidden_size // heads)
        return heads, self.num_key_value_heads or heads, head_dim


@dataclass(frozen=True)
class Model:
    """A model of random weights."""

    name: str
    text: str
    """Content of its ``config.json``."""
    config: ModelConfig

    @staticmethod
    def read(path: Path) -> Model:
        """The model of a ``config.json``, or of the folder that has one.

        Raises :class:`BadInput` if it is missing or no configuration of a decoder.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            text = file.read_text()
            config = ModelConfig.model_validate(json.loads(text))
        except OSError as error:
            raise BadInput(
                f"--model {path}: {file} cannot be read ({error.strerror}); give the config.json "
                "of a Hugging Face model, or its folder"
            ) from error
        except pydantic.ValidationError as error:
            raise BadInput(
                f"--model {path}: {first_problem(error, 'the document')}; give the config.json of "
                "a text model with one kind of decoder layers"
            ) from error
        except ValueError as error:
            raise BadInput(
                f"--model {path}: it is no JSON ({error}); give the config.json of a Hugging Face "
                "model"
            ) from error
        return Model(file.resolve().parent.name or str(file), text, config)


@dataclass(frozen=True)
class Memory:
    """What an engine needs on the GPU."""

    weights_gib: float
    cache_gib: float

    @staticmethod
    def of(config: ModelConfig, tokens: int) -> Memory:
        """For so many tokens in the cache of keys and values."""
        return Memory(config.weight_bytes / GIB, tokens * config.key_bytes / GIB)

    @property
    def total_gib(self) -> float:
        return self.weights_gib + self.cache_gib + BESIDE_GIB

    def engines(self, free_gib: float) -> int:
        """How many of two engines fit at a time: 2 or 1. Raises :class:`BadInput` if none does."""
        usable = USABLE * free_gib
        if self.total_gib > usable:
            raise BadInput(
                f"an engine needs {self.total_gib:.0f} GiB (weights {self.weights_gib:.0f}, keys "
                f"and values {self.cache_gib:.0f}, others {BESIDE_GIB:.0f}), and {usable:.0f} GiB "
                "of this GPU are usable; give a smaller model, --prompts, --samples or --shared"
            )
        return 2 if 2 * self.total_gib <= usable else 1
