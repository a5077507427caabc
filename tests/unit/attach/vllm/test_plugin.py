"""The entry point: an unknown vLLM runs on without nostall."""

from __future__ import annotations

import logging
import sys
import types
from importlib.metadata import entry_points
from typing import Any

import pytest

from nostall.attach.vllm import plugin


def test_vllm_finds_the_entry_point() -> None:
    found = [
        point for point in entry_points(group="vllm.general_plugins") if point.name == "nostall"
    ]
    assert found[0].load() is plugin.register


@pytest.mark.parametrize("version", [None, "0.24", "1.0"])
def test_unsupported_versions_are_named_and_left_alone(
    version: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    with caplog.at_level(logging.WARNING, logger="nostall"):
        plugin.register()
    assert "not supported (supported: 0.25.x, 0.32.x)" in caplog.text


@pytest.mark.parametrize("cpu", [False, True])
def test_back_ends_are_registered_by_path(cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, str] = {}
    registry: Any = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = types.SimpleNamespace(CUSTOM="CUSTOM", CPU_ATTN="CPU_ATTN")
    registry.register_backend = registered.__setitem__
    name = ""
    for part in registry.__name__.split("."):
        name = f"{name}.{part}" if name else part
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.25")
    monkeypatch.setenv(plugin.CPU_VARIABLE, "1" if cpu else "0")
    plugin.register()
    assert registered["CUSTOM"] == "nostall.attach.vllm.gpu_backend.NostallAttentionBackend"
    assert ("CPU_ATTN" in registered) == cpu
