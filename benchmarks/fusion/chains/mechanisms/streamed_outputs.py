"""Benchmark of evict-first stores for outputs larger than L2, alone and before a reader.

    python -m benchmarks run fusion.streamed_outputs --out OUT.json

``streamed`` kernels store their output with the evict-first policy.  For every chain that is one
kernel with one such output, the kernel of the committed result runs with and without it: alone, and
before a PyTorch kernel that reads the output.  They run as CUDA graphs over copies of the inputs;
replays are interleaved.  Both variants must write the same bytes.  Needs a GPU for one minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.chains.page import load_chains
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import (
    chain_graph,
    kernel_plans,
    plans_with_variants,
    rebuild,
)
from benchmarks.fusion.chains.timing import Inputs, Method, Run, copy_count, time_interleaved
from benchmarks.harness.result_file import save
from nostall.fusion.codegen.autotune.candidates import with_evict_first
from nostall.fusion.codegen.generate import PlanChooser, schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel

LAYOUTS = 3
"""Number of memory layouts."""
FEATURES = 512
"""Columns of the matrix by which the reader ``matmul`` multiplies."""

Reader = Callable[[Tensor], Tensor]


def readers(columns: int) -> dict[str, Reader]:
    """Kernels that may read an fp16 output with that many columns next.

    One reads it element by element, one row by row, and one is a matrix product.
    """
    weight = torch.randn(columns, FEATURES, device="cuda", dtype=torch.float16) * 0.02
    return {
        "relu": torch.relu,
        "softmax": lambda x: torch.softmax(x, -1),
        "matmul": lambda x: x @ weight,
    }


def choose_plan(plan: str, is_streamed: bool) -> PlanChooser:
    """A plan chooser that returns the plan with this text, streamed or not."""

    def choice(schedule: Schedule) -> PlannedKernel:
        (kernel,) = [each for each in plans_with_variants(schedule) if str(each) == plan]
        return plan_kernel(schedule, replace(kernel.plan, evict_first=is_streamed))

    return choice


def stitch_variants(stitched: StitchedGraph, plan: str, folder: Path) -> dict[str, StitchedGraph]:
    """The only kernel of a chain without (``kept``) and with evict-first stores (``streamed``)."""
    groups = [stitched.graph.operators]
    return {
        name: stitch(stitched.graph, groups, choice=choose_plan(plan, is_streamed), folder=folder)
        for name, is_streamed in (("kept", False), ("streamed", True))
    }


def is_comparable(stitched: StitchedGraph) -> bool:
    """Whether a chain is one kernel whose only output can be streamed."""
    if len(kernel_plans(stitched)) != 1 or len(stitched.graph.outputs) != 1:
        return False
    schedule = schedule_operators(stitched.graph, stitched.graph.operators)
    (plan,) = kernel_plans(stitched)
    kernels = plans_with_variants(schedule)
    return any(str(kernel) == plan and with_evict_first(kernel) for kernel in kernels)


def run_before(stitched: StitchedGraph, reader: Reader | None) -> Run:
    """A run of the chain, followed by ``reader`` on its output."""

    def run(inputs: Inputs) -> Tensor:
        (output,) = stitched(*inputs)
        return reader(output) if reader else output

    return run


def measure(
    chain: Chain, stitched: StitchedGraph, folder: Path, sample_count: int
) -> dict[str, Any]:
    """Time both variants of a chain alone and before each reader, and compare their outputs."""
    (plan,) = kernel_plans(stitched)
    variants = stitch_variants(stitched, plan.removesuffix(", streamed"), folder)
    sets = [chain.tensors("cuda") for _ in range(copy_count(chain))]
    (output,), (streamed_output,) = (variant(*sets[0]) for variant in variants.values())
    is_half = output.dtype == torch.float16
    samples = {}
    readers_by_name = {"alone": None, **(readers(output.shape[-1]) if is_half else {})}
    for name, reader in readers_by_name.items():
        methods = {
            variant_name: Method(run_before(variant, reader))
            for variant_name, variant in variants.items()
        }
        samples[name] = time_interleaved(methods, sets, sample_count, layouts=LAYOUTS)
    return {
        "plan": plan,
        "output_bytes": output.nbytes,
        "equal": torch.equal(output, streamed_output),
        "samples_us": samples,
    }


def summary_line(samples: dict[str, dict[str, Sequence[float]]]) -> str:
    """Time without streaming divided by the time with it, for each reader."""
    parts = []
    for name, times in samples.items():
        pairs = zip(times["kept"], times["streamed"], strict=True)
        parts.append(f"{name} {median(a / b for a, b in pairs):.3f}")
    return ", ".join(parts)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--times", type=int, default=24, help="timed samples of each variant")


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("no GPU is visible; run this on a machine with a GPU")
    results = {}
    for result in load_chains():
        chain = CHAINS[result["chain"]]
        with tempfile.TemporaryDirectory(prefix="nostall-") as folder, torch.no_grad():
            if len(chain_graph(chain).inputs) > len(chain.inputs):
                continue  # dropout draws seeds in another kernel
            stitched = rebuild(chain, result["stitched"], Path(folder))
            if is_comparable(stitched):
                record = measure(chain, stitched, Path(folder), options.times)
                results[chain.name] = record
                print(
                    f"{chain.name}: {summary_line(record['samples_us'])}; equal {record['equal']}",
                    flush=True,
                )
    save(options.out, gpu=torch.cuda.get_device_name(), torch=torch.__version__, chains=results)
    return 0 if all(record["equal"] for record in results.values()) else 1
