"""Stored plans: found again for their key only, refused if damaged."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from nostall.attach.vllm.routing import StepKind, stored_plan
from nostall.serving.attention.config import AttentionPlan, AttentionShape
from nostall.serving.attention.rules import PLANS
from nostall.serving.attention.space import plan_fields
from nostall.serving.attention.winners.plan_store import (
    PlanKey,
    PlanRecord,
    find_plan,
    plans_folder,
    save_plan,
)
from nostall.serving.errors import BadPlan

GPU = "NVIDIA H100"
SHAPE = AttentionShape()
PLAN = AttentionPlan(PLANS["decode"].kernel, "sorted", split=2048)


def record(key: PlanKey) -> PlanRecord:
    return PlanRecord(
        key=key, plan=json.loads(json.dumps(plan_fields(PLAN))), batch="mixed.json", ratio=1.1,
        low=1.08, high=1.12, samples=((1.1,), (1.0,), (1.1,)), evaluations=30,
    )  # fmt: skip


def test_a_plan_is_found_for_its_key_only(tmp_path: Path) -> None:
    key = PlanKey.of(SHAPE, "bfloat16", "decode", GPU)
    save_plan(record(key), tmp_path)
    assert find_plan(key, tmp_path) == PLAN
    others = [
        PlanKey.of(SHAPE, "bfloat16", "decode", "NVIDIA H200"),
        PlanKey.of(SHAPE, "float16", "decode", GPU),
        PlanKey.of(SHAPE, "bfloat16", "verify", GPU),
        PlanKey.of(AttentionShape(28, 4), "bfloat16", "decode", GPU),
        PlanKey.of(AttentionShape(page_size=32), "bfloat16", "decode", GPU),
        key.model_copy(update={"versions": {**key.versions, "triton": "3.0"}}),
    ]
    assert [find_plan(other, tmp_path) for other in others] == [None] * len(others)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    key = PlanKey.of(SHAPE, "bfloat16", "decode", GPU)
    path = save_plan(record(key), tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadPlan, match="remove the file, or search again"):
        find_plan(key, tmp_path)
    other = PlanKey.of(SHAPE, "bfloat16", "verify", GPU)
    save_plan(record(other), tmp_path).rename(path)
    with pytest.raises(BadPlan, match="for another key"):
        find_plan(key, tmp_path)


def test_the_plug_in_takes_stored_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    assert stored_plan(StepKind.DECODE, SHAPE, "bfloat16", GPU) is None
    path = save_plan(record(PlanKey.of(SHAPE, "bfloat16", "decode", GPU)))
    assert path.parent == plans_folder()
    assert stored_plan(StepKind.DECODE, SHAPE, "bfloat16", GPU) == PLAN
    grouped = replace(SHAPE, has_prefixes=True)
    for order in ("sorted", "paired"):  # the device does not build tables in pairs
        kept = record(PlanKey.of(grouped, "bfloat16", "decode", GPU))
        save_plan(kept.model_copy(update={"plan": {**kept.plan, "order": order}}))
        found = stored_plan(StepKind.DECODE, grouped, "bfloat16", GPU)
        assert (found is None) == (order == "paired")
    path.write_text("{")
    with caplog.at_level(logging.WARNING, "nostall"):
        assert stored_plan(StepKind.DECODE, SHAPE, "bfloat16", GPU) is None
    assert "remove the file" in caplog.text
