"""Records of a run's settings: written and read by the types of the fields."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nostall.core import Tolerance
from nostall.tuning.settings import Settings, settings_of

SETTINGS = Settings(
    "ppo",
    seed=3,
    seconds=10,
    evaluations=50,
    assumed_trips=4,
    objective="gpu",
    rounds=9,
    checks=2,
    workers=2,
    clock="events",
    cold=True,
    tolerance=Tolerance(rtol=1e-3, atol=1e-6),
    sanitizer=True,
    policy=Path("some/folder/policy.zip"),
    measured_latencies=True,
    pdl="wait",
    anneal_share=0.5,
    native="sip",
)
RECORD = {
    "objective": "gpu", "strategy": "ppo", "seed": 3, "seconds": 10, "evaluations": 50,
    "assumed_trips": 4, "workers": 2, "rounds": 9, "checks": 2, "clock": "events", "cold": True,
    "tolerance": {"rtol": 1e-3, "atol": 1e-6}, "sanitizer": True, "policy": "policy.zip",
    "measured_latencies": True, "pdl": "wait", "anneal_share": 0.5, "native": "sip",
}  # fmt: skip
"""The record in ``run.json``, as files of earlier versions have it."""


def test_a_record_has_the_format_of_earlier_versions() -> None:
    assert json.loads(json.dumps(SETTINGS.record())) == RECORD


def test_a_record_is_read_beside_other_keys() -> None:
    expected = replace(SETTINGS, policy=Path("policy.zip"))
    assert settings_of({**RECORD, "kernel": "k", "origin": "k.cubin"}) == expected


def test_records_of_the_first_version_have_six_settings() -> None:
    first = Settings("sip", seed=1, seconds=None, evaluations=7, assumed_trips=8)
    names = ("strategy", "seed", "seconds", "evaluations", "assumed_trips", "objective")
    record = first.record()
    assert settings_of({name: record[name] for name in names}) == first
    for name in names:
        with pytest.raises(KeyError, match=name):
            settings_of({key: value for key, value in record.items() if key != name})


@pytest.mark.parametrize(
    "changes", [{"seed": "x"}, {"clock": "sun"}, {"tolerance": 3}, {"seconds": "long"}]
)
def test_a_setting_of_another_type_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        settings_of({**RECORD, **changes})
