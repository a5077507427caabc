"""Compiling for another target before PyTorch is loaded: a present GPU is not looked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nostall.tuning.sources.triton_source import pretend_target


class Config:
    """``triton.runtime.driver`` before its first use, on a machine with a GPU or without one."""

    def __init__(self, found: Any) -> None:
        self._active: Any = None
        self.found = found
        self.searches = 0

    @property
    def default(self) -> Any:
        self.searches += 1
        if self.found is None:
            raise RuntimeError("0 active drivers")
        return self.found

    @property
    def active(self) -> Any:
        if self._active is None:
            self._active = self.default
        return self._active

    def set_active(self, driver: Any) -> None:
        self._active = driver


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_the_target_is_known_without_a_search_for_a_gpu() -> None:
    config = Config(SimpleNamespace(utils="the GPU's"))
    with pretend_target(config, "sm_90"):
        assert config.active.get_current_target() == "sm_90"
        assert config.searches == 0
        assert config.active.utils == "the GPU's"
    assert config._active is None and config.active is config.found


def test_without_a_gpu_other_attributes_are_missing() -> None:
    config = Config(None)
    with pretend_target(config, "sm_90"), pytest.raises(AttributeError, match="utils"):
        _ = config.active.utils
    assert config._active is None


def test_the_unused_driver_is_restored_after_an_error() -> None:
    config = Config(None)
    with pytest.raises(ValueError), pretend_target(config, "sm_90"):
        raise ValueError
    assert config._active is None
