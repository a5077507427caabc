"""The benchmark of native schedules: what it records, and that it loads the store's cubins."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.serving.attention.native_winners import (
    deployed_samples,
    searched,
    step_of,
    table,
)
from triton.runtime import driver

from benchmarks.serving.attention import native_winners
from nostall.core.measurement import Comparison
from nostall.gpu import Outcome, Timing
from nostall.serving.attention.config import AttentionPlan, AttentionShape, KernelConfig, TileConfig
from nostall.serving.attention.rules import PLANS
from nostall.serving.batch.examples import make_batch
from nostall.store import Store
from nostall.tuning.attention.sources import AttentionStep, attention_functions, step_sources
from nostall.tuning.gpu_objective import Decision
from tests.unit.attach.variants import GPU, keep_variant
from tests.unit.tuning.attention.fake_gpu import FakeGpu

PLAN = AttentionPlan(
    KernelConfig((TileConfig(16, 32, 2, "branch"),), 4, 0, 1, front_share=1.0), "sorted"
)
STEP = AttentionStep(
    make_batch([1, 1], [70, 33]), AttentionShape(2, 1, 64), PLAN, "float16", "two decodes"
)


def test_the_steps_are_those_of_the_rules() -> None:
    assert step_of("decode", "32/8").plan == PLANS["decode"]
    step = step_of("mixed", "28/4")
    assert (step.shape.heads, step.plan) == (28, PLANS["mixed"])


@pytest.mark.slow
def test_the_store_s_cubins_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    monkeypatch.setenv("NOSTALL_GPU", GPU)
    monkeypatch.setattr(native_winners, "SERIES_SECONDS", 0.1)
    for function in attention_functions():
        caches: Any = defaultdict(function.create_binder)
        monkeypatch.setattr(function, "device_caches", caches)
    monkeypatch.setattr(driver, "_active", gpu := FakeGpu())
    (source,) = step_sources(STEP, 4)
    cpu = torch.device("cpu")
    found = deployed_samples(STEP, cpu, 4)
    assert found["replaced"] == [] and gpu.ran["meta_attention"] == source.cubin
    row = keep_variant(Store(tmp_path), source.cubin)
    found = deployed_samples(STEP, cpu, 4)
    assert found["replaced"] == ["meta_attention"]
    assert set(found["samples_us"]) == {"compiled", "null", "native"}
    assert Store(tmp_path).artefacts.get(row.optimised, "cubin") in gpu.cubins
    shown = table([{"step": "two decodes", "deployed": found}])
    assert "native" in shown and "meta_attention" in shown


def test_a_search_is_recorded_with_its_samples() -> None:
    rows = ((1.0, 1.1, 1.0), (0.5, 0.5, 0.6), (1.0, 1.0, 1.1))
    timing = Timing(*rows)
    comparison = Comparison.from_samples(*rows, kind="measured")
    decision = Decision(Outcome("timed", timing), comparison)
    result: Any = SimpleNamespace(
        search=SimpleNamespace(evaluations=7, rejected=1, seconds=9.0), decision=decision
    )
    found: Any = SimpleNamespace(
        source=SimpleNamespace(kernel="meta_attention"), result=result, row=None
    )
    record = searched(found, 12.0)
    assert record["samples_s"] == list(rows) and record["stored"] is None
    assert record["ratio"][0] > 1.5 and record["verdict"] == comparison.verdict
    result.decision = None
    assert searched(found, 12.0)["checked"] == "no candidate"
