"""The entry point: an unknown vLLM runs on without nostall."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from importlib.metadata import entry_points
from typing import Any

import pytest

from nostall.attach.vllm import plugin
from nostall.attach.vllm.routing import VARIABLE


def test_vllm_finds_the_entry_point() -> None:
    found = [
        point for point in entry_points(group="vllm.general_plugins") if point.name == "nostall"
    ]
    assert found[0].load() is plugin.register


OURS = "nostall.attach.vllm.gpu_backend.NostallAttentionBackend"
OURS_AS_FLASH = "nostall.attach.vllm.gpu_backend.NostallFlashAttentionBackend"


class Register:
    """vLLM's register of back ends."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    def member(self, name: str) -> Any:
        def get_path() -> str:
            if name not in self.paths:
                raise ValueError(f"Backend {name} must be registered before use")
            return self.paths[name]

        return types.SimpleNamespace(name=name, get_path=get_path)

    def add(self, member: Any, path: str) -> None:
        self.paths[member.name] = path


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    found = Register()
    registry: Any = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = types.SimpleNamespace(
        **{name: found.member(name) for name in ("CUSTOM", "CPU_ATTN", "FLASH_ATTN")}
    )
    found.paths["FLASH_ATTN"] = plugin.VLLM_BACKEND
    registry.register_backend = found.add
    name = ""
    for part in registry.__name__.split("."):
        name = f"{name}.{part}" if name else part
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    for variable in (plugin.CPU_VARIABLE, plugin.LINEAR_VARIABLE, plugin.SWITCH, VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    return found


@pytest.mark.parametrize("version", [None, "0.24", "0.32", "1.0"])
def test_custom_is_vllms_own_attention_where_no_gpu_ran_the_back_end(
    version: str | None,
    register: Register,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    monkeypatch.setenv(plugin.CPU_VARIABLE, "1")
    monkeypatch.setenv(plugin.SWITCH, "1")
    with caplog.at_level(logging.WARNING, logger="nostall"):
        plugin.register()
    assert register.paths.pop("CUSTOM") == plugin.VLLM_BACKEND
    assert register.paths.pop("FLASH_ATTN") == plugin.VLLM_BACKEND
    assert len(caplog.records) == 1
    assert f"with vLLM 0.25.x, not with {version}" in caplog.text
    assert bool(register.paths) == (version == "0.32")  # The CPU back end has a list of its own.


def test_a_version_that_was_tested_without_a_gpu_is_run_on_demand(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.32")
    monkeypatch.setenv(VARIABLE, "all")
    plugin.register()
    assert register.paths == {"CUSTOM": OURS, "FLASH_ATTN": plugin.VLLM_BACKEND}


def test_a_vllm_without_a_register_runs_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING, logger="nostall"):
        plugin.register()
    assert "runs without nostall" in caplog.text


@pytest.mark.parametrize("name", ["CUSTOM", "FLASH_ATTN"])
def test_another_plug_ins_back_end_is_not_replaced(
    name: str, register: Register, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register.paths[name] = "another.Backend"
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.25")
    monkeypatch.setenv(plugin.SWITCH, "1")
    with caplog.at_level(logging.WARNING, logger="nostall"):
        plugin.register()
    ours = {"CUSTOM": OURS, "FLASH_ATTN": OURS_AS_FLASH}
    assert register.paths == {**ours, name: "another.Backend"}
    assert f"{name} stays another.Backend" in caplog.text


@pytest.mark.parametrize(
    ("value", "is_replaced"), [(None, False), ("0", False), ("1", True), ("yes", False)]
)
def test_the_switch_replaces_flash_attention(
    value: str | None,
    is_replaced: bool,
    register: Register,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.25")
    if value is not None:
        monkeypatch.setenv(plugin.SWITCH, value)
    with caplog.at_level(logging.WARNING, logger="nostall"):
        plugin.register()
        plugin.register()
    expected = OURS_AS_FLASH if is_replaced else plugin.VLLM_BACKEND
    assert register.paths["FLASH_ATTN"] == expected
    assert ("allowed are 0 and 1" in caplog.text) == (value == "yes")


@pytest.mark.parametrize("cpu", [False, True])
def test_back_ends_are_registered_by_path(
    cpu: bool, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.25")
    monkeypatch.setenv(plugin.CPU_VARIABLE, "1" if cpu else "0")
    plugin.register()
    plugin.register()  # vLLM calls it in each process, and again in a fork
    assert register.paths["CUSTOM"] == OURS
    assert ("CPU_ATTN" in register.paths) == cpu


def test_the_plugin_does_not_load_numba() -> None:
    """vLLM's CPU build looks into all modules when it starts, and fails at llvmlite's."""
    code = "import sys, nostall.attach.vllm.plugin; sys.exit('llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
