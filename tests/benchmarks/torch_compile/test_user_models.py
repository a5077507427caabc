"""Tests of the whole models: every kind runs forward, and has gradients in a training step."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.torch_compile.model_zoo.user_models import KINDS, user_models

pytestmark = pytest.mark.slow


def test_there_are_a_forward_and_a_training_step_of_each_of_twelve_kinds() -> None:
    assert len(KINDS) == 12
    assert set(user_models(small=True)) == {
        f"{kind}-{step}" for kind in KINDS for step in ("forward", "train")
    }


@pytest.mark.parametrize("name", user_models(small=True))
def test_a_small_model_runs(name: str) -> None:
    model = user_models(small=True)[name]
    module, inputs = model.make()
    result = module.train(model.train)(*inputs)
    assert result.isfinite().all()
    if model.train:
        result.float().square().mean().backward()
        trained = [p for p in module.parameters() if p.requires_grad]
        assert trained and any(p.grad is not None and p.grad.any() for p in trained)
