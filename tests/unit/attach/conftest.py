"""What every test of the attachment points can rely on."""

from __future__ import annotations

import pytest

from nostall.attach import delivery


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test has made the process say once, it says again."""
    monkeypatch.setattr(delivery, "_said", set())
