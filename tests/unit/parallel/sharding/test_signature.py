"""Keys of stages in the price table: equal for equal stages alone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")

from torch import nn  # noqa: E402

from nostall.parallel.module import Job, Model  # noqa: E402
from nostall.parallel.sharding.hybrid.signature import signature  # noqa: E402

SAMPLES = 4


def _model(*layers: nn.Module, dtype: Any = torch.float32) -> Model:
    module = nn.Sequential(*layers).to(dtype)
    x = torch.randn(SAMPLES, 8, dtype=dtype)
    return Model(Job(module, (x,), torch.zeros_like(module(x)).detach(), nn.functional.mse_loss))


def _first(layer: nn.Module, dtype: Any = torch.float32) -> tuple[object, ...]:
    """The key of a layer that is followed by another."""
    return signature(_model(layer, nn.LayerNorm(8), dtype=dtype), 0, 1, SAMPLES)


def _frozen() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight.requires_grad_(False)
    return layer


def test_equal_layers_have_equal_keys() -> None:
    model = _model(nn.Linear(8, 8), *(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 8))
    assert signature(model, 1, 2, SAMPLES) == signature(model, 2, 3, SAMPLES)
    assert _first(nn.Linear(8, 8)) == _first(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: _first(nn.Linear(8, 8)), lambda: _first(nn.Linear(8, 8), torch.float64)),
        (lambda: _first(nn.Linear(8, 8)), lambda: _first(_frozen())),
        (lambda: _first(nn.Softmax(0)), lambda: _first(nn.Softmax(1))),
        (lambda: _first(nn.Dropout(0.1)), lambda: _first(nn.Dropout(0.2))),
        (lambda: _first(nn.LayerNorm(8)), lambda: _first(nn.LayerNorm(8, eps=0.1))),
    ],
)
def test_other_types_roles_and_arguments_have_other_keys(one: Any, other: Any) -> None:
    assert one() != other()


def test_a_received_tensor_is_no_input_and_the_last_stage_is_no_other() -> None:
    model = _model(*(nn.Linear(8, 8) for _ in range(3)))
    keys = [signature(model, n, n + 1, SAMPLES) for n in range(3)]
    assert len(set(keys)) == 3
