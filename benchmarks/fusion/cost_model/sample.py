"""Sample of the kernels and plans of a chain that the benchmark of the cost model measures.

A kernel's sample has two parts.  One is the candidates of the autotuner
(:mod:`nostall.fusion.codegen.autotune.candidates`), except those with eager loads, which the model
does not rank.  The other covers the modelled range: the remaining plans, in modelled order, are
split into equal pieces, and one plan of each is drawn.  The seed and the kernel's source
determine the draw, so every run has the same plans.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.stitched import chain_graph
from nostall.core.errors import BadInput
from nostall.fusion.codegen.autotune.autotuner import MAX_CANDIDATES
from nostall.fusion.codegen.autotune.candidates import candidates
from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import grow_partition, schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.evaluate.latency import LatencyEvaluator
from nostall.fusion.explore import explore
from nostall.fusion.explore.joining import greedy_partition
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import members, to_mask

MAX_PLANS = 24
"""Maximum plans of one kernel."""

Group = tuple[int, ...]


@dataclass(frozen=True)
class KernelSample:
    """A kernel of the explorer's partition, and its plans to be measured."""

    operators: Group
    schedule: Schedule
    plans: tuple[KernelPlan, ...]
    """In modelled order, best first."""
    legal: int
    """Number of legal plans."""

    def programs(self) -> list[Program]:
        return [emit(plan_kernel(self.schedule, plan)) for plan in self.plans]


@dataclass(frozen=True)
class ChainSample:
    """Everything that is measured of one chain."""

    chain: Chain
    graph: Graph
    partitions: dict[str, list[Group]]
    """Kernels of the explorer's, the greedy (by bytes saved) and the grown partition."""
    kernels: list[KernelSample]
    packed: list[Group]
    """Kernels without common loops, which have one plan only."""

    def programs(self) -> list[Program]:
        """All programs to compile: the samples, and the tuning candidates of all partitions."""
        programs = [program for kernel in self.kernels for program in kernel.programs()]
        groups = {group for partition in self.partitions.values() for group in partition}
        for group in sorted(groups):
            schedule = find_schedule(self.graph, group)
            if schedule is not None:
                programs += [emit(candidate) for candidate in candidates(schedule, MAX_CANDIDATES)]
        return list({program.key: program for program in programs}.values())


def sample_chain(chain: Chain, max_plans: int = MAX_PLANS, seed: int = 0) -> ChainSample:
    """The chain's partitions, and a sample of the plans of each kernel that is not packed."""
    graph = chain_graph(chain)
    delta = DeltaEvaluator(graph)
    partitions = {
        "explorer": _groups(explore(delta).partition.groups),
        "greedy": _groups(greedy_partition(delta).groups),
        "producers": sorted(grow_partition(graph)),
    }
    kernels, packed = [], []
    for group in partitions["explorer"]:
        schedule = find_schedule(graph, group)
        if schedule is None:
            packed.append(group)
        else:
            kernels.append(
                KernelSample(
                    group,
                    schedule,
                    sample_plans(schedule, max_plans, seed),
                    len(plans(schedule).legal_plans),
                )
            )
    return ChainSample(chain, graph, partitions, kernels, packed)


def find_schedule(graph: Graph, group: Group) -> Schedule | None:
    """The loops of a kernel; None if its operators have no common loops."""
    try:
        return schedule_operators(graph, group)
    except BadInput:
        return None


def sample_plans(schedule: Schedule, max_plans: int, seed: int) -> tuple[KernelPlan, ...]:
    """At most ``max_plans`` legal plans, but always all tuning candidates, in modelled order."""
    ranked = sorted(
        plans(schedule).legal_plans,
        key=lambda plan: (modelled_seconds(PlannedKernel(schedule, plan)), str(plan)),
    )
    selected = {kernel.plan for kernel in candidates(schedule, MAX_CANDIDATES)}.intersection(ranked)
    remaining = [plan for plan in ranked if plan not in selected]
    drawn_count = min(len(remaining), max(0, max_plans - len(selected)))
    generator = random.Random(f"{seed} {emit(plan_kernel(schedule, ranked[0])).key}")
    for piece in range(drawn_count):
        selected.add(
            generator.choice(
                remaining[
                    piece * len(remaining) // drawn_count : (piece + 1)
                    * len(remaining)
                    // drawn_count
                ]
            )
        )
    return tuple(plan for plan in ranked if plan in selected)


def plan_record(plan: KernelPlan) -> dict[str, Any]:
    """Record of a plan for a result file."""
    return {
        "plan": str(plan),
        "scheme": plan.scheme,
        "rows": plan.rows,
        "chunks": list(plan.chunks),
        "num_warps": plan.num_warps,
        "parts": plan.splits,
        "demoted": plan.rematerialized,
        "ahead": plan.async_copies,
        "peeled": plan.peeled,
    }


def plan_from_record(row: Mapping[str, Any]) -> KernelPlan:
    """The plan of a record of :func:`plan_record`."""
    tiling = row["scheme"], row["rows"], tuple(row["chunks"]), row["num_warps"], row["parts"]
    # Result files of earlier versions do not have these keys.
    options = row.get("demoted", 0), row.get("ahead", False), row.get("peeled", False)
    return KernelPlan(*tiling, *options)


def evaluator_us(graph: Graph, operators: Group) -> dict[str, float]:
    """Microseconds of a kernel by the explorer's two evaluators, which do not take a plan.

    Empty for kernels that the explorer does not form: with an epilogue of sums over rows.
    """
    delta, mask = DeltaEvaluator(graph), to_mask(operators)
    time = delta.kernel_time(mask)
    if time is None:
        return {}
    return {
        "delta": 1e6 * time.total,
        "latency": 1e6 * LatencyEvaluator(delta).kernel_seconds(mask),
    }


def _groups(masks: Iterable[int]) -> list[Group]:
    return sorted(members(mask) for mask in masks)
