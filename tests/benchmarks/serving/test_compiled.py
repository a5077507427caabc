"""The kernels of the rules compile for sm_90, and as many programs fit on an SM as they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.serving.compiled import Resources, attention_resources, gemm_resources

from nostall.serving.attention.config import AttentionShape, KernelConfig
from nostall.serving.attention.rules import DECODE, PREFILL, VERIFY
from nostall.serving.gemm.config import BASES

KERNELS = {
    "decode": (AttentionShape(), DECODE),
    "verify": (AttentionShape(), VERIFY),
    "prefill": (AttentionShape(), PREFILL),
    "trees of 28/4 heads": (AttentionShape(28, 4, has_trees=True), VERIFY),
    "window and soft cap": (AttentionShape(window=1024, soft_cap=30.0), VERIFY),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[None]:
    import triton

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_the_rules(name: str) -> None:
    shape, kernel = KERNELS[name]
    used = attention_resources(shape, kernel)
    assert used.programs_per_sm(kernel.warps) >= kernel.programs_per_sm
    assert used.async_copies > 0
    if kernel is not DECODE:
        assert used.wgmma > 0


@pytest.mark.slow
def test_a_cache_of_fp8() -> None:
    assert attention_resources(AttentionShape(), DECODE, "bf16", "fp8e4nv").registers <= 168


@pytest.mark.slow
def test_the_dependent_launch_of_the_reduction() -> None:
    kernel = replace(KernelConfig(DECODE.tiles, warps=4, registers=168), dependent=True)
    assert attention_resources(AttentionShape(), kernel).registers <= 168


@pytest.mark.slow
@pytest.mark.parametrize("config", [BASES[0], BASES[4], BASES[9]])
def test_gemm_kernels(config: object) -> None:
    used: Resources = gemm_resources(config)  # type: ignore[arg-type]
    assert used.stack == 0
    assert used.programs_per_sm(4) >= 1
