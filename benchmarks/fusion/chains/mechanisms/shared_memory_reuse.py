"""Benchmark of shared-memory reuse in kernels of wide rows: bytes, occupancy and, on a GPU, time.

    python -m benchmarks run fusion.shared_memory_reuse --out OUT
        [--limit 300] [--rounds 40] [--chains PART]

For every chain of :mod:`.wide_row_programs` and every variant of a kernel that keeps its rows in
shared memory, without a GPU: the registers and the bytes of shared memory of the cubin for sm_90
without reuse of buffers, with reuse by dominance and with reuse by order, and the blocks of an SM,
*modelled* from both.

If a GPU is visible, the kernels with the *modelled* best plans of every variant and of every other
scheme are timed.  Several workers compile them first.  Each chain's kernels run as CUDA graphs over
copies of their inputs larger than L2, interleaved.  Then the fastest kernel with and the fastest
without rows in shared memory are compared; the latter runs twice (the null).  OUT is a JSON file;
results that it has are not computed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from torch import Tensor

from benchmarks.fusion.chains.mechanisms.reuse_rules import (
    Reuse,
    arena_by,
    emit_by,
    peak_live_bytes,
)
from benchmarks.fusion.chains.mechanisms.wide_row_programs import WIDE_ROW_CHAINS
from benchmarks.fusion.chains.stitched import chain_graph
from benchmarks.fusion.chains.timing import Method, copy_count, time_interleaved
from benchmarks.harness.gpu_pool import run_jobs, visible_gpus
from benchmarks.harness.result_file import save
from nostall.core.errors import BadLaunch
from nostall.core.measurement import Comparison
from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.on_chip import rematerialization_options
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.graph.graph import Graph
from nostall.sass import Program as SassProgram
from nostall.sass.model.occupancy import block_limits, kernel_resources
from nostall.sass.model.parameters import sm_parameters
from nostall.tuning.sources.triton_source import compile_triton

PLANS_PER_VARIANT = 2
"""Number of modelled best plans of each shared-memory variant that are timed."""
COMPILE_SECONDS, TIMING_SECONDS = 15.0, 20.0
"""Expected seconds to compile one kernel and to time one chain."""


@dataclass(frozen=True)
class Case:
    """A chain as one kernel, and the plans that the benchmark compares."""

    name: str
    """Name in ``WIDE_ROW_CHAINS``."""

    @cached_property
    def graph(self) -> Graph:
        return chain_graph(WIDE_ROW_CHAINS[self.name])

    @cached_property
    def schedule(self) -> Schedule:
        return schedule_operators(self.graph, self.graph.operators)

    @cached_property
    def shared_plans(self) -> dict[tuple[int, bool], list[KernelPlan]]:
        """Plans with rows in shared memory, modelled best first, by variant.

        A variant is the number of rematerialized buffers and whether rows are copied
        asynchronously.
        """
        by_variant: dict[tuple[int, bool], list[KernelPlan]] = {}
        for plan in self._ranked():
            if plan.scheme == "shared":
                by_variant.setdefault((plan.rematerialized, plan.async_copies), []).append(plan)
        return by_variant

    @cached_property
    def timed_plans(self) -> list[KernelPlan]:
        """Plans to be timed: the modelled best of every other scheme, then of every variant."""
        schemes: dict[str, KernelPlan] = {}
        for plan in self._ranked():
            if plan.scheme != "shared":
                schemes.setdefault(plan.scheme, plan)
        shared_plans = [
            plan for ranked in self.shared_plans.values() for plan in ranked[:PLANS_PER_VARIANT]
        ]
        return [*schemes.values(), *shared_plans]

    def _ranked(self) -> list[KernelPlan]:
        time = {
            plan: modelled_seconds(PlannedKernel(self.schedule, plan))
            for plan in plans(self.schedule).legal_plans
        }
        return sorted(time, key=lambda plan: (time[plan], str(plan)))

    def stitch(self, plan: KernelPlan, folder: Path) -> StitchedGraph:
        return stitch(
            self.graph,
            [self.graph.operators],
            choice=lambda schedule: plan_kernel(schedule, plan),
            folder=folder,
        )


# -- without a GPU ---------------------------------------------------------------------------------


def variant_resources(case: Case) -> list[dict[str, Any]]:
    """The modelled best plan of every variant that fits, and its cubin with each kind of reuse."""
    records = []
    for (rematerialized, async_copies), ranked in case.shared_plans.items():
        options, plan = (
            rematerialization_options(case.schedule, async_copies)[rematerialized],
            ranked[0],
        )
        records.append(
            {
                "plan": str(plan),
                "demoted": rematerialized,
                "copied ahead": async_copies,
                "buffers": [
                    [b.first_pass, b.last_pass, b.element_bytes, b.is_prefetched]
                    for b in options.buffers
                ],
                "live at once": peak_live_bytes(options.arena(plan.chunks[0])),
                "reuse": {reuse: cubin_resources(case, plan, reuse) for reuse in get_args(Reuse)},
            }
        )
    return records


def cubin_resources(case: Case, plan: KernelPlan, reuse: Reuse) -> dict[str, Any]:
    """Shared memory (bytes), registers and blocks per SM of a plan; 0 blocks if it does not fit."""
    program = emit_by(plan_kernel(case.schedule, plan), reuse)
    options = rematerialization_options(case.schedule, plan.async_copies)
    arena = arena_by(options[plan.rematerialized], plan.chunks[0], reuse).total_bytes
    try:
        return {"arena": arena} | _compiled(program)
    except BadLaunch:  # more shared memory than a block may have
        return {"arena": arena, "shared": None, "registers": None, "blocks_per_sm": 0}


def _compiled(program: Program) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        path = Path(folder) / "kernels.py"
        path.write_text(program.source)
        ((name, launch),) = launch_specs(program).items()
        source = compile_triton(path, name, launch, "sm_90")
    assert source.launch is not None
    binary, parameters = SassProgram.from_cubin(source.cubin), sm_parameters(90)
    resources = kernel_resources(binary, binary.kernel(), source.launch, parameters)
    blocks = min(block_limits(resources, parameters).values())
    result = {"shared": source.launch.shared, "registers": resources.registers}
    return result | {"blocks_per_sm": blocks}


# -- on a GPU --------------------------------------------------------------------------------------


def compile_plan(job: tuple[str, KernelPlan, str]) -> None:
    """Run a kernel once, so that its binary is in Triton's cache."""
    name, plan, folder = job
    case = Case(name)
    case.stitch(plan, Path(folder))(*WIDE_ROW_CHAINS[name].tensors("cuda"))
    torch.cuda.synchronize()


