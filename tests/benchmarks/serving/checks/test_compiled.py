"""The kernels of the rules compile for sm_90, and as many programs fit on an SM as they say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.serving.checks.compiled import (
    Resources,
    attention_resources,
    gemm_resources,
    gluon_resources,
)

from nostall.serving.attention.config import AttentionShape, KernelConfig
from nostall.serving.attention.rules import DECODE, GLUON, PREFILL, VERIFY
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
    used = attention_resources(AttentionShape(), DECODE, "bf16", "fp8e4nv")
    assert used.programs_per_sm(DECODE.warps) >= DECODE.programs_per_sm


@pytest.mark.slow
def test_the_dependent_launch_of_the_reduction() -> None:
    kernel = replace(KernelConfig(DECODE.tiles, warps=4, registers=168), dependent=True)
    assert attention_resources(AttentionShape(), kernel).registers <= 168


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_gluon_kernel(head_dim: int) -> None:
    used = gluon_resources(AttentionShape(head_dim=head_dim), GLUON)
    assert used.programs_per_sm(12) >= 1
    # 16 elements of a head or 16 keys a product; two warpgroups; first, clear, masked, last tile.
    assert used.wgmma == 2 * (3 * head_dim // 16 + 3 * 128 // 16)
    assert used.async_copies > 0


@pytest.mark.slow
def test_the_gluon_kernel_with_the_oldest_triton(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[4]
    old = root / ".cache" / "triton-3.6.0"
    if not old.exists():
        pytest.skip("Triton 3.6 is not installed; `make .cache/triton-3.6.0` installs it")
    script = (
        "import triton\n"
        "from benchmarks.serving.checks.compiled import gluon_resources\n"
        "from nostall.serving.attention.config import AttentionShape\n"
        "from nostall.serving.attention.rules import GLUON\n"
        "print(triton.__version__, gluon_resources(AttentionShape(), GLUON).wgmma)\n"
    )
    paths = (str(old), str(root / "src"), str(root))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path)
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["3.6.0", "96"], run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("config", [BASES[0], BASES[4], BASES[9]])
def test_gemm_kernels(config: object) -> None:
    used: Resources = gemm_resources(config)  # type: ignore[arg-type]
    assert used.stack == 0
    assert used.programs_per_sm(4) >= 1
