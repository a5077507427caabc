"""Linear layers of vLLM by a table over M, with stand-ins for vLLM's classes."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nostall.attach.vllm import linear_layers, plugin
from nostall.serving.gemm.config import LinearShape
from nostall.serving.gemm.gpu_layer import library_versions
from nostall.serving.gemm.table import GemmTable, Padded, Row, save_tables

SHAPE = LinearShape(32, 48)


class UnquantizedLinearMethod:
    """vLLM's method: F.linear."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.is_packed = True

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        layer.own_calls += 1
        return torch.nn.functional.linear(x, layer.weight, bias)


class Layer(torch.nn.Module):
    """A layer of vLLM, without its loader."""

    def __init__(self, columns: int, depth: int, method: Any = None) -> None:
        super().__init__()
        self.weight = torch.randn(columns, depth, dtype=torch.bfloat16)
        self.quant_method = method or UnquantizedLinearMethod()
        self.own_calls = 0
        self.is_packed = False


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type]]:
    """Modules of vLLM that register what replaces their classes."""
    found: dict[str, type] = {}
    layers: Any = types.ModuleType("vllm.model_executor.layers.linear")
    layers.UnquantizedLinearMethod = UnquantizedLinearMethod
    for name in linear_layers.LAYERS:
        setattr(layers, name, type(name, (Layer,), {}))
    operators: Any = types.ModuleType("vllm.model_executor.custom_op")

    def register_oot(layer: type, name: str) -> None:
        found[name] = layer

    operators.PluggableLayer = types.SimpleNamespace(register_oot=register_oot)
    for module in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    sys.modules["vllm.model_executor.layers"].linear = layers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    monkeypatch.setitem(sys.modules, operators.__name__, operators)
    yield found
    linear_layers.use_tables({})


def write_table(path: Path, gpu: str = "cpu") -> Path:
    rows = (Row(7, Padded(4)), Row(40, Padded(16)))
    save_tables(path, [GemmTable(SHAPE, gpu, tuple(library_versions().items()), rows)])
    return path


def test_layers_with_rows_run_by_the_table(replaced: dict[str, type], tmp_path: Path) -> None:
    assert linear_layers.register_layers(write_table(tmp_path / "t.json"), "cpu")
    assert set(replaced) == set(linear_layers.LAYERS)
    layer = replaced["QKVParallelLinear"](SHAPE.columns, SHAPE.depth)
    layer.quant_method.process_weights_after_loading(layer)
    bias = torch.randn(SHAPE.columns, dtype=torch.bfloat16)
    for size in ((0, 48), (1, 48), (5, 48), (8, 48), (2, 3, 48), (90, 48)):
        x = torch.randn(size, dtype=torch.bfloat16)
        y = layer.quant_method.apply(layer, x, bias)
        torch.testing.assert_close(y, torch.nn.functional.linear(x, layer.weight, bias))
    assert layer.own_calls == 0 and not layer.is_packed


def test_other_layers_keep_their_product(replaced: dict[str, type], tmp_path: Path) -> None:
    linear_layers.register_layers(write_table(tmp_path / "t.json"), "cpu")
    other = replaced["RowParallelLinear"](16, 16)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    other.quant_method.process_weights_after_loading(other)
    other.quant_method.apply(other, x)
    assert other.own_calls == 1 and other.is_packed

    class Quantised(UnquantizedLinearMethod):
        pass

    method = Quantised()
    assert replaced["RowParallelLinear"](32, 48, method).quant_method is method


def test_a_stale_table_is_logged_and_changes_nothing(
    replaced: dict[str, type], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_table(tmp_path / "t.json", "another GPU")
    with caplog.at_level(logging.WARNING, logger="nostall"):
        assert not linear_layers.register_layers(path, "cpu")
        assert not linear_layers.register_layers(tmp_path / "missing.json", "cpu")
    assert not replaced
    assert caplog.text.count("linear layers stay vLLM's own") == 2
    assert "nostall serving tune" in caplog.text


def test_the_product_is_one_operator_of_a_compiled_model() -> None:
    linear_layers.use_tables({SHAPE: GemmTable(SHAPE, "cpu", (), (Row(64, Padded(8)),))})
    x = torch.randn(5, 48, dtype=torch.bfloat16)
    weight = torch.randn(32, 48, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.nostall.table_linear.default, (x, weight, None))
    linear_layers.use_tables({})


def test_without_the_variable_nothing_is_replaced(
    replaced: dict[str, type], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(plugin.LINEAR_VARIABLE, raising=False)
    plugin.register_linear_layers()
    assert not replaced
    monkeypatch.setenv(plugin.LINEAR_VARIABLE, str(write_table(tmp_path / "t.json")))
    monkeypatch.setattr(plugin, "device_name", lambda: "cpu")
    plugin.register_linear_layers()
    assert "RowParallelLinear" in replaced
