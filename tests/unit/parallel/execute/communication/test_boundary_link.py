"""Sends over a boundary: their tensors are freed, and failed ones raise their error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("torch", reason="pipelines need the extra nostall[torch]")

from nostall.parallel.sharding.program.sends import Sends


@dataclass
class _Send:
    is_done: bool
    error: str = ""

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


def test_tensors_are_kept_until_their_sends_complete() -> None:
    sends = Sends()
    for index, is_done in enumerate([True, False, True]):
        sends.add(_Send(is_done), f"tensors {index}")
    assert [tensors for _, tensors in sends._under_way] == ["tensors 1"]


def test_a_failed_send_raises_its_error() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        Sends().add(_Send(True, "connection closed"), "tensors")


def test_a_capture_does_not_ask_which_sends_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    sends = Sends()
    sends.add(_Send(True), "tensors")
    assert sends._under_way
    sends.finish()
    assert not sends._under_way
