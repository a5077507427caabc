"""Training by a sharding plan in an existing process group: one rank's part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from nostall.parallel.execute.preconditions import check_deterministic, check_optimizer
from nostall.parallel.execute.reference import Reference, make_optimizer
from nostall.parallel.execute.run import RunOptions
from nostall.parallel.execute.run_config import RunResult
from nostall.parallel.execute.train import train
from nostall.parallel.module.effects import random_operators
from nostall.parallel.module.job import Job
from nostall.parallel.module.precision import coarsest, computed_dtypes
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.graph import Assignment, output_placements
from nostall.parallel.sharding.placements import COLLECTIVES, REPLICATED, is_sharded
from nostall.parallel.sharding.plan_file import PlanFile
from nostall.parallel.sharding.program.devices import ProcessDevices, redistribute
from nostall.parallel.sharding.program.program import ShardedProgram

ENGINE = "sharded"
"""Name of this engine in results."""


def run_sharding_plan(job: Job, plan: PlanFile, options: RunOptions) -> RunResult:
    """Train by a sharding plan; every rank calls this, and rank r is device r of the mesh.

    Raises :class:`BadPlan` if the plan was made for another module, or if an operator of the step
    has no kernel on the device.
    """
    device = options.device
    step = capture(job, plan.samples, plan.mesh)
    assignment = plan.assignment(step.graph)
    if _has_sharded_parameters(step, assignment):
        check_optimizer(job, is_sharded=True)
    if options.check:
        check_deterministic(random_operators(step.joint.graph.nodes))
    coarsest_dtype = coarsest(computed_dtypes(step.joint.graph.nodes))
    reference = Reference(job, device, coarsest_dtype) if options.check else None
    trainer = _ShardedTrainer(job, step, assignment, options)
    result = RunResult(ENGINE)
    train(job, plan.samples, trainer, options.steps, device, result, reference)
    result.collectives = dict(trainer.collectives)
    return result


class _ShardedTrainer:
    """Local parameters of this rank, their optimiser, and the program of a step."""

    def __init__(
        self, job: Job, step: CapturedStep, assignment: Assignment, options: RunOptions
    ) -> None:
        device = options.device
        self.loss_dtype = step.joint.loss.meta["val"].dtype
        self.devices = ProcessDevices(step.graph.mesh, options.deadline)
        self.program = ShardedProgram(step, assignment, self.devices, device)
        whole = dict(job.module.named_parameters())
        with torch.no_grad():
            local = self.program.shard_parameters(whole)
        self.names = tuple(whole)
        """Names of all parameters of the module, also of those that the step does not read."""
        self.parameters = {
            name: torch.nn.Parameter(values[0].to(device), whole[name].requires_grad)
            for name, values in local.items()
        }
        self.buffers = {name: b.to(device) for name, b in job.module.named_buffers()}
        self.optimizer = make_optimizer(job, self.parameters.values())
        self.collectives: Counter[str] = Counter()
        """Collectives of the last step, by kind."""

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Forward and backward pass; the loss is on rank 0, and 0 on others."""
        self.devices.collectives.clear()
        with torch.no_grad():
            result = self.program.run(
                {name: [p.detach()] for name, p in self.parameters.items()},
                self.buffers,
                tree_leaves((inputs, targets)),
            )
        for name, (gradient,) in result.gradients.items():
            self.parameters[name].grad = gradient
        counts = self.devices.collectives
        self.collectives = Counter({kind: counts[kind] for kind in COLLECTIVES if counts[kind]})
        loss = result.loss[0].double()
        return loss if dist.get_rank() == 0 else torch.zeros_like(loss)

    def whole_gradients(self) -> Mapping[str, torch.Tensor | None]:
        """Gathered gradients of all parameters of the module; None where the step has none."""
        replicated = (REPLICATED,) * len(self.devices.mesh)
        result: dict[str, torch.Tensor | None] = dict.fromkeys(self.names)
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            placements = self.program.parameter_placements(name)
            (result[name],) = redistribute(self.devices, [parameter.grad], placements, replicated)
        return result

    def update(self) -> None:
        """Step the optimiser and clear the gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def _has_sharded_parameters(step: CapturedStep, assignment: Assignment) -> bool:
    graph = step.graph
    tensors = [graph.operators[number].outputs[0] for number in graph.parameters]
    return any(is_sharded(p) for t in tensors for p in output_placements(graph, assignment, t))
