"""What one chain's kernels take on a GPU: each sampled plan, and whole partitions side by side.

Everything is a CUDA graph over copies of its memory larger than L2; replays are taken in turns,
another one first each time.  Every plan writes over poison before it is timed, and what it wrote is
compared with what the first one wrote.
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
from benchmarks.fusion.cost_model.sample import Sampled, Work, modelled_us, told
from nostall.fusion.codegen.autotune.autotuner import Autotuner
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.runtime.kernel import StitchedKernel, empty_tensor, load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.gpu.clock import ReplayClock
from nostall.gpu.timing import round_orders

ROUNDS = 15
"""Replays of each plan; partitions get twice as many."""
LEAST_LAUNCHES = 8
"""Launches in one graph at least: starting it costs a few microseconds."""
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.int8: 2e-2}
"""Of what two plans may differ by, relative to the largest value; 1e-3 for others."""

Memory = Sequence[Tensor]
"""Inputs and then outputs of a kernel."""


@dataclass(frozen=True)
class Here:
    """Where things run, and where the sources of kernels lie."""

    folder: Path
    device: str = "cuda"
    rounds: int = ROUNDS


def kernel_times(
    kernel: Sampled, compiled: Mapping[str, Mapping[str, Any]], here: Here
) -> dict[str, Any]:
    """Modelled and measured times of a kernel's sampled plans; those that cannot run say why.

    ``compiled`` says of programs, by their keys, what they take.
    """
    programs = kernel.programs()
    sets = _sets(programs[0], here.device)
    rows, graphs, reference = [], [], None
    for plan, program in zip(kernel.plans, programs, strict=True):
        row = told(plan) | {"modelled_us": 1e6 * modelled_seconds(kernel.of, plan)}
        rows.append(row)
        row.update(compiled.get(program.key, {"error": "it was not compiled in time"}))
        if "error" in row:
            continue
        try:
            run = _run(load_kernel(program, here.folder), here.device)
            made = _written(run, sets[0], len(program.inputs))
            reference = made if reference is None else reference
            row.update(_judged(reference, made))
            # A graph knows addresses only: its run keeps the memory of partial results.
            graphs.append((row, run, capture_graph(run, sets)))
        except Exception as error:  # shared memory, a driver that refuses: the others still run
            _alive()
            row["error"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    samples = _in_turns([graph for _, _, graph in graphs], len(sets), here.rounds)
    for (row, _, _), sample in zip(graphs, samples, strict=True):
        row["samples_us"] = sample
    return {
        "operators": list(kernel.operators),
        "kind": kernel.of.kind,
        "legal": kernel.legal,
        "first": str(default_plan(kernel.of)),
        "launches_in_a_graph": len(sets),
        "modelled_us": modelled_us(kernel.of.mapping.graph, kernel.operators),
        "plans": rows,
    }


def ablation(work: Work, here: Here) -> dict[str, Any]:
    """Each partition with the modelled first choice of every kernel and with raced ones.

    Variants of the same kernels are measured once; the first one is measured twice (the null).
    """
    variants: dict[str, dict[str, Any]] = {}
    different: dict[tuple[str, ...], tuple[str, StitchedGraph]] = {}
    for partition, groups in work.partitions.items():
        for choice in ("first", "raced"):
            racer = Autotuner(ReplayClock(), folder=here.folder)
            raced = choice == "raced"
            whole = stitch(
                work.graph, groups, choice=racer if raced else default_plan, folder=here.folder
            )
            name = f"{partition}, {choice}"
            kept, _ = different.setdefault(_kernels(whole), (name, whole))
            variants[name] = {
                "as": kept,
                "plans": [str(s.program.plan) for s in whole.steps if not isinstance(s, int)],
                "refused": dict(whole.illegal_reasons),
                "races": [
                    {"plans": list(race.plans), "winner": race.winner, "failure": race.failure}
                    for race in racer.records
                ],
            }
    sets = [work.chain.tensors(here.device) for _ in range(copy_count(work.chain))]
    times = -(-LEAST_LAUNCHES // len(sets))
    accuracy = AccuracyCheck(work.chain, sets[0])
    graphs, names, runs = [], [], []
    for name, whole in [*different.values(), next(iter(different.values()))]:
        one = stitched_method(whole, len(work.chain.inputs))
        if name not in names:
            errors = accuracy.errors(one)
            variants[name]["largest_errors"] = [_finite(error) for error in errors]
            variants[name]["wrong"] = accuracy.failure(errors)
        graphs.append(capture_graph(one.run, sets * times))
        runs.append(one.run)
        names.append(name)
    *samples, null = _in_turns(graphs, len(sets) * times, 2 * here.rounds)
    return {
        "variants": variants,
        "samples_us": dict(zip(names, samples, strict=False)),
        "null_us": null,
        "partitions": {name: [list(group) for group in p] for name, p in work.partitions.items()},
    }


def _kernels(whole: StitchedGraph) -> tuple[str, ...]:
    return tuple(str(s) if isinstance(s, int) else s.program.key for s in whole.steps)


def _sets(program: Program, device: str) -> list[Memory]:
    """Copies of a program's inputs and outputs that together are larger than L2, as often as one
    graph needs them."""
    nodes = [program.graph[index] for index in (*program.inputs, *program.outputs)]
    size = max(1, sum(node.bytes for node in nodes))
    found: list[Memory] = []
    for _ in range(max(1, min(MAX_COPIES, -(-COLD_BYTES // size)))):
        inputs = [
            _filled(empty_tensor(program.graph[i], torch.device(device))) for i in program.inputs
        ]
        outputs = [empty_tensor(program.graph[i], torch.device(device)) for i in program.outputs]
        found.append([*inputs, *outputs])
    return found * -(-LEAST_LAUNCHES // len(found))


def _filled(value: Tensor) -> Tensor:
    """Numbers as they come in programs; those of integers are small, as places in a row."""
    return value.normal_() if value.is_floating_point() else value.random_(0, 2)


def _run(kernel: StitchedKernel, device: str) -> Callable[[Memory], object]:
    spaces = {
        space.name: torch.empty(space.elements, dtype=getattr(torch, space.dtype), device=device)
        for space in kernel.program.workspaces
    }
    count = len(kernel.program.inputs)
    return lambda given: kernel.launch(given[:count], given[count:], spaces)


def _written(run: Callable[[Memory], object], given: Memory, inputs: int) -> list[Tensor]:
    """What a kernel leaves in its outputs, which were poisoned before."""
    for output in given[inputs:]:
        output.fill_(math.nan if output.is_floating_point() else 101)
    run(given)
    return [output.clone() for output in given[inputs:]]


def _judged(wanted: Sequence[Tensor], made: Sequence[Tensor]) -> dict[str, Any]:
    """The largest difference relative to the largest value, and whether that is too much."""
    worst, wrong = 0.0, False
    for want, got in zip(wanted, made, strict=True):
        a, b = want.float(), got.float()
        same = (a == b) | (a.isnan() & b.isnan())
        largest = a[a.isfinite()].abs().max() if bool(a.isfinite().any()) else a.new_tensor(1.0)
        apart = torch.where(same, 0.0, (a - b).abs()) / largest.clamp_min(1e-6)
        found = float(apart.nan_to_num(math.inf).max())
        worst = max(worst, found)
        wrong |= found > TOLERANCE.get(want.dtype, 1e-3)
    return {"difference": _finite(worst), "wrong": wrong}


def _finite(value: float) -> float | None:
    """For JSON, which knows no infinity."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _in_turns(graphs: Sequence[torch.cuda.CUDAGraph], runs: int, rounds: int) -> list[list[float]]:
    """Microseconds of one run, ``rounds`` samples of each graph."""
    for graph in graphs:
        time_replay(graph, runs)
    found: list[list[float]] = [[] for _ in graphs]
    for turn in round_orders(len(graphs), rounds):
        for which in turn:
            found[which].append(round(time_replay(graphs[which], runs), 3))
    return found


def _alive() -> None:
    """Raises where a fault has spoilt the process."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
