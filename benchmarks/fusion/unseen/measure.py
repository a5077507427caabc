"""Measurement of one unseen chain: plans of each kernel, whole stitched chains, torch.compile.

Several processes share a GPU: one of them measures at a time, the others plan and compile.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch

from benchmarks.fusion.chains.accuracy import AccuracyCheck
from benchmarks.fusion.chains.generated import GENERATED
from benchmarks.fusion.chains.methods import MAX_AUTOTUNE
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.reported import REPORTED
from benchmarks.fusion.chains.stitched import (
    chain_graph,
    kernel_plans,
    min_bytes,
    partitions,
    stitched_method,
)
from benchmarks.fusion.chains.timing import Method, capture_graph, copy_count
from benchmarks.fusion.cost_model.compile import wait_for_programs
from benchmarks.fusion.cost_model.sample import (
    KernelSample,
    find_schedule,
    plan_from_record,
    sample_plans,
)
from benchmarks.fusion.cost_model.timing import (
    MIN_LAUNCHES,
    TimingSettings,
    time_graphs,
    time_plans,
)
from benchmarks.fusion.unseen.inductor import compile_chain, kernel_settings
from benchmarks.harness.gpu_fault import end_process_after_fault
from benchmarks.harness.gpu_lock import locked
from nostall.core.errors import BadInput, one_line
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import generate
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import stitch
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.graph import Graph
from nostall.fusion.recompute.copies import Kernels

ALL_CHAINS: Mapping[str, Chain] = {**CHAINS, **GENERATED, **REPORTED}
COMPILE_TIMEOUT = 60.0
"""Seconds that a chain waits for compilation; plans that take longer are left out."""
INDUCTOR, AUTOTUNED = "torch.compile", "max-autotune"
"""Names of Inductor's versions: its defaults, and its mode max-autotune-no-cudagraphs."""
EARLIER = "earlier plans"
"""Name of the version with the plans of another commit."""
_SEEN_KERNELS: set[int] = set()


@dataclass(frozen=True)
class Job:
    """One chain to measure in a process that sees one GPU."""

    chain: str
    settings: TimingSettings
    max_plans: int
    """Maximum plans of each kernel; 1: only the modelled best one, which is not timed alone."""
    earlier: tuple[str, ...]
    """Plans of the kernels of the explorer's partition that another commit selected, in order of
    the kernels; empty if none are compared."""
    deadline: float
    """End of the measurement, in seconds of the monotonic clock."""
    autotune: bool = False
    """Whether Inductor's mode max-autotune-no-cudagraphs is measured, too."""


@dataclass(frozen=True)
class Sample:
    """What is measured of a chain: its partitions, and the plans of each kernel."""

    graph: Graph
    partitions: dict[str, Kernels]
    kernels: list[KernelSample]

    def programs(self) -> list[Program]:
        """All programs to compile."""
        programs = [program for kernel in self.kernels for program in kernel.programs()]
        for part in self.partitions.values():
            for group in part.groups:
                try:
                    programs.append(generate(part.graph, group))
                except BadInput:  # stitching splits this group or runs it in PyTorch
                    continue
        return list({program.key: program for program in programs}.values())


def sample(name: str, max_plans: int, earlier: Sequence[str] = ()) -> Sample:
    """The chain's partitions and the sampled plans of the kernels of the explorer's partition.

    ``earlier``: a plan of another commit for each kernel without values computed again; it is added
    to the sample of that kernel.
    """
    graph = chain_graph(ALL_CHAINS[name])
    known = partitions(graph)
    best = known["explorer"]
    kernels = []
    added = {}
    if earlier:
        known[EARLIER] = Kernels.of(graph, sorted(default_partition(graph)))
        added = dict(zip(known[EARLIER].groups, earlier, strict=False))
    for group in sorted(best.groups) if max_plans > 1 else ():
        schedule = find_schedule(best.graph, group)
        if schedule is not None and plans(schedule).legal:
            chosen = sample_plans(schedule, max_plans, seed=0)
            plan = added.get(_without_copies(best, group))
            if plan is not None and plan not in map(str, chosen):
                chosen = (*chosen, *_named_plans(schedule, plan))
            kernels.append(KernelSample(group, schedule, chosen, len(plans(schedule).legal_plans)))
    return Sample(graph, known, kernels)


