"""One rank of ``benchmarks.sharding.gpu.hybrids``: plans, then runs hybrids, shardings and peers.

All ranks make the same calls in the same order.  Rank 0 writes the records.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.sharding.clusters import one_server
from benchmarks.sharding.gpu.hybrid_candidates import (
    HybridCandidate,
    Setting,
    counts,
    hybrid_candidates,
)
from benchmarks.sharding.gpu.measure import SIZES, measure_collectives
from benchmarks.sharding.gpu.models import MODELS, GpuModel
from benchmarks.sharding.gpu.plans import GRACE_S
from benchmarks.sharding.gpu.rank import (
    Expected,
    Make,
    Makers,
    Step,
    end,
    gradient_error,
    plan_all,
    plan_makers,
    run_model,
    start,
)
from benchmarks.sharding.gpu.session import Session
from nostall.parallel.module import Model
from nostall.parallel.module.job import Job
from nostall.parallel.sharding.hybrid.messages import StageProcesses
from nostall.parallel.sharding.hybrid.planner import Measured
from nostall.parallel.sharding.hybrid.run import CapturedStage, HybridRank, capture_stage
from nostall.parallel.sharding.hybrid.search import stage_sizes
from nostall.parallel.sharding.program.devices import ProcessDevices

RULES = ("data-parallel", "fsdp", "megatron", "megatron, whole activations", "data-parallel x fsdp")
"""Rules of the shardings that run beside the hybrids."""
SEARCH_FACTOR = 3.0
"""Longest search for stages over that for a sharding."""


@dataclass
class Stages:
    """Models as layers, captured stages and processes, which plans share."""

    session: Session
    models: dict[str, Model] = field(default_factory=dict)
    captured: dict[tuple[Any, ...], CapturedStage] = field(default_factory=dict)
    processes: dict[tuple[int, ...], StageProcesses] = field(default_factory=dict)

    def model(self, name: str) -> Model:
        """The layers of a model whose tensors have no values."""
        if name not in self.models:
            with torch.device("meta"):
                whole = MODELS[name](self.session.options["tiny"])
            inputs, targets = (torch.zeros_like(t, device="cpu") for t in _batch(whole))
            job = GpuModel(whole.module.to_empty(device="cpu"), inputs, targets).job
            self.models[name] = Model(job)
        return self.models[name]

    def own(self, name: str, plan: HybridCandidate) -> tuple[StageProcesses, CapturedStage]:
        """This rank's stage of a plan.  A collective call."""
        sizes = tuple(stage.devices for stage in plan.stages)
        if sizes not in self.processes:
            self.processes[sizes] = StageProcesses(sizes, self.session.device)
        processes = self.processes[sizes]
        stage, model = plan.stages[processes.number], self.model(name)
        samples = model.job.samples // plan.micro_batches
        key = (name, stage.first, stage.end, samples, stage.devices)
        if key not in self.captured:
            self.captured[key] = capture_stage(model, *key[1:])
        found, assignment = self.captured[key], plan.assignments[processes.number]
        return processes, CapturedStage(found.stage, found.step, assignment)


def main(out: Path) -> None:
    session = start(out)
    faulthandler.dump_traceback_later(session.until - monotonic() + GRACE_S / 2)
    stages = Stages(session)
    measured = _measure_stages(session)
    session.say("links of stages measured")
    models = [name for name in MODELS if session.options["model"] in ("all", name)]
    hybrids = _plan_hybrids(stages, models, measured)
    session.say("hybrids planned")
    planned = plan_all(session, models, RULES)
    session.say("plans made")
    for name in models:
        run_model(session, name, partial(_makers, stages, hybrids, planned))
    end()


