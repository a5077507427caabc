"""What every test of the attachment points can rely on."""

from __future__ import annotations

import pytest

from nostall.attach import warning


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test has made the process say once, it says again."""
    monkeypatch.setattr(warning, "_warned", set())
