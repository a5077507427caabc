"""Which schedules of which kernels are compared with the model, and what it says of them.

A kernel's sample holds the plans that race (:func:`nostall.fusion.codegen.autotune.candidates.candidates`; those
that read early what rows share are none of the model's) and plans from all over the modelled range:
the rest, in the model's order, is cut into equally long pieces, and one plan of each is drawn.  The
seed and the kernel's own text decide which, so the same plans are drawn in every run.
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
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import grow_partition, schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, plans
from nostall.fusion.evaluate import DeltaEvaluator, LatencyEvaluator
from nostall.fusion.explore import explore
from nostall.fusion.explore.greedy import greedy_partition
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import members, to_mask

MOST = 24
"""Plans of one kernel."""

Group = tuple[int, ...]


@dataclass(frozen=True)
class Sampled:
    """A kernel of the explorer's partition and its plans to be measured, in the model's order."""

    operators: Group
    of: Schedule
    plans: tuple[KernelPlan, ...]
    legal: int

    def programs(self) -> list[Program]:
        return [emit(self.of, plan) for plan in self.plans]


@dataclass(frozen=True)
class Work:
    """What there is to do for one chain.  ``partitions``: by explorer, by bytes saved (greedy) and
    grown along producers; ``packed``: kernels without common loops, which have one plan only."""

    chain: Chain
    graph: Graph
    partitions: dict[str, list[Group]]
    kernels: list[Sampled]
    packed: list[Group]

    def programs(self) -> list[Program]:
        """All that will be compiled: the samples, and what races in all partitions."""
        found = [program for kernel in self.kernels for program in kernel.programs()]
        groups = {group for partition in self.partitions.values() for group in partition}
        for group in sorted(groups):
            of = schedule_of(self.graph, group)
            if of is not None:
                found += [emit(of, plan) for plan in candidates(of, MAX_CANDIDATES)]
        return list({program.key: program for program in found}.values())


def work_of(chain: Chain, most: int = MOST, seed: int = 0) -> Work:
    """The chain's partitions, and a sample of the plans of each kernel that is not packed."""
    graph = chain_graph(chain)
    delta = DeltaEvaluator(graph)
    partitions = {
        "explorer": _groups(explore(delta).partition.groups),
        "greedy_partition": _groups(greedy_partition(delta).groups),
        "producers": sorted(grow_partition(graph)),
    }
    kernels, packed = [], []
    for group in partitions["explorer"]:
        of = schedule_of(graph, group)
        if of is None:
            packed.append(group)
        else:
            kernels.append(Sampled(group, of, sample(of, most, seed), len(plans(of).legal)))
    return Work(chain, graph, partitions, kernels, packed)


def schedule_of(graph: Graph, group: Group) -> Schedule | None:
    """None where the operators have no common loops."""
    try:
        return schedule_operators(graph, group)
    except BadInput:
        return None


def sample(of: Schedule, most: int, seed: int) -> tuple[KernelPlan, ...]:
    """At most ``most`` legal plans, or those that race where these are more."""
    ranked = sorted(plans(of).legal, key=lambda plan: (modelled_seconds(of, plan), str(plan)))
    kept = set(candidates(of, MAX_CANDIDATES)).intersection(ranked)
    rest = [plan for plan in ranked if plan not in kept]
    room = min(len(rest), max(0, most - len(kept)))
    draw = random.Random(f"{seed} {emit(of, ranked[0]).key}")
    for at in range(room):
        kept.add(draw.choice(rest[at * len(rest) // room : (at + 1) * len(rest) // room]))
    return tuple(plan for plan in ranked if plan in kept)


def told(plan: KernelPlan) -> dict[str, Any]:
    """A plan as a result file holds it."""
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


def plan_of(row: Mapping[str, Any]) -> KernelPlan:
    """The plan of such a row."""
    sizes = row["scheme"], row["rows"], tuple(row["chunks"]), row["num_warps"], row["parts"]
    # Files from before rows were kept in shared memory or peeled have nothing to say of it.
    more = row.get("demoted", 0), row.get("ahead", False), row.get("peeled", False)
    return KernelPlan(*sizes, *more)


def modelled_us(graph: Graph, operators: Group) -> dict[str, float]:
    """What the explorer's two evaluators say of a kernel, without a plan for it."""
    delta, mask = DeltaEvaluator(graph), to_mask(operators)
    parts = delta.kernel_time(mask)
    assert parts is not None  # it is a kernel of a plan
    return {
        "delta": 1e6 * parts.total,
        "latency": 1e6 * LatencyEvaluator(delta).kernel_seconds(mask),
    }


def _groups(masks: Iterable[int]) -> list[Group]:
    return sorted(members(mask) for mask in masks)
