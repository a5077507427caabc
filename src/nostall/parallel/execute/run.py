"""Training by a plan in an existing process group: one rank's part."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from time import perf_counter

import torch
import torch.distributed as dist

from nostall.parallel.execute.parts.captured_steps import CapturedSteps
from nostall.parallel.execute.parts.computation import Computation
from nostall.parallel.execute.parts.hybrid_part import HybridPart
from nostall.parallel.execute.parts.part import Part, PartOptions
from nostall.parallel.execute.parts.pipeline_part import PipelinePart
from nostall.parallel.execute.parts.sharded_part import ShardedPart
from nostall.parallel.execute.preconditions import check_deterministic, check_optimizer
from nostall.parallel.execute.reference import Reference, make_optimizer
from nostall.parallel.execute.run_config import Engine, RunResult
from nostall.parallel.module.job import Job, to_device
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
    result = _train(job, part, run, options.steps, options.device, result, reference)
    result.engine = part.engine  # a capture may take another one
    result.collectives, result.notes = dict(part.collectives), list(part.notes)
    if isinstance(run, CapturedSteps):
        run.close()
    part.close()
    return result


def _train(
    job: Job,
    part: Part,
    run: Part | CapturedSteps,
    steps: int,
    device: torch.device,
    result: RunResult,
    reference: Reference | None,
) -> RunResult:
    """Run iterations of the part's batch size and complete the result; every rank calls this.

    ``run`` has the part's steps, captured or not.
    """
    optimizer = make_optimizer(
        job, [p for name, p in part.parameters.items() if name in part.trained]
    )
    own = part.own(part.samples).indices
    worst_gradient = worst_loss = 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(steps):
        batch = job.own_batch(number, part.samples, own)
        if part.is_traced:
            job.check_batch(batch)
        inputs, targets = to_device(batch, device)
        _synchronize(device)
        dist.barrier()
        start = perf_counter()
        loss = run.step(inputs, targets, part.samples)
        result.launch_seconds.append(perf_counter() - start)
        _synchronize(device)
        result.seconds.append(perf_counter() - start)
        if not (isinstance(run, CapturedSteps) and run.has_whole_loss):
            dist.all_reduce(loss)
        result.losses.append(float(loss))
        if reference is not None:
            expected = reference.step(*job.batch(number, part.samples))
            result.reference_losses.append(expected)
            error = reference.gradient_error(part.whole_gradients())
            worst_gradient = max(worst_gradient, error)
            error = reference.loss_error(result.losses[-1], expected, part.loss_dtype)
            worst_loss = max(worst_loss, error)
            reference.update()
        start = perf_counter()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            _synchronize(device)
        result.update_seconds.append(perf_counter() - start)
    _combine_ranks(result, (worst_gradient, worst_loss) if reference else None, device)
    return result


def _combine_ranks(
    result: RunResult, errors: tuple[float, float] | None, device: torch.device
) -> None:
    """Combine the ranks' results: slowest times, largest errors, each rank's memory.

    ``errors`` are the largest errors of a gradient and of a loss on this rank.
    """
    lists = (result.seconds, result.launch_seconds, result.update_seconds)
    largest = [*itertools.chain.from_iterable(lists), *(errors or (0.0, 0.0))]
    seconds = torch.tensor(largest, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    *times, gradient, loss = seconds.tolist()
    steps = len(result.seconds)
    result.seconds, result.launch_seconds = times[:steps], times[steps : 2 * steps]
    result.update_seconds = times[2 * steps :]
    if errors is not None:
        result.worst_gradient, result.worst_loss = gradient, loss
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    peaks = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(peaks, torch.tensor([peak], dtype=torch.int64, device=device))
    result.peak_bytes = [int(p) for p in peaks] if device.type == "cuda" else []


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
