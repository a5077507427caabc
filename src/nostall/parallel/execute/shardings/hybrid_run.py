"""Training by a hybrid plan in an existing process group: one rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.preconditions import check_deterministic
from nostall.parallel.execute.reference import Reference, make_optimizer
from nostall.parallel.execute.run import RunOptions, combine_ranks, reset_peak_memory
from nostall.parallel.execute.run_config import RunResult
from nostall.parallel.module.job import Job, slice_samples, to_device
from nostall.parallel.module.model import Model
from nostall.parallel.sharding.hybrid.messages import StageProcesses
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.hybrid.run import CapturedStage, HybridRank, capture_stage

ENGINE = "hybrid"
"""Name of this engine in results."""


def run_hybrid_plan(job: Job, plan: HybridFile, options: RunOptions) -> RunResult:
    """Train by a hybrid plan; every rank calls this, and stages have consecutive ranks.

    Raises :class:`BadPlan` if the plan was made for another module.
    """
    model, device = Model(job), options.device
    if plan.stages[-1][0].end != len(model):
        raise BadPlan(
            f"the plan is for {plan.stages[-1][0].end} layers and the module has {len(model)}; "
            "plan again"
        )
    if options.check:
        check_deterministic(model)
    reference = Reference(job, device) if options.check else None
    stages = _captured(model, plan)
    sizes = [stage.devices for stage in stages]
    processes = StageProcesses(sizes, device, options.deadline)
    rank = HybridRank(stages[processes.number], processes)
    own, run = rank.own, _Run(job, rank, plan)
    held = _held_parameters(job, stages, own.captured)
    result = RunResult(ENGINE)
    worst_gradient = worst_loss = 0.0
    reset_peak_memory(device)
    for number in range(options.steps):
        inputs, targets = to_device(job.batch(number, plan.samples), device)
        _synchronize(device)
        dist.barrier()
        start = perf_counter()
        loss = run.step((inputs, targets))
        _synchronize(device)
        result.seconds.append(perf_counter() - start)
        dist.all_reduce(loss)
        result.losses.append(float(loss))
        if reference is not None:
            expected = reference.step(inputs, targets)
            result.reference_losses.append(expected)
            found = {**dict.fromkeys(held), **own.whole_gradients(run.scale)}
            worst_gradient = max(worst_gradient, reference.gradient_error(found))
            error = reference.loss_error(result.losses[-1], expected, model.loss_dtype)
            worst_loss = max(worst_loss, error)
            reference.update()
        run.update()
    combine_ranks(result, (worst_gradient, worst_loss) if options.check else None, device)
    return result


def _captured(model: Model, plan: HybridFile) -> list[CapturedStage]:
    """The stages with their strategies; every rank captures all of them."""
    stages = []
    for stage, file in plan.stages:
        found = capture_stage(model, stage.first, stage.end, plan.micro_batch, stage.devices)
        assignment = file.assignment(found.step.graph)
        stages.append(CapturedStage(found.stage, found.step, assignment))
    return stages


def _held_parameters(
    job: Job, stages: Sequence[CapturedStage], own: CapturedStage
) -> Sequence[str]:
    """The names of a stage's parameters, and of those that no stage reads."""
    others = {name for s in stages if s is not own for name in s.stage.names.values()}
    return [name for name, _ in job.module.named_parameters() if name not in others]


class _Run:
    """The optimiser of a rank, and the micro-batches of a step."""

    def __init__(self, job: Job, rank: HybridRank, plan: HybridFile) -> None:
        self.rank, self.plan = rank, plan
        self.parameters = {
            name: torch.nn.Parameter(values[0], values[0].is_floating_point())
            for name, values in rank.own.local.items()
        }
        self.optimizer = make_optimizer(job, self.parameters.values())
        count = plan.samples // plan.micro_batch
        self.scale = 1 / count if job.reduction == "mean" else 1.0

    def step(self, batch: tuple[Any, Any]) -> torch.Tensor:
        """Forward and backward pass of a whole batch; the loss is on one rank, 0 on others."""
        samples, own = self.plan.samples, self.plan.micro_batch
        parts = [slice_samples(batch, samples, i, i + own) for i in range(0, samples, own)]
        loss = self.rank.step(parts) * self.scale
        shared = torch.zeros((), dtype=torch.float64, device=self.rank.device)
        return shared + loss if self.rank.processes.is_first_of_stage else shared

    def update(self) -> None:
        """Step the optimiser on the local parameters, which the program reads."""
        for name, (gradient,) in self.rank.own.gradients.items():
            self.parameters[name].grad = self.scale * gradient
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
