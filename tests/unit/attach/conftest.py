"""Fixtures for all tests of the attachment points."""

from __future__ import annotations

import pytest

from nostall.attach import warning


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that an earlier test has caused are logged again."""
    monkeypatch.setattr(warning, "_warned", set())