def time_chain(job: tuple[str, int, str]) -> dict[str, Any]:
    """Time all plans of a chain, interleaved, then compare the fastest shared and other plans."""
    name, rounds, folder = job
    case, chain = Case(name), WIDE_ROW_CHAINS[name]
    with torch.no_grad():
        kernels = {str(plan): case.stitch(plan, Path(folder)) for plan in case.timed_plans}
        sets = [chain.tensors("cuda") for _ in range(copy_count(chain))]
        reference = next(iter(kernels.values()))(*sets[0])
        errors = {
            plan: _largest_differences(reference, run(*sets[0])) for plan, run in kernels.items()
        }
        methods = {plan: _as_method(run) for plan, run in kernels.items()}
        samples = time_interleaved(methods, sets, rounds)
        median_us = {plan: statistics.median(comparison) for plan, comparison in samples.items()}
        shared_plans = {plan for plan in kernels if plan.startswith("shared")}
        fastest_shared = min(shared_plans, key=median_us.__getitem__)
        fastest_other = min(kernels.keys() - shared_plans, key=median_us.__getitem__)
        null = f"{fastest_other} again"
        finalists = {
            fastest_other: methods[fastest_other],
            fastest_shared: methods[fastest_shared],
            null: methods[fastest_other],
        }
        final_samples = time_interleaved(finalists, sets, rounds)
    comparison = Comparison.from_samples(
        final_samples[fastest_other],
        final_samples[fastest_shared],
        final_samples[null],
        kind="measured",
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copies": len(sets),
        "largest_errors": errors,
        "median_us": {plan: round(value, 3) for plan, value in median_us.items()},
        "samples_us": samples,
        "again_us": final_samples,
        "shared": fastest_shared,
        "without": fastest_other,
        "ratio": round(comparison.ratio, 4),
        "interval": [round(comparison.low, 4), round(comparison.high, 4)],
        "null": [round(comparison.null_low, 4), round(comparison.null_high, 4)],
        "verdict": comparison.verdict,
    }


