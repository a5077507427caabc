"""What vLLM's own register has as CUSTOM after the plug-in was loaded: ``make test-vllm``."""

from __future__ import annotations

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


def test_an_unknown_version_has_vllms_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(plugin, "installed_version", lambda: "9.9")
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "FLASH_ATTN"
