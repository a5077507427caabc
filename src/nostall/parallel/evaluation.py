"""Evaluation of a plan: modelled time with its components, memory, and the assumptions made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Plan, Workload, check_plan
from nostall.parallel.planners.fastest import simulated_cheap_plans
from nostall.parallel.simulate import (
    Memory,
    Timeline,
    critical_path_s,
    load_bound_s,
    memory,
    simulate,
)

LARGE_SPREAD = 0.1
"""Spread of a measured profile above which the notes advise to measure again."""


_EQUAL = 1 - 1e-9
"""Speed-ups from here on are at least 1; differences below are rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanEvaluation:
    """A plan with its simulated timeline and memory; all times are modelled."""

    workload: Workload
    plan: Plan
    planner: str
    """Name of the planner that made the plan."""
    timeline: Timeline
    memory: Memory
    cheap_s: dict[str, float]
    """Seconds of the plans that need no search and fit into memory, by name; fastest first."""

    @property
    def speedup_over_cheap(self) -> float | None:
        """Time of the fastest cheap plan, divided by the plan's; None if none fits into memory."""
        return min(self.cheap_s.values()) / self.timeline.iteration_s if self.cheap_s else None

    @property
    def speedup(self) -> float:
        """Time of all micro-batches in sequence on one GPU, divided by the plan's time."""
        return self.workload.sequential_s / self.timeline.iteration_s

    @property
    def utilization(self) -> float:
        """Share of the iteration in which the cluster's GPUs compute, on average."""
        return self.speedup / len(self.workload.cluster)

    def time_components(self) -> dict[str, float]:
        """Seconds: phases of DAPPLE's closed form, lower bounds, time after the last backward pass.

        The closed form is left out for interleaved plans, for which it is not defined.
        """
        components: dict[str, float] = {}
        if not self.plan.interleaved:
            from nostall.parallel.planners.closed_form import closed_form

            form = closed_form(self.workload, self.plan)
            components = {
                "closed_form_warm_up_s": form.warm_up_s,
                "closed_form_steady_s": form.steady_s,
                "closed_form_ending_s": form.ending_s,
            }
        ends = self.timeline.operation_starts + self.timeline.durations[:, :, None]
        return components | {
            "after_last_backward_s": self.timeline.iteration_s - float(ends.max()),
            "busiest_resource_s": load_bound_s(self.workload, self.plan),
            "critical_path_s": critical_path_s(self.workload, self.plan),
        }

    def notes(self) -> list[str]:
        """Assumptions and limits of the modelled figures, as sentences."""
        notes = self._slow_notes()
        profile = self.workload.profile
        if not self.memory.measured:
            notes.append(
                "memory is a lower bound: the profile has no measured size of the activations that "
                "layers store for the backward pass, so it is not certain that the plan fits"
            )
        notes += self._sample_notes()
        if profile.passes is not None and profile.spread is not None:
            notes.append(_spread_note(profile.passes, profile.spread))
        has_assumed_split = any(layer.weight_gradient_s is None for layer in profile.layers)
        if self.plan.policy == "zero-bubble" and has_assumed_split:
            notes.append(
                "the split of the backward pass is assumed: "
                f"{self.workload.weight_gradient_share:g} of it is for weight gradients in layers "
                "whose profile does not state it"
            )
        if profile.batch is None:
            notes.append(
                "the profile does not state its batch size; its times are taken for one micro-batch"
            )
        return notes

    def _slow_notes(self) -> list[str]:
        """Notes on plans that take less effort and are faster."""
        notes, over_cheap = list[str](), self.speedup_over_cheap
        if self.speedup < _EQUAL:
            memory = "" if "one GPU" in self.cheap_s else ", whose memory cannot hold the model"
            notes.append(
                f"this plan is SLOWER than one GPU{memory}: {self.speedup:.3g} of its modelled "
                "throughput; use faster links between the GPUs, a larger --micro-batch, or one GPU"
            )
        if over_cheap is not None and over_cheap < _EQUAL:
            name = next(iter(self.cheap_s))
            notes.append(
                f"this plan is SLOWER than {name}, which needs no search: {over_cheap:.3g} of its "
                "modelled throughput; plan with --planner nostall"
            )
        return notes

    @property
    def micro_batch_sizes(self) -> str:
        """Samples of the micro-batches, which are whole numbers: ``4``, or ``4 to 5``."""
        smaller, remainder = divmod(self.workload.global_batch, self.workload.micro_batches)
        return f"{smaller} to {smaller + 1}" if remainder else f"{smaller}"

    def _sample_notes(self) -> list[str]:
        """Notes on micro-batches and slices that differ from what was asked for."""
        workload, notes = self.workload, []
        smaller, remainder = divmod(workload.global_batch, workload.micro_batches)
        sizes = self.micro_batch_sizes
        if remainder or smaller != workload.micro_batch_samples:
            notes.append(
                f"{workload.global_batch} samples are not a multiple of the micro-batch of "
                f"{workload.micro_batch_samples}: the {workload.micro_batches} micro-batches have "
                f"{sizes} samples"
            )
        most = max(len(stage.gpus) for stage in self.plan.stages)
        if most > smaller + bool(remainder) and len(self.plan.stages) > 1:
            notes.append(_small_slices_note(most, sizes, workload.fractions))
        if workload.fractions:
            notes.append("fractions of samples are allowed, as in DAPPLE's planner (--fractions)")
        return notes


