"""Shared-memory bytes of wide rows with reuse on and off, and on a GPU the time of such kernels.

    python -m benchmarks run fusion.shared_memory_reuse --out OUT [--limit 300] [--rounds 40] [--chains PART]

For every chain of ``benchmarks.fusion.chains.wide_row_programs`` and every way to keep less of a row on chip: what
the cubin for sm_90 takes of shared memory where no two buffers share it, where they do by dominance
and where they do by order; its registers, and how many blocks an SM holds, *modelled* from both.
That needs no GPU.  Where there is one, kernels that keep rows are then timed beside the best plans
(*modelled*) of the schemes that do not: first compiled by several workers, then one chain after the
other, as CUDA graphs that walk over copies of their inputs larger than L2, in turns; the fastest of
both sides run again beside each other, the one without shared memory twice (the null).  OUT is a
JSON file; what is in it is left out.
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

from benchmarks.fusion.chains.stitched import graph_of
from benchmarks.fusion.chains.timing import Method, copies, in_turns
from benchmarks.fusion.chains.wide_row_programs import WIDE
from benchmarks.harness.gpu_pool import run_jobs, visible_gpus
from benchmarks.harness.result_file import save
from nostall.core.errors import BadLaunch
from nostall.core.measurement import Comparison
from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.emit.shared import emit_shared
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators, stitch
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.on_chip import rematerialization_options
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.codegen.tiling.shared_memory import Reuse
from nostall.fusion.graph.graph import Graph
from nostall.sass import Program as SassProgram
from nostall.sass.model.occupancy import block_limits, kernel_resources
from nostall.sass.model.parameters import sm_parameters
from nostall.tuning.source import compile_triton

EACH_WAY = 2
"""Modelled best plans of every way to keep rows that are timed."""
COMPILING, TIMING = 15.0, 20.0
"""About how many seconds one kernel and one chain take."""


@dataclass(frozen=True)
class Case:
    """A chain as one pattern, and the plans that take part."""

    name: str

    @cached_property
    def graph(self) -> Graph:
        return graph_of(WIDE[self.name])

    @cached_property
    def of(self) -> Schedule:
        return schedule_operators(self.graph, self.graph.operators)

    @cached_property
    def ways(self) -> dict[tuple[int, bool], list[KernelPlan]]:
        """Plans that keep rows, by how much is demoted and whether it is copied ahead, each with
        the modelled best first."""
        found: dict[tuple[int, bool], list[KernelPlan]] = {}
        for plan in self._ranked():
            if plan.scheme == "shared":
                found.setdefault((plan.rematerialized, plan.async_copies), []).append(plan)
        return found

    @cached_property
    def timed(self) -> list[KernelPlan]:
        """What is timed: the modelled best of every other scheme, then of every way."""
        schemes: dict[str, KernelPlan] = {}
        for plan in self._ranked():
            if plan.scheme != "shared":
                schemes.setdefault(plan.scheme, plan)
        kept = [plan for ranked in self.ways.values() for plan in ranked[:EACH_WAY]]
        return [*schemes.values(), *kept]

    def _ranked(self) -> list[KernelPlan]:
        time = {
            plan: modelled_seconds(PlannedKernel(self.of, plan))
            for plan in plans(self.of).legal_plans
        }
        return sorted(time, key=lambda plan: (time[plan], str(plan)))

    def stitched(self, plan: KernelPlan, folder: Path) -> StitchedGraph:
        return stitch(
            self.graph,
            [self.graph.operators],
            choice=lambda of: plan_kernel(of, plan),
            folder=folder,
        )


# -- without a GPU ---------------------------------------------------------------------------------


def bytes_of(case: Case) -> list[dict[str, Any]]:
    """For every way that fits: its best plan, and its cubin with each kind of reuse."""
    found = []
    for (demoted, ahead), ranked in case.ways.items():
        kept, plan = rematerialization_options(case.of, ahead)[demoted], ranked[0]
        found.append(
            {
                "plan": str(plan),
                "demoted": demoted,
                "copied ahead": ahead,
                "buffers": [
                    [b.first_pass, b.last_pass, b.element_bytes, b.is_prefetched]
                    for b in kept.buffers
                ],
                "live at once": kept.arena(plan.chunks[0]).peak_live_bytes,
                "reuse": {reuse: cubin(case, plan, reuse) for reuse in get_args(Reuse)},
            }
        )
    return found


def cubin(case: Case, plan: KernelPlan, reuse: Reuse) -> dict[str, Any]:
    """What a plan takes with one kind of reuse, in bytes; 0 blocks where it is too much."""
    program = emit_shared(plan_kernel(case.of, plan), reuse)
    arena = (
        rematerialization_options(case.of, plan.async_copies)[plan.rematerialized]
        .arena(plan.chunks[0], reuse)
        .total_bytes
    )
    try:
        return {"arena": arena} | _compiled(program)
    except BadLaunch:  # more than a block can have
        return {"arena": arena, "shared": None, "registers": None, "blocks_per_sm": 0}


def _compiled(program: Program) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        path = Path(folder) / "kernels.py"
        path.write_text(program.source)
        ((name, launch),) = launch_specs(program).items()
        source = compile_triton(path, name, launch, "sm_90")
    assert source.launch is not None
    binary, table = SassProgram.from_cubin(source.cubin), sm_parameters(90)
    need = kernel_resources(binary, binary.kernel(), source.launch, table)
    blocks = min(block_limits(need, table).values())
    taken = {"shared": source.launch.shared, "registers": need.registers}
    return taken | {"blocks_per_sm": blocks}


# -- on a GPU --------------------------------------------------------------------------------------


def compiled(job: tuple[str, KernelPlan, str]) -> None:
    """Run a kernel once, so that Triton has it."""
    name, plan, folder = job
    case = Case(name)
    case.stitched(plan, Path(folder))(*WIDE[name].tensors("cuda"))
    torch.cuda.synchronize()


def timed(job: tuple[str, int, str]) -> dict[str, Any]:
    """All plans of a chain in turns, and the fastest with and without kept rows again."""
    name, rounds, folder = job
    case, chain = Case(name), WIDE[name]
    with torch.no_grad():
        runs = {str(plan): case.stitched(plan, Path(folder)) for plan in case.timed}
        sets = [chain.tensors("cuda") for _ in range(copies(chain))]
        reference = next(iter(runs.values()))(*sets[0])
        errors = {text: _difference(reference, run(*sets[0])) for text, run in runs.items()}
        methods = {text: _method(run) for text, run in runs.items()}
        samples = in_turns(methods, sets, rounds)
        middle = {text: statistics.median(found) for text, found in samples.items()}
        mine = {text for text in runs if text.startswith("shared")}
        kept = min(mine, key=middle.__getitem__)
        plain = min(runs.keys() - mine, key=middle.__getitem__)
        null = f"{plain} again"
        both = {plain: methods[plain], kept: methods[kept], null: methods[plain]}
        again = in_turns(both, sets, rounds)
    found = Comparison.from_samples(again[plain], again[kept], again[null], kind="measured")
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copies": len(sets),
        "largest_errors": errors,
        "median_us": {text: round(value, 3) for text, value in middle.items()},
        "samples_us": samples,
        "again_us": again,
        "shared": kept,
        "without": plain,
        "ratio": round(found.ratio, 4),
        "interval": [round(found.low, 4), round(found.high, 4)],
        "null": [round(found.null_low, 4), round(found.null_high, 4)],
        "verdict": found.verdict,
    }


def _method(run: StitchedGraph) -> Method:
    return Method(lambda given: run(*given))


def _difference(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> list[float]:
    """The largest difference of each output, relative to its largest value."""
    return [
        float((a.float() - b.float()).abs().max() / a.float().abs().max().clamp_min(1e-6))
        for a, b in zip(wanted, got, strict=True)
    ]


# -- all chains ------------------------------------------------------------------------------------


class Record:
    """The file that grows with every chain; cubins may be another compiler's than what is timed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chains: dict[str, Any] = {}
        if path.exists():
            self.chains = json.loads(path.read_text())["chains"]

    def put(self, name: str, what: str, found: Any) -> None:
        chain = self.chains.setdefault(name, {})
        chain |= {what: found, f"{what} by": f"triton {triton.__version__}"}
        save(self.path, chains=self.chains)

    def lacks(self, name: str, what: str) -> bool:
        return what not in self.chains.get(name, {})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chains", default="", help="only those whose name has this part")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--limit", type=float, default=300, help="seconds")
    parser.add_argument("--workers", type=int, default=10, help="that compile, for each GPU")


