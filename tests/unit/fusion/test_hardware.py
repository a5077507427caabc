"""Parameters of the GPU of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from nostall.fusion.hardware import H200, hardware_of  # noqa: E402


def test_a_gpu_has_its_own_number_of_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {1: SimpleNamespace(name="a small GPU", multi_processor_count=46)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda x: properties[x.index])
    found = hardware_of(torch.device("cuda", 1))
    assert (found.name, found.sms, found.shared_bytes) == ("a small GPU", 46, H200.shared_bytes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_gpu_it_is_the_h200(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware_of(torch.device(device)) is H200
