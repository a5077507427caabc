"""A loss outside of the modules of a program; here its version is not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.program.changing import losses as module  # noqa: E402
from nostall.attach.program.changing.losses import CompiledLoss, Losses  # noqa: E402

functional = torch.nn.functional


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Losses]:
    """In the place of PyTorch's function, for logits of any size on the host."""
    monkeypatch.setattr(module, "_is_large", lambda logits: logits.requires_grad)
    found, original = Losses(lambda: True), functional.cross_entropy
    found.install(functional)
    yield found
    found.version = None
    found.settle()
    assert functional.cross_entropy is original


def loss(requires_grad: bool = True) -> Any:
    torch.manual_seed(0)
    logits = torch.randn(8, 16, requires_grad=requires_grad)
    found = functional.cross_entropy(logits, torch.randint(16, (8,)))
    return found.detach()


def change_of(losses: Losses, factor: float = 1.0) -> CompiledLoss:
    change = CompiledLoss(losses)
    change._version = lambda *args: losses.original(*args) * factor  # type: ignore[misc]
    return change


def test_a_version_is_checked_and_switched(losses: Losses) -> None:
    change, before = change_of(losses), float(loss())
    assert losses.largest == 128 and change.missing() == ""
    assert "no call of cross_entropy" in change.check({}).refusal
    losses.wanted = True
    loss()
    found = change.check({})
    assert found.refusal == "" and found.result_class == "within rounding"
    other = change_of(losses, 1.01)
    losses.wanted = True
    loss()
    assert "off by" in other.check({}).refusal
    other.on()
    assert float(loss()) != before and float(loss(requires_grad=False)) == before
    other.off()
    assert float(loss()) == before


def test_a_version_that_fails_gives_the_original(losses: Losses) -> None:
    change, before = change_of(losses), float(loss())

    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    change._version = fail
    change.on()
    assert float(loss()) == before and "no memory" in losses.failure
    assert losses.version is None
