"""Training by a hybrid plan in an existing process group: one rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.preconditions import check_deterministic, check_optimizer
from nostall.parallel.execute.reference import Reference, make_optimizer
from nostall.parallel.execute.run import RunOptions
from nostall.parallel.execute.run_config import RunResult
from nostall.parallel.execute.train import train
from nostall.parallel.module.job import Job, slice_samples
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
    check_optimizer(job, is_sharded=True)
    if options.check:
        check_deterministic(model.random_operations)
    reference = Reference(job, device, model.computation_dtype) if options.check else None
    stages = _captured(model, plan)
    sizes = [stage.devices for stage in stages]
    processes = StageProcesses(sizes, device, options.deadline)
    rank = HybridRank(stages[processes.number], processes)
    held = _held_parameters(job, stages, rank.own.captured)
    trainer = _HybridTrainer(model, rank, plan, held)
    return train(
        job, plan.samples, trainer, options.steps, device, RunResult(ENGINE), reference
    )  # fmt: skip


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


class _HybridTrainer:
    """The stage of a rank, with the optimiser of its local parameters."""

    def __init__(
        self, model: Model, rank: HybridRank, plan: HybridFile, held: Sequence[str]
    ) -> None:
        """``held`` are the names of the rank's parameters, also of those that no stage reads."""
        self.rank, self.plan, self.held, self.loss_dtype = rank, plan, held, model.loss_dtype
        self.parameters = {
            name: torch.nn.Parameter(values[0], values[0].is_floating_point())
            for name, values in rank.own.local.items()
        }
        self.optimizer = make_optimizer(model.job, self.parameters.values())
        count = plan.samples // plan.micro_batch
        self.scale = 1 / count if model.job.reduction == "mean" else 1.0

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Forward and backward pass of all micro-batches; the loss is on one rank, 0 on others."""
        samples, own, batch = self.plan.samples, self.plan.micro_batch, (inputs, targets)
        parts = [slice_samples(batch, samples, i, i + own) for i in range(0, samples, own)]
        loss = self.rank.step(parts) * self.scale
        return loss if self.rank.processes.is_first_of_stage else torch.zeros_like(loss)

    def whole_gradients(self) -> Mapping[str, torch.Tensor | None]:
        return {**dict.fromkeys(self.held), **self.rank.own.whole_gradients(self.scale)}

    def update(self) -> None:
        """Step the optimiser on the local parameters, which the program reads."""
        for name, (gradient,) in self.rank.own.gradients.items():
            self.parameters[name].grad = self.scale * gradient
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
