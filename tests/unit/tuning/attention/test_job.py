"""Native schedules from search to load: only proved, right and faster cubins reach a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import driver

from nostall.attach import attention_kernels
from nostall.core.errors import BadInput, MissingPart
from nostall.core.launch import LaunchSpec
from nostall.gpu import Kernel, MeasurementPlan
from nostall.sass.binary.code_hash import code_sha256
from nostall.serving.attention.config import AttentionPlan, AttentionShape, KernelConfig, TileConfig
from nostall.serving.attention.winners import on_gpu
from nostall.serving.attention.winners.on_gpu import GpuBatch
from nostall.serving.batch.examples import make_batch
from nostall.store import Store
from nostall.tuning.assembler import job as assembler_job
from nostall.tuning.attention import evaluator
from nostall.tuning.attention.evaluator import Sample, StepEvaluator, TritonVariants, own_sample
from nostall.tuning.attention.job import (
    Gpu,
    NativeResult,
    check_portfolio,
    open_local_gpu,
    refuse_replacement,
    stored_answer,
    tune_step,
)
from nostall.tuning.attention.sources import AttentionStep, attention_functions, step_sources
from nostall.tuning.settings import Settings
from nostall.tuning.strategies import ASSEMBLER
from tests.unit.tuning.attention.fake_gpu import FakeGpu, InProcess

GPU = Gpu("A GPU of the tests", "sm_90", 4)
SHAPE = AttentionShape(2, 1, 64)
PLAN = AttentionPlan(
    KernelConfig((TileConfig(16, 32, 2, "branch"),), 4, 0, 1, front_share=1.0), "sorted"
)
STEP = AttentionStep(make_batch([1, 1], [70, 33]), SHAPE, PLAN, "float16", "two decodes")
SETTINGS = Settings(ASSEMBLER, evaluations=6, objective="gpu", rounds=8, checks=2)
CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Triton with a fake GPU, and attention kernels that are not compiled yet."""
    for function in attention_functions():
        caches: Any = defaultdict(function.create_binder)
        monkeypatch.setattr(function, "device_caches", caches)
    monkeypatch.setattr(driver, "_active", fake := FakeGpu())
    monkeypatch.setattr(evaluator, "odd_sample", small_sample)
    monkeypatch.setattr(on_gpu, "ROTATED_BYTES", 0)  # two caches
    monkeypatch.setattr(assembler_job, "_FINALISTS", 2)
    yield fake
    attention_kernels.attach_attention_kernels.cache_clear()


def small_sample(step: AttentionStep, seed: int, sms: int, device: torch.device) -> Sample:
    """A further batch that takes the fake GPU little time."""
    ragged = make_batch([1, 3, 0], [2 + seed % 50, 40, 0], seed=seed % 1000)
    return own_sample(step, GpuBatch.of(ragged, step.shape, torch.float16, device, 1), sms)