def main(options: argparse.Namespace) -> None:
    until = time.monotonic() + options.limit
    record = Record(options.out)
    names = [name for name in WIDE if options.chains in name]
    for name in names:
        if record.lacks(name, "ways") and time.monotonic() < until:
            record.put(name, "ways", bytes_of(Case(name)))
            print(f"{name}: {_told(record.chains[name]['ways'])}", flush=True)
    gpus = visible_gpus()
    if gpus:
        on_gpus([name for name in names if record.lacks(name, "measured")], gpus, record, options)


def on_gpus(
    names: Sequence[str], gpus: Sequence[str], record: Record, options: argparse.Namespace
) -> None:
    """Compile and time what is left, within the limit."""
    until = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        workers = [gpu for gpu in gpus for _ in range(options.workers)]
        jobs = [(name, plan, folder) for name in names for plan in Case(name).timed]
        queues = [jobs[at :: len(workers)] for at in range(len(workers))]
        for compiling in run_jobs(compiled, queues, workers, until, lambda _: COMPILING):
            if compiling.error is not None:
                print(f"{compiling.job[0]}: {compiling.job[1]}: {compiling.error}", flush=True)
        timing = [[(name, options.rounds, folder) for name in names[at :: len(gpus)]]
                  for at in range(len(gpus))]  # fmt: skip
        for answer in run_jobs(timed, timing, gpus, until, lambda _: TIMING):
            name = answer.job[0]
            if answer.result is None:
                print(f"{name}: {answer.error}", flush=True)
                continue
            record.put(name, "measured", answer.result)
            told = {key: answer.result[key] for key in ("shared", "without", "ratio", "verdict")}
            print(f"{name}: {told}", flush=True)


def _told(ways: Sequence[dict[str, Any]]) -> str:
    return "; ".join(
        " / ".join(f"{found['shared'] or 'no'}" for found in way["reuse"].values())
        + f" bytes, {way['reuse']['order']['blocks_per_sm']} blocks (modelled)"
        for way in ways
    )
