"""Timing of a chain of operators on a GPU: sampled plans of its kernels, and whole partitions.

A partition is a set of kernels that computes the chain. Everything runs as CUDA graphs. Each graph
has several copies of its tensors, together larger than L2; replays are interleaved, and the first
graph of a round rotates.  Before a plan is timed, its outputs are filled with poison
values, and its results are compared with those of the first plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.chains.accuracy import AccuracyCheck
from benchmarks.fusion.chains.stitched import stitched_method
from benchmarks.fusion.chains.timing import (
    COLD_BYTES,
    MAX_COPIES,
    capture_graph,
    copy_count,
    time_replay,
)
from benchmarks.fusion.cost_model.sample import ChainSample, KernelSample, evaluator_us, plan_record
from nostall.fusion.codegen.autotune.autotuner import Autotuner
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.runtime.kernel import StitchedKernel, empty_tensor, load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.gpu.clock import ReplayClock
from nostall.gpu.timing import round_orders

ROUNDS = 15
"""Samples of each plan; partitions get twice as many."""
MIN_LAUNCHES = 8
"""Minimum launches in one CUDA graph, because starting it takes a few microseconds."""
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.int8: 2e-2}
"""Allowed difference between two plans, relative to the largest value; 1e-3 for other dtypes."""

Memory = Sequence[Tensor]
"""The inputs of a kernel, followed by its outputs."""


@dataclass(frozen=True)
class TimingSettings:
    """Settings of the measurement."""

    folder: Path
    """Sources of kernels."""
    device: str = "cuda"
    rounds: int = ROUNDS
    """Samples of each plan."""


def time_plans(
    kernel: KernelSample, resources: Mapping[str, Mapping[str, Any]], settings: TimingSettings
) -> dict[str, Any]:
    """Modelled and measured times of a kernel's sampled plans, or the error of a plan.

    ``resources``: results of the compiler pool by program key.
    """
    programs = kernel.programs()
    sets = _memory_sets(programs[0], settings.device)
    rows, captured, reference = [], [], None
    for plan, program in zip(kernel.plans, programs, strict=True):
        row = plan_record(plan) | {
            "modelled_us": 1e6 * modelled_seconds(PlannedKernel(kernel.schedule, plan))
        }
        rows.append(row)
        row.update(resources.get(program.key, {"error": "the compilation did not end in time"}))
        if "error" in row:
            continue
        try:
            run = _make_run(load_kernel(program, settings.folder), settings.device)
            outputs = _run_on_poison(run, sets[0], len(program.inputs))
            reference = outputs if reference is None else reference
            row.update(_compare_outputs(reference, outputs))
            # A CUDA graph holds addresses only; ``run`` keeps the workspaces alive.
            captured.append((row, run, capture_graph(run, sets)))
        except Exception as error:  # e.g. too much shared memory; the other plans can still run
            _check_gpu()
            row["error"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    samples = time_graphs([graph for _, _, graph in captured], len(sets), settings.rounds)
    for (row, _, _), sample in zip(captured, samples, strict=True):
        row["samples_us"] = sample
    return {
        "operators": list(kernel.operators),
        "kind": kernel.schedule.kind,
        "legal": kernel.legal,
        "first": str(default_plan(kernel.schedule)),
        "launches_in_a_graph": len(sets),
        "modelled_us": evaluator_us(kernel.schedule.mapping.graph, kernel.operators),
        "plans": rows,
    }


def time_variants(work: ChainSample, settings: TimingSettings) -> dict[str, Any]:
    """Time each partition with the modelled best plan of every kernel and with tuned plans.

    Variants with the same kernels are measured once.  The first variant is measured twice (the
    null).
    """
    variants: dict[str, dict[str, Any]] = {}
    unique: dict[tuple[str, ...], tuple[str, StitchedGraph]] = {}
    for partition, groups in work.partitions.items():
        for choice in ("first", "raced"):
            autotuner = Autotuner(ReplayClock(), folder=settings.folder)
            is_tuned = choice == "raced"
            stitched = stitch(
                work.graph,
                groups,
                choice=autotuner if is_tuned else default_plan,
                folder=settings.folder,
            )
            name = f"{partition}, {choice}"
            same_variant, _ = unique.setdefault(_kernel_keys(stitched), (name, stitched))
            variants[name] = {
                "as": same_variant,
                "plans": [
                    str(step.program.plan) for step in stitched.steps if not isinstance(step, int)
                ],
                "refused": dict(stitched.illegal_reasons),
                "races": [
                    {
                        "plans": list(record.plans),
                        "winner": record.winner,
                        "failure": record.failure,
                    }
                    for record in autotuner.records
                ],
            }
    sets = [work.chain.tensors(settings.device) for _ in range(copy_count(work.chain))]
    repetitions = -(-MIN_LAUNCHES // len(sets))
    accuracy = AccuracyCheck(work.chain, sets[0])
    graphs, names, runs = [], [], []
    for name, stitched in [*unique.values(), next(iter(unique.values()))]:
        method = stitched_method(stitched, len(work.chain.inputs))
        if name not in names:
            errors = accuracy.errors(method)
            variants[name]["largest_errors"] = [_finite_or_none(error) for error in errors]
            variants[name]["wrong"] = accuracy.failure(errors)
        graphs.append(capture_graph(method.run, sets * repetitions))
        runs.append(method.run)
        names.append(name)
    *samples, null = time_graphs(graphs, len(sets) * repetitions, 2 * settings.rounds)
    return {
        "variants": variants,
        "samples_us": dict(zip(names, samples, strict=False)),
        "null_us": null,
        "partitions": {name: [list(group) for group in p] for name, p in work.partitions.items()},
    }


def _kernel_keys(stitched: StitchedGraph) -> tuple[str, ...]:
    return tuple(
        str(step) if isinstance(step, int) else step.program.key for step in stitched.steps
    )


def _memory_sets(program: Program, device: str) -> list[Memory]:
    """Copies of a program's inputs and outputs that together are larger than L2.

    They are repeated until there are at least :data:`MIN_LAUNCHES`.
    """
    nodes = [program.graph[index] for index in (*program.inputs, *program.outputs)]
    byte_count = max(1, sum(node.bytes for node in nodes))
    sets: list[Memory] = []
    for _ in range(max(1, min(MAX_COPIES, -(-COLD_BYTES // byte_count)))):
        inputs = [
            _filled(empty_tensor(program.graph[i], torch.device(device))) for i in program.inputs
        ]
        outputs = [empty_tensor(program.graph[i], torch.device(device)) for i in program.outputs]
        sets.append([*inputs, *outputs])
    return sets * -(-MIN_LAUNCHES // len(sets))


def _filled(value: Tensor) -> Tensor:
    """Fill with random values; integers are 0 or 1, so that they are valid indices."""
    return value.normal_() if value.is_floating_point() else value.random_(0, 2)


def _make_run(kernel: StitchedKernel, device: str) -> Callable[[Memory], object]:
    workspaces = {
        workspace.name: torch.empty(
            workspace.elements, dtype=getattr(torch, workspace.dtype), device=device
        )
        for workspace in kernel.program.workspaces
    }
    count = len(kernel.program.inputs)
    return lambda tensors: kernel.launch(tensors[:count], tensors[count:], workspaces)


def _run_on_poison(run: Callable[[Memory], object], tensors: Memory, inputs: int) -> list[Tensor]:
    """Outputs of a kernel, which were filled with poison values before the run."""
    for output in tensors[inputs:]:
        output.fill_(math.nan if output.is_floating_point() else 101)
    run(tensors)
    return [output.clone() for output in tensors[inputs:]]


def _compare_outputs(expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any]:
    """Largest difference relative to the largest value, and whether it exceeds the tolerance."""
    worst, wrong = 0.0, False
    for expected_output, output in zip(expected, outputs, strict=True):
        reference, value = expected_output.float(), output.float()
        are_equal = (reference == value) | (reference.isnan() & value.isnan())
        scale = (
            reference[reference.isfinite()].abs().max()
            if bool(reference.isfinite().any())
            else reference.new_tensor(1.0)
        )
        difference = torch.where(are_equal, 0.0, (reference - value).abs()) / scale.clamp_min(1e-6)
        largest = float(difference.nan_to_num(math.inf).max())
        worst = max(worst, largest)
        wrong |= largest > TOLERANCE.get(expected_output.dtype, 1e-3)
    return {"difference": _finite_or_none(worst), "wrong": wrong}


def _finite_or_none(value: float) -> float | None:
    """The value with three digits; None if it is not finite, because JSON has no infinity."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


def time_graphs(
    graphs: Sequence[torch.cuda.CUDAGraph], runs: int, rounds: int
) -> list[list[float]]:
    """Microseconds of one run: ``rounds`` samples of each graph, interleaved."""
    if not graphs:
        return []
    for graph in graphs:
        time_replay(graph, runs)
    samples: list[list[float]] = [[] for _ in graphs]
    for round_order in round_orders(len(graphs), rounds):
        for index in round_order:
            samples[index].append(round(time_replay(graphs[index], runs), 3))
    return samples


def _check_gpu() -> None:
    """Raises RuntimeError if a GPU fault has made CUDA unusable in this process."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
