"""Snapshots of PyTorch's state, restored as in a worker process."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch._inductor import config  # noqa: E402

from nostall.attach.torch_compile.workers import torch_state  # noqa: E402
from nostall.attach.torch_compile.workers.torch_state import (  # noqa: E402
    NotOffloadable,
    TorchState,
)


def test_a_restored_state_has_modes_configuration_and_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "folder")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), config.patch(max_fusion_size=7):
        state = TorchState.capture()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    before = config.max_fusion_size
    try:
        with state.restored(autograd_cache=True):
            assert not torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert config.max_fusion_size == 7
            assert os.environ["TRITON_CACHE_DIR"] == "folder"
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    finally:
        config.max_fusion_size = before


def test_a_state_with_a_function_mode_cannot_be_captured() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode(), pytest.raises(NotOffloadable, match="a mode is on"):
        TorchState.capture()
    with torch.device("cpu"):
        TorchState.capture()


def test_pickled_names_contain_the_module_that_was_set() -> None:
    """AOTAutograd's cache keys contain the first module that has imported PyTorch."""
    before = dict(sys.modules)
    try:
        torch_state._set_pickle_module("users_module")
        assert torch_state._pickle_module() == "users_module"
        torch_state._set_pickle_module("torch._utils")
        assert torch_state._pickle_module() == "torch._utils"
    finally:
        sys.modules.clear()
        sys.modules.update(before)
