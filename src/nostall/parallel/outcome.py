"""What is said of a plan: predicted time with its parts, memory, and what rests on assumptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Plan, Workload, check_plan
from nostall.parallel.planners.closed_form import closed_form
from nostall.parallel.simulate import (
    Memory,
    Timeline,
    critical_path_s,
    load_bound_s,
    memory,
    simulate,
)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A simulated plan.  All times are modelled."""

    work: Workload
    plan: Plan
    planner: str
    timeline: Timeline
    memory: Memory

    @property
    def speedup(self) -> float:
        """All micro-batches in sequence on one GPU / predicted time."""
        return self.work.sequential_s / self.timeline.iteration_s

    @property
    def busy_share(self) -> float:
        """Part of the iteration in which an average GPU of the cluster computes."""
        return self.speedup / len(self.work.cluster)

    def parts(self) -> dict[str, float]:
        """Seconds: DAPPLE's closed form, what no order can beat, and exposed all-reduce."""
        found: dict[str, float] = {}
        if not self.plan.interleaved:
            form = closed_form(self.work, self.plan)
            found = {
                "closed_form_warm_up_s": form.warm_up_s,
                "closed_form_steady_s": form.steady_s,
                "closed_form_ending_s": form.ending_s,
            }
        computed = float((self.timeline.starts + self.timeline.durations[:, :, None]).max())
        return found | {
            "after_last_backward_s": self.timeline.iteration_s - computed,
            "busiest_resource_s": load_bound_s(self.work, self.plan),
            "critical_path_s": critical_path_s(self.work, self.plan),
        }

    def notes(self) -> list[str]:
        """What a reader must know before believing the numbers."""
        said = []
        if not self.memory.measured:
            said.append(
                "memory is a lower bound: the profile does not say what layers store for the "
                "backward pass, so nothing here proves that the plan fits"
            )
        smallest = min(self.work.samples / len(s.gpus) for s in self.plan.stages)
        if smallest < 1 and len(self.plan.stages) > 1:
            said.append(
                f"a replica gets {smallest:.3g} samples of a micro-batch: times are linear in "
                "samples, which no GPU is down there; a larger --micro-batch can be executed"
            )
        unknown = any(layer.weight_gradient_s is None for layer in self.work.profile.layers)
        if self.plan.policy == "zero-bubble" and unknown:
            said.append(
                f"the split of the backward pass is assumed: {self.work.weight_gradient_share:g} "
                "of it for weight gradients where the profile does not say"
            )
        if self.work.profile.batch is None:
            said.append("the profile has no batch size; it counts as one for a micro-batch")
        return said


def outcome(work: Workload, plan: Plan, planner: str) -> Outcome:
    """Check and simulate a plan.

    Raises :class:`BadPlan` for one that does not fit the workload, :class:`Infeasible` for one
    that certainly exceeds a GPU's memory.
    """
    check_plan(plan, len(work.profile), len(work.cluster))
    timeline = simulate(work, plan)
    found = Outcome(work, plan, planner, timeline, memory(work, plan, timeline))
    if found.memory.fits is False:
        peak, capacity = max(
            zip(found.memory.peak, found.memory.capacity, strict=True),
            key=lambda pair: pair[0] / pair[1],
        )
        raise Infeasible(
            f"the plan needs {peak / 2**30:.3g} GiB on a GPU that has {capacity / 2**30:.3g} GiB; "
            "use more GPUs, a smaller micro-batch, re-computation or a smaller --state-factor"
        )
    if timeline.iteration_s <= 0:
        raise BadPlan("the plan takes no time; a profile with times above 0 is needed")
    return found


def describe(found: Outcome) -> dict[str, Any]:
    """The outcome as JSON values; planner, time and speed-up come first."""
    work, plan, timeline = found.work, found.plan, found.timeline
    return {
        "planner": found.planner,
        "predicted_iteration_s": timeline.iteration_s,
        "predicted_speedup": found.speedup,
        "kind": "modelled",
        "profile_name": work.profile.name,
        "cluster_name": work.cluster.name,
        "split": plan.split,
        "micro_batches": work.micro_batches,
        "sequential_s": work.sequential_s,
        "parts": found.parts(),
        "stages": [_stage(found, s) for s in range(len(plan.stages))],
        "fits": {True: "yes", False: "no", None: "unknown"}[found.memory.fits],
        "notes": found.notes(),
    }


def _stage(found: Outcome, s: int) -> dict[str, Any]:
    stage, costs = found.plan.stages[s], found.timeline.costs
    names = found.work.profile.layers
    worker = costs.worker[s]
    return {
        "first": stage.first,
        "end": stage.end,
        "first_layer": names[stage.first].name,
        "last_layer": names[stage.end - 1].name,
        "gpus": list(stage.gpus),
        "forward_s": costs.forward[s],
        "backward_s": costs.backward[s] + costs.weight[s],
        "onward_s": costs.onward[s].seconds if s < len(costs.onward) else 0.0,
        "allreduce_s": costs.allreduce[s].seconds,
        "micro_batches_held": found.timeline.held[s],
        "peak_memory_bytes": found.memory.peak[worker],
        "memory_bytes": found.memory.capacity[worker],
    }
