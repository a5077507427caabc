"""What vLLM's own register has as CUSTOM after the plug-in was loaded: ``make test-vllm``."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run `make test-vllm`")

from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from nostall.attach.vllm import plugin
from nostall.attach.vllm.routing import VARIABLE


@pytest.mark.parametrize("asked", [False, True])
def test_custom_resolves_with_every_version(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.delenv(VARIABLE, raising=False)
    if asked:
        monkeypatch.setenv(VARIABLE, "auto")
    plugin.register()
    found = AttentionBackendEnum.CUSTOM.get_class()
    assert issubclass(found, FlashAttentionBackend)
    is_on = asked or plugin.installed_version() in plugin.RUN_ON_GPU
    assert found.get_name() == ("CUSTOM" if is_on else "FLASH_ATTN")


@pytest.mark.parametrize("asked", [False, True])
def test_the_switch_alone_puts_the_back_end_in_the_place_of_flash_attn(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TRL starts vLLM: no back end is named."""
    from nostall.attach.vllm import gpu_backend

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(plugin.SWITCH, "1")
    if asked:
        monkeypatch.setenv(VARIABLE, "auto")
    plugin.register()
    found = AttentionBackendEnum.FLASH_ATTN.get_class()
    is_on = asked or plugin.installed_version() in plugin.RUN_ON_GPU
    assert issubclass(found, gpu_backend.NostallFlashAttentionBackend) == is_on
    assert found.get_name() == "FLASH_ATTN"
    if is_on:
        assert found.get_builder_cls() is gpu_backend.NostallMetadataBuilder
        assert found.get_impl_cls() is gpu_backend.NostallAttentionImpl
        assert first_choice(monkeypatch) == AttentionBackendEnum.FLASH_ATTN.get_path()


def first_choice(monkeypatch: pytest.MonkeyPatch) -> str:
    """The class that vLLM takes on an H200 if nobody names a back end."""
    # The CPU build has no CUDA operators, which the choice does not call.
    for name in ("vllm._C_stable_libtorch", "vllm._C", "vllm._moe_C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    names = inspect.signature(cuda._get_backend_priorities).parameters
    values = {"use_mla": False, "device_capability": DeviceCapability(9, 0)}
    first = cuda._get_backend_priorities(**{k: v for k, v in values.items() if k in names})[0]
    return str(first.get_path())


def test_an_unknown_version_has_vllms_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(plugin, "installed_version", lambda: "9.9")
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "FLASH_ATTN"
