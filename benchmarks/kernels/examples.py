"""Example kernels that the benchmarks run on, compiled with the installed Triton."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nostall.core import LaunchSpec
from nostall.tuning.sources.source import Source, load_cubin
from nostall.tuning.sources.triton_source import compile_triton, load_launch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

TRITON = (
    "gemm_leakyrelu.py:gemm_leakyrelu",
    "gemm_leakyrelu.py:gemm_leakyrelu@mma",
    "gemm_leakyrelu.py:gemm_leakyrelu@wgmma",
    "fused_attention.py:fused_attention",
    "fused_attention.py:fused_attention@mma",
    "flash_attention.py:flash_attention",
    "batched_gemm.py:batched_gemm",
    "fused_feedforward.py:fused_feedforward",
    "softmax.py:softmax",
    "rmsnorm.py:rmsnorm",
)
NVCC = ("transpose", "dot_product")


Options = tuple[int, int]
"""Warps and pipeline stages."""


def sources(
    arch: str = "sm_90", options: Mapping[str, Options] | None = None
) -> Iterator[tuple[str, Source]]:
    """(name, source) of each example kernel; ``options`` replace those of its launch, by name."""
    for target in TRITON:
        path, _, name = target.partition(":")
        launch = None
        if options and name in options:
            warps, stages = options[name]
            example_launch = load_launch(EXAMPLES / path, name)
            launch = example_launch.model_copy(update={"num_warps": warps, "num_stages": stages})
        yield name, compile_triton(EXAMPLES / path, name, launch, arch)
    for name in NVCC:
        launch = LaunchSpec.from_toml(EXAMPLES / "nvcc" / f"{name}.toml")
        yield name, load_cubin(EXAMPLES / "nvcc" / f"{name}.{arch}.cubin", None, launch)