def opened(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[bytes], float]
) -> Callable[[AttentionStep, Kernel, MeasurementPlan], InProcess]:
    """Opens devices on which a launch takes ``seconds_of`` its cubin."""

    def timed(graphs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
        rows = []
        for graph in graphs:
            graph()
            seconds = seconds_of(gpu.ran["meta_attention"])
            rows.append([seconds * (1 + 1e-4 * (number % 3)) for number in range(rounds)])
        return rows

    monkeypatch.setattr(evaluator, "interleaved", timed)

    def open_device(step: AttentionStep, kernel: Kernel, plan: MeasurementPlan) -> InProcess:
        def variants() -> TritonVariants:
            return TritonVariants(attention_functions(), kernel.cubin, 0)

        made = StepEvaluator(step, kernel, plan, variants, CPU, GPU.sms, {"gpu": GPU.name})
        return InProcess(made)

    return open_device


def is_chosen(cubin: bytes, original: str) -> bool:
    """Whether a machine code is one of about half of all, and not the original's."""
    code = code_sha256(cubin)
    return code != original and int(code[:4], 16) % 2 == 0


def search(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, store: Store) -> NativeResult:
    """A search in which the chosen codes but the original are faster."""
    (source,) = step_sources(STEP, GPU.sms)
    original = code_sha256(source.cubin)

    def seconds_of(cubin: bytes) -> float:
        code = code_sha256(cubin)
        return (0.7 + 0.2 * int(code[4:6], 16) / 255) * 1e-3 if is_chosen(cubin, original) else 1e-3

    open_device = opened(gpu, monkeypatch, seconds_of)
    (found,) = tune_step(STEP, GPU, SETTINGS, store, open_device=open_device, workers=1)
    return found


def run_step(gpu: FakeGpu) -> bytes:
    """Launch the step; the cubin that ran."""
    batch = GpuBatch.of(STEP.ragged, SHAPE, torch.float16, CPU, 1)
    batch.launch(PLAN, GPU.sms)(batch.caches[0], torch.empty_like(batch.query))
    return gpu.ran["meta_attention"]


@pytest.mark.slow
def test_a_faster_cubin_is_stored_and_loaded_on_its_gpu_only(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    found = search(gpu, monkeypatch, Store(tmp_path))
    assert found.row is not None and found.result.recipe is not None
    assert "the store has no record of this cubin" in found.before
    assert found.row.gpu == GPU.name and found.row.ratio > 1.1
    best = found.result.cubin
    assert is_chosen(best, code_sha256(found.source.cubin))
    for name, expected in (("Another GPU", found.source.cubin), (GPU.name, best)):
        monkeypatch.setenv("NOSTALL_GPU", name)
        for function in attention_functions():
            function.device_caches = defaultdict(function.create_binder)
        attention_kernels.attach_attention_kernels.cache_clear()
        attention_kernels.attach_attention_kernels()
        assert run_step(gpu) == expected
    assert "measured on A GPU" in stored_answer(found.source, Store(tmp_path), "Another GPU")
    assert "times as fast" in stored_answer(found.source, Store(tmp_path), GPU.name)
    # What the store delivers is no start of another search.
    replaced = Store(tmp_path).lookup(found.source.cubin, gpu=GPU.name).cubin
    assert replaced is not None
    with pytest.raises(BadInput, match="a replacement from the store already"):
        refuse_replacement(replace(found.source, cubin=replaced.data), Store(tmp_path))


@pytest.mark.slow
def test_a_faster_cubin_with_a_wrong_result_is_not_stored(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (source,) = step_sources(STEP, GPU.sms)
    original = code_sha256(source.cubin)
    gpu.is_wrong = lambda cubin: code_sha256(cubin) != original
    found = search(gpu, monkeypatch, Store(tmp_path))
    assert found.row is None and found.result.cubin == source.cubin
    assert not (tmp_path / "index.sqlite").exists()


def test_no_ptxas(tmp_path: Path) -> None:
    with pytest.raises(MissingPart, match="no ptxas is installed"):
        next(tune_step(STEP, GPU, SETTINGS, Store(tmp_path), installed=[]))


def test_a_launch_of_another_kernel_is_noticed(gpu: FakeGpu) -> None:
    original = run_step(gpu)
    variants = TritonVariants(attention_functions(), original, 0)
    variant = variants.load(original[:-1] + b"x")
    with variants.using(variant):
        assert run_step(gpu) == original[:-1] + b"x"
    assert run_step(gpu) == original
    other = AttentionStep(STEP.ragged, AttentionShape(4, 1, 64), PLAN, "float16", "other")
    batch = GpuBatch.of(other.ragged, other.shape, torch.float16, CPU, 1)
    launch = batch.launch(PLAN, GPU.sms)
    with pytest.raises(BadInput, match="compiled another kernel"), variants.using(variant):
        launch(batch.caches[0], torch.empty_like(batch.query))
    assert run_step(gpu) == original
    with pytest.raises(BadInput, match="compiles another kernel"):
        TritonVariants(attention_functions(), b"none", 0)


@pytest.mark.slow
def test_the_portfolio_is_assembled_and_verified() -> None:
    (source,) = step_sources(STEP, GPU.sms)
    checked = check_portfolio(source, workers=1, most=2)
    assert checked.statuses == {"built": 2} and checked.codes > 0 and not checked.unsafe
    assert checked.reproduces


@pytest.mark.slow
def test_the_worker_process_says_that_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    kernel = Kernel(b"", "meta_attention", LaunchSpec())
    with pytest.raises(MissingPart, match="no GPU is present"):
        open_local_gpu(STEP, kernel, MeasurementPlan())