def _measure_stages(session: Session) -> Measured:
    """Costs of collectives among the GPUs of a stage, while all stages of this size use theirs."""
    gpus, tiny = session.options["gpus"], session.options["tiny"]
    costs = {}
    for size in stage_sizes(gpus)[1:]:
        mesh = (gpus,) if size == gpus else (gpus // size, size)
        if mesh not in session.costs:
            sizes = SIZES[:3] if tiny else SIZES
            session.costs[mesh] = measure_collectives(ProcessDevices(mesh), session.device, sizes)
        own = len(mesh) - 1
        costs[size] = {(k, 0): c for (k, dim), c in session.costs[mesh].items() if dim == own}
    return costs


def _plan_hybrids(
    stages: Stages, models: Sequence[str], measured: Measured
) -> dict[str, list[HybridCandidate]]:
    """Each number of micro-batches of a model is planned on one rank, several at once."""
    session = stages.session
    cluster = one_server(session.options["gpus"], 300.0)
    own: dict[str, list[HybridCandidate]] = {}
    tasks = [(name, count) for name in models for count in counts(stages.model(name).job.samples)]
    for number, (name, count) in enumerate(tasks):
        if number % dist.get_world_size() == dist.get_rank():
            seconds = SEARCH_FACTOR * session.options["planning_seconds"]
            model = stages.model(name)
            setting = Setting(model, cluster, session.rates, measured, count, seconds)
            own.setdefault(name, []).extend(hybrid_candidates(setting))
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, own)
    return {name: [plan for part in everything for plan in part.get(name, [])] for name in models}


def _makers(
    stages: Stages,
    hybrids: Mapping[str, list[HybridCandidate]],
    planned: Any,
    name: str,
    reference: GpuModel,
    expected: Expected,
) -> Makers:
    """The hybrids of a model, then its shardings."""
    for plan in hybrids[name]:
        record = {"model": name, "mesh": plan.place, "plan": plan.name}
        yield record, _hybrid_maker(stages, name, plan, reference, expected)
    yield from plan_makers(stages.session, planned, name, reference, expected)


def _hybrid_maker(
    stages: Stages, name: str, plan: HybridCandidate, model: GpuModel, expected: Expected
) -> Make:
    def make() -> tuple[Step, dict[str, Any]]:
        processes, captured = stages.own(name, plan)
        rank = HybridRank(captured, processes, dict(model.module.named_parameters()))
        parts = _micro_batches(model.job, plan.micro_batches)
        loss = rank.step(parts) / plan.micro_batches
        about = [[s.first, s.end, s.devices, s.seconds] for s in plan.stages]
        more = {
            "predicted_s": plan.step_s,
            "stages": about,
            "micro_batches": plan.micro_batches,
            **_errors(rank, loss, plan.micro_batches, expected),
        }
        return partial(rank.step, parts), more

    return make


def _micro_batches(job: Job, count: int) -> list[tuple[Any, Any]]:
    samples = job.samples
    starts = range(0, samples, samples // count)
    batch = (job.inputs, job.targets)
    return [job.take(batch, slice(i, i + samples // count)) for i in starts]


def _errors(
    rank: HybridRank, loss: torch.Tensor, micro_batches: int, expected: Expected
) -> dict[str, float]:
    """As those of shardings, over all stages.  Raises ValueError if a gradient lacks."""
    expected_loss, gradients = expected
    found = rank.own.whole_gradients(1 / micro_batches)
    worst = max(gradient_error(got, gradients[name]) for name, got in found.items())
    is_first = rank.processes.is_first_of_stage
    sums = torch.tensor([float(loss), len(found)], dtype=torch.float64, device=rank.device)
    sums *= is_first
    dist.all_reduce(sums)
    largest = torch.tensor(worst, dtype=torch.float64, device=rank.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if int(sums[1]) != len(gradients):
        raise ValueError(f"{int(sums[1])} of {len(gradients)} gradients exist")
    return {"loss_error": abs(float(sums[0]) / expected_loss - 1), "gradient_error": float(largest)}


def _batch(model: GpuModel) -> tuple[torch.Tensor, torch.Tensor]:
    return model.inputs, model.targets


if __name__ == "__main__":
    main(Path(sys.argv[1]))
