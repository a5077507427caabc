"""The entry point: an unknown vLLM runs on without nostall."""

from __future__ import annotations

import logging
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
        CUSTOM=found.member("CUSTOM"), CPU_ATTN=found.member("CPU_ATTN")
    )
    registry.register_backend = found.add
    name = ""
    for part in registry.__name__.split("."):
        name = f"{name}.{part}" if name else part
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    for variable in (plugin.CPU_VARIABLE, plugin.LINEAR_VARIABLE, VARIABLE):
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
    with caplog.at_level(logging.WARNING, logger="nostall"):
        plugin.register()
    assert register.paths.pop("CUSTOM") == plugin.VLLM_BACKEND
    assert len(caplog.records) == 1
    assert f"with vLLM 0.25.x, not with {version}" in caplog.text
    assert bool(register.paths) == (version == "0.32")  # The CPU back end has a list of its own.


def test_a_version_that_was_tested_without_a_gpu_is_run_on_demand(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.32")
    monkeypatch.setenv(VARIABLE, "all")
    plugin.register()
    assert register.paths == {"CUSTOM": OURS}


def test_a_vllm_without_a_register_runs_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING, logger="nostall"):
        plugin.register()
    assert "runs without nostall" in caplog.text


def test_another_plug_ins_back_end_is_not_replaced(
    register: Register, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register.paths["CUSTOM"] = "another.Backend"
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.25")
    with caplog.at_level(logging.WARNING, logger="nostall"):
        plugin.register()
    assert register.paths == {"CUSTOM": "another.Backend"}
    assert "CUSTOM stays another.Backend" in caplog.text


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
