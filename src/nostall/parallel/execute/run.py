"""Training by a plan in an existing process group: one rank's part."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from nostall.parallel.execute.parts.captured_steps import CapturedSteps
from nostall.parallel.execute.parts.computation import Computation
from nostall.parallel.execute.parts.hybrid_part import HybridPart
from nostall.parallel.execute.parts.part import Part, PartOptions
from nostall.parallel.execute.parts.pipeline_part import PipelinePart
from nostall.parallel.execute.parts.sharded_part import ShardedPart
from nostall.parallel.execute.preconditions import check_deterministic, check_optimizer
from nostall.parallel.execute.reference import Reference
from nostall.parallel.execute.run_config import Engine, RunResult
from nostall.parallel.execute.train import train
from nostall.parallel.module.job import Job
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.sharding.engine_file import EngineFile
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.plan_file import PlanFile


@dataclass(frozen=True)
class RunOptions:
    """Options of a run of a plan."""

    steps: int
    """Iterations."""
    device: torch.device
    """Device of this rank."""
    engine: Engine = "auto"
    check: bool = False
    """Whether to train in a single process, too, and compare losses and gradients."""
    deadline: float | None = None
    """Longest wait for another rank within an iteration, in seconds; None for torch's default
    timeout of new process groups."""
    compile: bool = False
    """Whether Inductor compiles what a rank computes between collectives."""
    capture: bool = False
    """Whether a step is one CUDA graph."""

    @property
    def part(self) -> PartOptions:
        """The options of a rank's part."""
        return PartOptions(self.device, self.engine, self.deadline)


def run_plan(model: Model, workload: Workload, plan: Plan, options: RunOptions) -> RunResult:
    """Train by a plan; every rank calls this, and rank r is GPU r of the plan's cluster.

    Raises :class:`BadPlan` if the plan was made for another model or the engine cannot run it.
    """
    if len(plan.stages) > 1:
        check_optimizer(model.job, is_sharded=False)
    reference = _reference(model.job, model.computation_dtype, options)
    part = PipelinePart(model, workload, plan, options.part)
    return _run(model.job, part, options, reference)


def run_sharding_plan(job: Job, plan: PlanFile, options: RunOptions) -> RunResult:
    """Train by a sharding plan; every rank calls this, and rank r is device r of the mesh.

    Raises :class:`BadPlan` if the plan was made for another module, or if an operator of the step
    has no kernel on the device.
    """
    part = ShardedPart(Computation(job, job), plan, options.part)
    if part.has_shards:
        check_optimizer(job, is_sharded=True)
    reference = _reference(job, part.computation_dtype, options)
    return _run(job, part, options, reference)


def run_hybrid_plan(job: Job, plan: HybridFile, options: RunOptions) -> RunResult:
    """Train by a hybrid plan; every rank calls this, and stages have consecutive ranks.

    Raises :class:`BadPlan` if the plan was made for another module.
    """
    check_optimizer(job, is_sharded=True)
    part = HybridPart(Computation(job, job), plan, options.part)
    return _run(job, part, options, _reference(job, part.computation_dtype, options))


def run_engine_plan(job: Job, plan: EngineFile, options: RunOptions) -> RunResult:
    """Train by one of PyTorch's engines; every rank calls this.

    Raises :class:`BadPlan` if the plan is for another module.
    """
    run = job
    if options.check:  # the engines change the module that they run, and the reference copies it
        run = replace(job, module=copy.deepcopy(job.module))
    # Imports FSDP and the tracer, which no other plan needs.
    from nostall.parallel.execute.parts.engine_part import EnginePart

    part = EnginePart(run, plan, options.part)
    if plan.engine != "ddp":
        check_optimizer(job, is_sharded=True)
    return _run(job, part, options, _reference(job, part.computation_dtype, options))


def _reference(job: Job, dtype: torch.dtype, options: RunOptions) -> Reference | None:
    return Reference(job, options.device, dtype) if options.check else None


def _run(job: Job, part: Part, options: RunOptions, reference: Reference | None) -> RunResult:
    if reference is not None:
        check_deterministic(part.random_operators)
    if options.compile:
        part.compile()
    run = CapturedSteps(part, options.device) if options.capture else part
    result = RunResult(part.engine)
    result = train(job, part, run, options.steps, options.device, result, reference)
    result.engine = part.engine  # a capture may take another one
    result.collectives, result.notes = dict(part.collectives), list(part.notes)
    if isinstance(run, CapturedSteps):
        run.close()
    part.close()
    return result