def _without_copies(kernels: Kernels, group: Sequence[int]) -> tuple[int, ...]:
    """The same operators in the chain's own graph; no operators if it does not have all of them."""
    known = kernels.are_in_region(group)
    return tuple(sorted(kernels.in_region(group))) if known else ()


def _named_plans(schedule: Schedule, name: str) -> list[KernelPlan]:
    """The legal plan with this name; empty if there is none."""
    return [plan for plan in plans(schedule).legal_plans if str(plan) == name]


def measure(job: Job) -> dict[str, Any]:
    """Measure a chain; a GPU fault ends the process, and the next chain gets a new one."""
    try:
        with end_process_after_fault(), torch.no_grad():
            return _measure(job)
    finally:
        # Other processes of this GPU need the memory that PyTorch keeps for later allocations.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def gpu_lock(folder: Path) -> AbstractContextManager[None]:
    """Exclusive use of this process's GPU among the processes with the same folder."""
    name = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace("/", "_")
    return locked(folder / f"gpu_{name}.lock")


def _measure(job: Job) -> dict[str, Any]:
    start, chain = monotonic(), ALL_CHAINS[job.chain]
    work = sample(job.chain, job.max_plans, job.earlier)
    sets = [chain.tensors(job.settings.device) for _ in range(copy_count(chain))]
    failures: dict[str, str] = {}
    baselines, inductor_kernels = _baselines(chain, sets[0], job, failures)
    compiled = monotonic()
    keys = [program.key for program in work.programs()]
    resources = wait_for_programs(
        job.settings.folder, keys, min(job.deadline, monotonic() + COMPILE_TIMEOUT)
    )
    ready = monotonic()
    with gpu_lock(job.settings.folder):
        locked = monotonic()
        kernels = [_kernel_record(kernel, resources, job.settings) for kernel in work.kernels]
        methods, details = _stitched_methods(chain, work, kernels, job, failures)
        methods |= baselines
        if INDUCTOR in baselines:
            methods[f"{INDUCTOR} again"] = baselines[INDUCTOR]
        wrong = _wrong_versions(chain, sets[0], methods)
        samples = _time(methods, sets, job.settings.rounds)
    end = monotonic()
    seconds = {"inductor": compiled - start, "compiling": ready - compiled, "gpu": end - locked}
    return {
        "bytes_least": min_bytes(work.graph),
        "kernels": kernels,
        "versions": details,
        "inductor_kernels": inductor_kernels,
        "wrong": wrong,
        "failures": failures,
        "samples_us": samples,
        "us": {name: round(median(row), 3) for name, row in samples.items() if row},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
    }


def _baselines(
    chain: Chain, inputs: Sequence[torch.Tensor], job: Job, failures: dict[str, str]
) -> tuple[dict[str, Method], list[dict[str, Any]]]:
    """Inductor's versions that work, by name, and the settings of its default kernels."""
    torch._dynamo.reset()
    lock = partial(gpu_lock, job.settings.folder)
    methods: dict[str, Method] = {}
    kernels: list[dict[str, Any]] = []
    for name, options in ((INDUCTOR, None), (AUTOTUNED, MAX_AUTOTUNE)):
        if name == AUTOTUNED and not job.autotune:
            continue
        try:
            methods[name] = Method(compile_chain(chain, inputs, lock, options))
        except Exception as error:  # the stitched versions are measured without this baseline
            failures[name] = one_line(error)
        known = kernel_settings(_SEEN_KERNELS)
        kernels += known if name == INDUCTOR else []
    return methods, kernels


