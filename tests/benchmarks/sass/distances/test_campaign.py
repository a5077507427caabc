"""A fault or a hang of one task ends only its worker, and the other tasks go on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
from benchmarks.sass.distances.campaign import Campaign, run_campaign

from benchmarks.sass.distances import campaign as module
from nostall.core.errors import MissingPart


@dataclass(frozen=True)
class FakeTask:
    name: str

    def run(self, template: bytes, prober: Any, share: int) -> dict[str, Any]:
        if self.name == "fault":
            raise RuntimeError("an illegal address")
        if self.name == "hang":
            time.sleep(60)
        return {"name": self.name, "prober": prober, "share": share}


def fake_prober() -> Any:
    return "the prober"


def no_prober() -> Any:
    raise MissingPart("no usable GPU")


def test_faults_and_hangs_end_only_their_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TASK_SECONDS", 1.0)
    names = ["a", "fault", "b", "hang", "c", "d", "e", "f"]
    campaign = Campaign(b"", seconds=60.0)
    run_campaign(campaign, [FakeTask(name) for name in names], fake_prober, workers=2)
    assert {row["name"] for row in campaign.results} == set("abcdef")
    assert all(row["prober"] == "the prober" and 1 <= row["share"] <= 4 for row in campaign.results)
    faults = {fault["task"]: fault["detail"] for fault in campaign.faults}
    assert set(faults) == {"fault", "hang"}
    assert "an illegal address" in faults["fault"]


def test_a_device_that_cannot_be_opened_is_reported() -> None:
    campaign = Campaign(b"", seconds=60.0)
    run_campaign(campaign, [FakeTask("a")], no_prober, workers=1)
    assert campaign.results == []
    assert "no usable GPU" in campaign.faults[0]["detail"]


def test_no_task_starts_after_the_time() -> None:
    campaign = Campaign(b"", seconds=0.0)
    run_campaign(campaign, [FakeTask("a")], fake_prober, workers=1)
    assert campaign.results == [] and campaign.faults == []
