"""Numbers in the sentences of the page of sharding plans follow the records."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sharding import page


def test_sentences_follow_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    original = page.load

    def changed(path: Path) -> Any:
        record = copy.deepcopy(original(path))
        if path == page.LAUNCHED:
            record["summary"]["models"]["gpt"]["peers"]["DDP"]["over_plan"] = 0.75
        for plan in record["records"] if path in (page.LAUNCHED, page.GRAPHS) else []:
            if plan["model"] == "gpt" and "launch_s" in plan:
                plan |= {"launch_s": 0.041, "measured_s": 0.05, "launched_alone_s": 0.085}
        return record

    monkeypatch.setattr(page, "load", changed)
    text = " ".join(page.section().split())
    assert "DDP takes 25 % less time" in text
    assert "41 of the plan's 50 ms" in text
    assert "takes 1.70 times as long, too" in text