def _as_method(stitched: StitchedGraph) -> Method:
    return Method(lambda inputs: stitched(*inputs))


def _largest_differences(expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[float]:
    """Largest difference of each output, relative to its largest value."""
    return [
        float((a.float() - b.float()).abs().max() / a.float().abs().max().clamp_min(1e-6))
        for a, b in zip(expected, outputs, strict=True)
    ]


# -- all chains ------------------------------------------------------------------------------------


class Record:
    """Result file, saved after every chain.

    Each entry has its Triton version, because cubins and times may come from different versions.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chains: dict[str, Any] = {}
        if path.exists():
            self.chains = json.loads(path.read_text())["chains"]

    def add(self, name: str, key: str, value: Any) -> None:
        chain = self.chains.setdefault(name, {})
        chain |= {key: value, f"{key} by": f"triton {triton.__version__}"}
        save(self.path, chains=self.chains)

    def is_missing(self, name: str, key: str) -> bool:
        return key not in self.chains.get(name, {})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chains", default="", help="only chains whose names contain this")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--limit", type=float, default=300, help="seconds")
    parser.add_argument("--workers", type=int, default=10, help="compiling processes for each GPU")


def main(options: argparse.Namespace) -> None:
    deadline = time.monotonic() + options.limit
    record = Record(options.out)
    names = [name for name in WIDE_ROW_CHAINS if options.chains in name]
    for name in names:
        if record.is_missing(name, "ways") and time.monotonic() < deadline:
            record.add(name, "ways", variant_resources(Case(name)))
            print(f"{name}: {_summary_line(record.chains[name]['ways'])}", flush=True)
    gpus = visible_gpus()
    if gpus:
        measure_on_gpus(
            [name for name in names if record.is_missing(name, "measured")], gpus, record, options
        )


def measure_on_gpus(
    names: Sequence[str], gpus: Sequence[str], record: Record, options: argparse.Namespace
) -> None:
    """Compile and time these chains within the limit."""
    deadline = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        workers = [gpu for gpu in gpus for _ in range(options.workers)]
        jobs = [(name, plan, folder) for name in names for plan in Case(name).timed_plans]
        queues = [jobs[at :: len(workers)] for at in range(len(workers))]
        for compiling in run_jobs(
            compile_plan, queues, workers, deadline, lambda _: COMPILE_SECONDS
        ):
            if compiling.error is not None:
                print(f"{compiling.job[0]}: {compiling.job[1]}: {compiling.error}", flush=True)
        timing = [[(name, options.rounds, folder) for name in names[at :: len(gpus)]]
                  for at in range(len(gpus))]  # fmt: skip
        for answer in run_jobs(time_chain, timing, gpus, deadline, lambda _: TIMING_SECONDS):
            name = answer.job[0]
            if answer.result is None:
                print(f"{name}: {answer.error}", flush=True)
                continue
            record.add(name, "measured", answer.result)
            parts = {key: answer.result[key] for key in ("shared", "without", "ratio", "verdict")}
            print(f"{name}: {parts}", flush=True)


def _summary_line(variants: Sequence[dict[str, Any]]) -> str:
    return "; ".join(
        " / ".join(f"{resources['shared'] or 'no'}" for resources in variant["reuse"].values())
        + f" bytes, {variant['reuse']['order']['blocks_per_sm']} blocks (modelled)"
        for variant in variants
    )