def _kernel_record(
    kernel: KernelSample, resources: Mapping[str, Mapping[str, Any]], settings: TimingSettings
) -> dict[str, Any]:
    program = kernel.programs()[0]
    moved = sum(program.graph[index].bytes for index in (*program.inputs, *program.outputs))
    return {"bytes": moved, **time_plans(kernel, resources, settings)}


def _stitched_methods(
    chain: Chain,
    work: Sample,
    kernels: Sequence[Mapping[str, Any]],
    job: Job,
    failures: dict[str, str],
) -> tuple[dict[str, Method], dict[str, Any]]:
    """The stitched versions by name, and their plans: the modelled best plans of each partition,
    the fastest measured plan of each kernel of the explorer's, and its earlier plans if any."""
    fastest = {tuple(kernel["operators"]): _fastest_plan(kernel) for kernel in kernels}
    choices: dict[str, tuple[Kernels, Callable[[Schedule], PlannedKernel]]] = {
        name: (part, default_plan) for name, part in work.partitions.items()
    }
    if kernels:
        choices["measured plans"] = work.partitions["explorer"], partial(_measured_plan, fastest)
    if job.earlier:
        kernels_then = work.partitions[EARLIER]
        names = dict(zip(kernels_then.groups, job.earlier, strict=False))
        choices[EARLIER] = kernels_then, partial(earlier_plan, names)
    methods: dict[str, Method] = {}
    details: dict[str, Any] = {}
    for name, (part, choice) in choices.items():
        try:
            stitched = stitch(part.graph, part.groups, choice=choice, folder=job.settings.folder)
        except Exception as error:
            failures[name] = one_line(error)
            continue
        details[name] = {
            "plans": kernel_plans(stitched),
            "groups": [list(group) for group in part.groups],
            "steps_in_pytorch": sum(isinstance(step, int) for step in stitched.steps),
            "refused": dict(stitched.illegal_reasons),
        }
        methods[name] = stitched_method(stitched, len(chain.inputs))
    return methods, details


def _fastest_plan(kernel: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Record of the fastest measured plan whose results are right."""
    rows = [row for row in kernel["plans"] if row.get("samples_us") and not row.get("wrong")]
    return min(rows, key=lambda row: median(row["samples_us"]), default=None)


def _measured_plan(
    fastest: Mapping[tuple[int, ...], Mapping[str, Any] | None], schedule: Schedule
) -> PlannedKernel:
    row = fastest.get(tuple(sorted(schedule.mapping.operators)))
    return default_plan(schedule) if row is None else plan_kernel(schedule, plan_from_record(row))


def earlier_plan(names: Mapping[tuple[int, ...], str], schedule: Schedule) -> PlannedKernel:
    """The plan with the name for a kernel's operators; the modelled best one if it is not legal."""
    named = _named_plans(schedule, names.get(tuple(sorted(schedule.mapping.operators)), ""))
    return plan_kernel(schedule, named[0]) if named else default_plan(schedule)


def _wrong_versions(
    chain: Chain, inputs: Sequence[torch.Tensor], methods: dict[str, Method]
) -> dict[str, str]:
    """Versions whose results are wrong, with the reason; those that fail are removed."""
    accuracy = AccuracyCheck(chain, inputs)
    wrong = {}
    for name, method in list(methods.items()):
        try:
            if reason := accuracy.failure(accuracy.errors(method)):
                wrong[name] = reason
        except Exception as error:
            wrong[name] = f"failed: {one_line(error)}"
            del methods[name]
    return wrong


def _time(
    methods: Mapping[str, Method], sets: Sequence[Sequence[torch.Tensor]], rounds: int
) -> dict[str, list[float]]:
    """Microseconds of each version in interleaved rounds of CUDA graphs."""
    every = [*sets] * -(-MIN_LAUNCHES // len(sets))
    graphs = [capture_graph(method.run, every) for method in methods.values()]
    samples = time_graphs(graphs, len(every), rounds)
    return dict(zip(methods, samples, strict=True))
