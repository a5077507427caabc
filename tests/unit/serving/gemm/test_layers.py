"""Layers of models, and the configurations that are tried for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.core.errors import BadInput
from nostall.serving.gemm.config import LinearShape, candidates
from nostall.serving.gemm.layers import MODELS, ModelSizes, model_sizes


def test_layers_of_llama3_8b() -> None:
    layers = MODELS["llama3-8b"].layers()
    assert {name: shape[:2] for name, shape in layers.items()} == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    }


def test_tensor_parallel_layers() -> None:
    layers = MODELS["llama3-8b"].layers(ranks=8)
    assert layers["qkv"][:2] == (6 * 128, 4096)
    assert layers["down"][:2] == (4096, 1792)


def test_sizes_from_a_configuration_file(tmp_path: Path) -> None:
    config = MODELS["qwen2.5-7b"].model_dump() | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_sizes(str(tmp_path)) == MODELS["qwen2.5-7b"]


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 0}'])
def test_a_damaged_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        model_sizes(str(path))
    assert "\n" not in str(caught.value)


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(BadInput, match=r"28 heads.* on 8 GPUs"):
        MODELS["qwen2.5-7b"].layers(ranks=8)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 3), (6, 4), (48, 1)])
def test_kv_heads_that_no_ranks_share(kv_heads: int, ranks: int) -> None:
    sizes = ModelSizes(
        hidden_size=3072, intermediate_size=9216, num_attention_heads=24,
        num_key_value_heads=kv_heads,
    )  # fmt: skip
    with pytest.raises(BadInput, match=f"{kv_heads} KV heads and {ranks} GPUs"):
        sizes.layers(ranks)


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"text_config": {"hidden_size": 4096}}')
    with pytest.raises(BadInput, match="hidden_size: Field required"):
        model_sizes(str(path))


def test_sizes_that_the_kernel_cannot_compute() -> None:
    sizes = ModelSizes(hidden_size=100, intermediate_size=64, num_attention_heads=5)
    with pytest.raises(BadInput, match="multiples of 16"):
        sizes.layers()


@pytest.mark.parametrize("m", [1, 7, 16, 33, 100, 256])
def test_candidates_fit_the_layer(m: int) -> None:
    shape = LinearShape(4608, 3584)
    configs = list(candidates(m, shape, 132))
    assert configs
    assert all(3584 % config.depth == 0 for config in configs)
    assert all(
        config.grid(m, shape)[0] * config.split >= 66 or config.split == 8 for config in configs
    )
