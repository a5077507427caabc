"""Which registers, spills and shared memory do the serving kernels use on sm_90?

Compiles every kernel of the attention sweep, variations of the shape, and every GEMM configuration;
needs no GPU. The result is 1 if a kernel does not compile or does not fit as often on an SM as its
configuration says.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.serving.attention.kernels import KERNELS
from benchmarks.serving.checks.compiled import (
    Resources,
    attention_resources,
    gemm_resources,
    gluon_resources,
)
from nostall.serving.attention.config import AttentionShape, KernelConfig, default_kernel
from nostall.serving.attention.rules import GLUON
from nostall.serving.gemm.config import BASES

SHAPES = {
    "d64": AttentionShape(head_dim=64),
    "d96": AttentionShape(head_dim=96),
    "d256": AttentionShape(head_dim=256),
    "28/4": AttentionShape(28, 4),
    "page 256": AttentionShape(page_size=256),
    "page 48": AttentionShape(page_size=48),
    "window": AttentionShape(window=4096),
    "soft cap": AttentionShape(soft_cap=30.0),
    "trees": AttentionShape(has_trees=True),
}
"""Variations of the shape of 32/8 heads of 128 on pages of 16."""
Job = tuple[str, Callable[[], Resources], int, int]
"""Name, how to compile it, warps, programs on an SM."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--only", default="", help="part of the names to compile")


def jobs() -> list[Job]:
    """All kernels."""

    def attention(name: str, shape: AttentionShape, kernel: KernelConfig, *dtypes: str) -> Job:
        def compile_it() -> Resources:
            return attention_resources(shape, kernel, *dtypes)

        return (f"attention {name}", compile_it, kernel.warps, kernel.programs_per_sm)

    listed = [attention(name, AttentionShape(), kernel) for name, kernel in KERNELS.items()]
    for name, shape in SHAPES.items():
        listed.append(attention(name, shape, default_kernel(shape)))
    kernel = default_kernel(AttentionShape())
    listed.append(attention("fp16", AttentionShape(), kernel, "fp16"))
    listed.append(attention("fp8 cache", AttentionShape(), kernel, "bf16", "fp8e4nv"))
    for heads in ((32, 8), (28, 4)):
        shape = AttentionShape(*heads)
        # Four warps that copy and eight that compute share the registers of an SM.
        listed.append(
            (
                f"tall {heads[0]}/{heads[1]}",
                lambda shape=shape: gluon_resources(shape, GLUON),
                12,
                1,
            )
        )
    for base in BASES:
        name = f"gemm {base.rows}x{base.columns}x{base.depth} swap={base.swap}"
        listed.append((name, lambda base=base: gemm_resources(base), base.warps, 1))
    return listed


def main(options: argparse.Namespace) -> int:
    """Compile all kernels and print a line for each."""
    import triton

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache
        for name, compile_it, warps, programs in jobs():
            if options.only not in name:
                continue
            try:
                used = compile_it()
            except Exception as error:  # a kernel that does not compile is this report's answer
                rows.append({"name": name, "failure": f"{type(error).__name__}: {error}"[:300]})
                print(f"{name:32} does not compile: {rows[-1]['failure'][:80]}", flush=True)
                continue
            fits = used.programs_per_sm(warps)
            rows.append({"name": name, "wanted": programs, "fits": fits, **asdict(used)})
            print(
                f"{name:32} {used.registers:3} registers {used.stack:4} B stack "
                f"{used.shared:6} B shared, {fits} of {programs} on an SM",
                flush=True,
            )
    save(options.out, triton=triton.__version__, kernels=rows)
    return 1 if any(row.get("fits", 0) < row.get("wanted", 1) for row in rows) else 0
