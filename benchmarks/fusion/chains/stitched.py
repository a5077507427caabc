"""Operator graph of a chain, and its stitched kernels: autotuned, or rebuilt from a result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.timing import Inputs, Method, time_quickly
from nostall.core.errors import BadInput
from nostall.fusion.capture import capture, inference_graph
from nostall.fusion.capture.randomness import SEEDS, replace_random_ops, seeds
from nostall.fusion.capture.slicing import hoist_slices
from nostall.fusion.codegen.autotune.autotuner import Autotuner
from nostall.fusion.codegen.autotune.candidates import (
    single_chunk_kernels,
    with_eager_loads,
    with_evict_first,
)
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.generate import grow_partition
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.graph import Graph
from nostall.fusion.recompute.copies import Kernels
from nostall.fusion.recompute.kernels import default_kernels
from nostall.gpu.clock import ReplayClock


def plans_with_variants(schedule: Schedule) -> Iterator[PlannedKernel]:
    """All legal plans of a schedule and all of their variants."""
    legal = plans(schedule).legal
    single_chunk = [variant for kernel in legal for variant in single_chunk_kernels(kernel)]
    for kernel in (*legal, *dict.fromkeys(single_chunk)):
        for variant in (kernel, with_eager_loads(kernel)):
            if variant is not None:
                yield variant
                if (evicting := with_evict_first(variant)) is not None:
                    yield evicting


class _Module(nn.Module):
    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, *inputs: Tensor) -> Any:
        return self.chain.function(*inputs)


def chain_graph(chain: Chain, device: str = "cpu") -> Graph:
    """The chain's operator graph, traced with fake tensors.

    A chain with random numbers has one more input, the last one: their seeds.  Raises
    :class:`BadInput` if an operator cannot be captured.
    """
    with FakeTensorMode():
        inputs = chain.tensors(device)
    module = hoist_slices(replace_random_ops(inference_graph(_Module(chain), *inputs)))
    captured = capture(module)
    if captured.report.unsupported:
        raise BadInput(f"{chain.name}: {captured.report}; write the chain without these")
    drawn = [captured.values[node] for node in module.graph.nodes if node.target is SEEDS]
    assert list(captured.graph.inputs[len(inputs) :]) == drawn
    return captured.graph


def partitions(graph: Graph) -> dict[str, Kernels]:
    """The explorer's kernels and those of the greedy partition by name.

    Only the former if the explorer's partition is the greedy one.
    """
    kernels = {"explorer": default_kernels(graph)}
    greedy = grow_partition(graph)
    if sorted(greedy) != sorted(default_partition(graph)):
        kernels["greedy"] = Kernels.of(graph, greedy)
    return kernels


def min_bytes(graph: Graph) -> int:
    """Bytes of all inputs and outputs: the least that a kernel has to read and write."""
    return sum(graph[i].bytes for i in {*graph.inputs, *graph.outputs})


def stitched_method(stitched: StitchedGraph, input_count: int) -> Method:
    """A method that runs stitched kernels and draws new seeds in every run, as PyTorch does.

    The first ``input_count`` inputs of the graph are the chain's; the others are seeds.
    """
    seed_counts = [stitched.graph[index].elements for index in stitched.graph.inputs[input_count:]]

    def run(inputs: Inputs) -> tuple[Tensor, ...]:
        return stitched(*inputs, *(seeds(count, inputs[0].device) for count in seed_counts))

    return Method(run)


def tune(
    chain: Chain, sets: Sequence[Inputs], max_candidates: int, folder: Path
) -> tuple[Method, dict[str, Any]]:
    """Tune the kernels of both partitions; returns the faster method and how it was chosen.

    Each kernel's ``max_candidates`` modelled best plans are measured; 0 takes the modelled best
    plan without a measurement.
    """
    graph = chain_graph(chain)
    candidates: list[tuple[float, str, StitchedGraph, Method]] = []
    tuning: dict[str, Any] = {}
    for name, kernels in partitions(graph).items():
        autotuner = Autotuner(ReplayClock(), max_candidates, folder=folder)
        choice = autotuner if max_candidates else default_plan
        stitched = stitch(kernels.graph, kernels.groups, choice=choice, folder=folder)
        candidate = stitched_method(stitched, len(chain.inputs))
        seconds = time_quickly(candidate.run, sets)
        candidates.append((seconds, name, stitched, candidate))
        records = [
            record.model_dump(exclude={"schema_version"}, by_alias=True)
            for record in autotuner.records
        ]
        tuning[name] = {
            "us": seconds,
            "kernels": records,
            "refused": dict(stitched.illegal_reasons),
        }
    _, name, stitched, best = min(candidates, key=lambda entry: entry[0])
    return best, {"partition": name, "plans": kernel_plans(stitched), "race": tuning}


def kernel_plans(stitched: StitchedGraph) -> list[str]:
    """The plan of every kernel, as text."""
    return [str(step.program.plan) for step in stitched.steps if not isinstance(step, int)]


# -- kernels of a result ---------------------------------------------------------------------------


def rebuild(chain: Chain, description: dict[str, Any], folder: Path) -> StitchedGraph:
    """Rebuild the kernels that a result describes, without tuning.

    Raises :class:`BadInput` if the present planner makes other plans.
    """
    graph = chain_graph(chain)
    known = partitions(graph)
    kernels = known.get(description["partition"]) or known["explorer"]
    remaining = chosen_plans(description["plans"])
    choice = partial(_next_plan, remaining)
    stitched = stitch(kernels.graph, kernels.groups, choice=choice, folder=folder)
    if kernel_plans(stitched) != description["plans"]:
        raise BadInput(
            f"{chain.name}: the result has the plans {description['plans']}, "
            f"the present planner makes {kernel_plans(stitched)}; "
            "measure the chain again"
        )
    return stitched


def chosen_plans(descriptions: Sequence[str]) -> list[str]:
    """Plans in reverse order, without those of packed kernels, which are not chosen."""
    return [plan for plan in reversed(descriptions) if not re.match(r"packed \(", plan)]


def _next_plan(remaining: list[str], schedule: Schedule) -> PlannedKernel:
    """Take the last plan off ``remaining`` if the schedule has it; otherwise the default plan."""
    for kernel in plans_with_variants(schedule):
        if remaining and str(kernel) == remaining[-1]:
            remaining.pop()
            return kernel
    return default_plan(schedule)
