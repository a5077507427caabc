"""Sends over a boundary: their tensors are freed, and failed ones raise their error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("torch", reason="pipelines need the extra nostall[torch]")

from nostall.parallel.execute.communication.boundary_link import BoundaryLink


@dataclass
class _Send:
    is_done: bool
    error: str = ""

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


def _link(*sends: _Send) -> BoundaryLink:
    link = object.__new__(BoundaryLink)
    link._sends = [(send, f"tensors {index}") for index, send in enumerate(sends)]
    return link


def test_tensors_are_kept_until_their_sends_complete() -> None:
    link = _link(_Send(True), _Send(False), _Send(True))
    link._drop_completed()
    assert [tensors for _, tensors in link._sends] == ["tensors 1"]


def test_a_failed_send_raises_its_error() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        _link(_Send(True, "connection closed"))._drop_completed()