def _spread_note(passes: int, spread: float) -> str:
    text = f"the profile is the median of {passes} passes, whose time changed by {spread:.0%}"
    if spread > LARGE_SPREAD:
        text += " during the measurement; measure again while nothing else uses the machine"
    return text


def _small_slices_note(replicas: int, sizes: str, fractions: bool) -> str:
    effect = (
        "times are modelled with fractions of a sample, which no GPU can run"
        if fractions
        else "replicas without a sample wait"
    )
    return (
        f"a stage has {replicas} replicas and micro-batches have {sizes} samples: {effect}; plan "
        "with a larger --micro-batch"
    )


def evaluate_plan(workload: Workload, plan: Plan, planner: str) -> PlanEvaluation:
    """Check and simulate a plan; ``planner`` is the name of the planner that made it.

    Raises :class:`BadPlan` if the plan does not match the workload, and :class:`Infeasible` if it
    certainly exceeds a GPU's memory.
    """
    check_plan(plan, len(workload.profile), len(workload.cluster))
    timeline = simulate(workload, plan)
    needed = memory(workload, plan, timeline)
    if needed.fits is False:
        peak, capacity = max(
            zip(needed.peak, needed.capacity, strict=True), key=lambda pair: pair[0] / pair[1]
        )
        raise Infeasible(
            f"the plan needs {peak / 2**30:.3g} GiB on a GPU that has {capacity / 2**30:.3g} GiB "
            "of memory; use more GPUs, a smaller micro-batch, re-computation or a smaller "
            "--state-factor"
        )
    if timeline.iteration_s <= 0:
        raise BadPlan("the plan takes no time; give a profile with times above 0")
    cheap = simulated_cheap_plans(workload, recompute=True)
    cheap_s = {name: seconds for name, (_, seconds) in cheap.items()}
    return PlanEvaluation(workload, plan, planner, timeline, needed, cheap_s)


def evaluation_document(evaluation: PlanEvaluation) -> dict[str, Any]:
    """The evaluation as JSON values; planner, time and speed-up come first."""
    workload, plan, timeline = evaluation.workload, evaluation.plan, evaluation.timeline
    return {
        "planner": evaluation.planner,
        "predicted_iteration_s": timeline.iteration_s,
        "predicted_speedup": evaluation.speedup,
        "predicted_speedup_over_cheap": evaluation.speedup_over_cheap,
        "cheap_plans_s": evaluation.cheap_s,
        "kind": "modelled",
        "profile_name": workload.profile.name,
        "cluster_name": workload.cluster.name,
        "split": plan.split,
        "micro_batches": workload.micro_batches,
        "sequential_s": workload.sequential_s,
        "parts": evaluation.time_components(),
        "stages": [_stage_document(evaluation, s) for s in range(len(plan.stages))],
        "fits": {True: "yes", False: "no", None: "unknown"}[evaluation.memory.fits],
        "notes": evaluation.notes(),
    }


def _stage_document(evaluation: PlanEvaluation, s: int) -> dict[str, Any]:
    stage, costs = evaluation.plan.stages[s], evaluation.timeline.costs
    layers = evaluation.workload.profile.layers
    worker = costs.worker[s]
    forward_transfers = costs.forward_transfers
    return {
        "first": stage.first,
        "end": stage.end,
        "first_layer": layers[stage.first].name,
        "last_layer": layers[stage.end - 1].name,
        "gpus": list(stage.gpus),
        "forward_s": costs.forward[s],
        "backward_s": costs.backward[s] + costs.weight_gradient[s],
        "onward_s": forward_transfers[s].seconds if s < len(forward_transfers) else 0.0,
        "allreduce_s": costs.allreduce[s].seconds,
        "micro_batches_held": evaluation.timeline.peak_in_flight[s],
        "peak_memory_bytes": evaluation.memory.peak[worker],
        "memory_bytes": evaluation.memory.capacity[worker],
    }
