"""Numbers in the sentences about messages follow the records."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallel import message_page as page


def test_sentences_follow_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    original = page.load

    def changed(path: Path) -> Any:
        record = copy.deepcopy(original(path))
        if path == page.PASSES:
            for own in record["records"]:
                if own["plan"] == "even 1f1b" and own["setting"] == "default":
                    own["measured_s"] = 0.2
                    own["ranks"][1] |= {"forward_s": 0.006, "predicted_forward_s": 0.002}
        return record

    monkeypatch.setattr(page, "load", changed)
    text = " ".join(page.section().split())
    assert "up to 3.00 times their profile" in text and "instead of 200.0 ms" in text
