"""The kernels of a step are those that a serving program compiles."""

from __future__ import annotations

import types
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from nostall.attach.vllm.step_tables import StepDtypes, StepLimits, StepTables
from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionPlan, AttentionShape, KernelConfig, TileConfig
from nostall.serving.attention.rules import GLUON_PLANS
from nostall.serving.batch.examples import make_batch, odd_batch
from nostall.tuning.attention.sources import (
    AttentionStep,
    attention_functions,
    recorded_sources,
    step_sources,
)

SHAPE = AttentionShape(4, 2, 64)
PLAN = AttentionPlan(
    KernelConfig((TileConfig(16, 32, 2, "branch"),), 4, 0, 1, front_share=1.0),
    "sorted",
    least_split=64,
)
STEP = AttentionStep(make_batch([1, 1], [700, 90]), SHAPE, PLAN, "bfloat16", "two decodes")


def test_the_plug_in_compiles_the_kernels_that_are_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = types.SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    searched = step_sources(STEP, 4)
    tables = StepTables(SHAPE, PLAN, StepLimits(16, 512, 2048), torch.device("cpu"))
    with recorded_sources("sm_90", "plug-in") as served:
        tables.warm_up(StepDtypes(torch.bfloat16, torch.bfloat16), 128)
    assert [source.kernel for source in searched] == ["meta_attention", "reduce_splits"]
    assert [source.cubin for source in served] == [source.cubin for source in searched]


def test_sources_name_the_launch_and_leave_nothing_behind() -> None:
    kernel, _ = step_sources(STEP, 4)
    assert kernel.launch is not None and kernel.ptx is not None
    assert kernel.launch.grid == (4, 1, 1) and kernel.launch.block == (128, 1, 1)
    assert kernel.provenance["arch"] == "sm_90"
    for function in attention_functions():
        assert "run" not in vars(function)
        assert "nostall" not in function.device_caches


def test_a_gluon_plan_is_refused() -> None:
    step = replace(STEP, plan=GLUON_PLANS["prefill"])
    with pytest.raises(BadInput, match="the Gluon kernel, and native schedules"):
        step_sources(step, 4)


def test_a_batch_without_work_is_refused() -> None:
    with pytest.raises(BadInput, match="no query tokens"):
        step_sources(replace(STEP, ragged=make_batch([0], [7])), 4)


def test_an_architecture_that_is_not_supported() -> None:
    with pytest.raises(BadInput, match="sm_60"):
        step_sources(STEP, 4, "sm_60")


def test_checked_batches_launch_the_searched_kernels() -> None:
    searched = {source.cubin for source in step_sources(STEP, 4)}
    for seed in range(4):
        ragged = odd_batch(np.random.default_rng(seed), SHAPE.page_size, seed=seed)
        plan = replace(PLAN, units_per_program=seed % 3, least_split=256)
        step = AttentionStep(ragged, SHAPE, plan, "bfloat16", "odd lengths")
        assert {source.cubin for source in step_sources(step, 7)} <= searched


def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nostall.serving.attention.kernel.meta_attention", lambda: None)
    with pytest.raises(BadInput, match="TRITON_INTERPRET is set"):
        attention_functions()
