"""Training by a plan in an existing process group: one rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import get_args

import torch
import torch.distributed as dist

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.executor import Executor
from nostall.parallel.execute.p2p import P2PExecutor
from nostall.parallel.execute.pipelining import PipeliningExecutor, unsupported_reason
from nostall.parallel.execute.preconditions import (
    check_deterministic,
    check_layers,
    check_sample_sums,
)
from nostall.parallel.execute.process_groups import ProcessGroups
from nostall.parallel.execute.reference import Reference, make_optimizer
from nostall.parallel.execute.run_config import Engine, RunResult
from nostall.parallel.execute.slow_links import SlowLinks
from nostall.parallel.module.job import to_device
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan, Workload

ENGINES: tuple[Engine, ...] = get_args(Engine)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run of a plan."""

    steps: int
    """Iterations."""
    device: torch.device
    """Device of this rank."""
    engine: Engine = "auto"
    slow: SlowLinks | None = None
    """Slow links to emulate; ``auto`` then takes the ``p2p`` engine."""
    check: bool = False
    """Whether to train in a single process, too, and compare losses and gradients."""
    deadline: float | None = None
    """Longest wait for another rank within an iteration, in seconds; None for torch's default
    timeout of new process groups."""


def run_plan(model: Model, workload: Workload, plan: Plan, options: RunOptions) -> RunResult:
    """Train by a plan; every rank calls this, and rank r is GPU r of the plan's cluster.

    Raises :class:`BadPlan` if the plan was made for another model or the engine cannot run it.
    """
    check_layers(model, workload)
    if options.check:
        check_deterministic(model)
    device = options.device
    reference = Reference(model.job, device) if options.check else None
    groups = ProcessGroups(device, options.deadline)
    executor = _make_executor(model, workload, plan, groups, options)
    parameters = _held_parameters(model, executor)
    optimizer = make_optimizer(model.job, {id(p): p for p in parameters.values()}.values())
    result = RunResult(executor.engine)
    worst_gradient = worst_loss = 0.0
    reset_peak_memory(device)
    for step in range(options.steps):
        inputs, targets = model.job.batch(step, workload.global_batch)
        inputs, targets = to_device((inputs, targets), device)
        _synchronize(device)
        dist.barrier()
        start = perf_counter()
        loss = executor.step(inputs, targets)
        result.launch_seconds.append(perf_counter() - start)
        _synchronize(device)
        result.seconds.append(perf_counter() - start)
        dist.all_reduce(loss)
        result.losses.append(float(loss))
        if reference is not None:
            expected = reference.step(inputs, targets)
            result.reference_losses.append(expected)
            found = {name: p.grad for name, p in parameters.items()}
            worst_gradient = max(worst_gradient, reference.gradient_error(found))
            error = reference.loss_error(result.losses[-1], expected, model.loss_dtype)
            worst_loss = max(worst_loss, error)
            reference.update()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    combine_ranks(result, (worst_gradient, worst_loss) if options.check else None, device)
    groups.close()
    return result


def _held_parameters(model: Model, executor: Executor) -> Mapping[str, torch.nn.Parameter]:
    """The model's parameters that this rank holds, by name."""
    return {
        name: p
        for name, p in model.parameters.items()
        if any(p is held for held in executor.gradients.parameters)
    }


def _make_executor(
    model: Model, workload: Workload, plan: Plan, groups: ProcessGroups, options: RunOptions
) -> Executor:
    engine, slow = options.engine, options.slow
    if engine not in ENGINES:
        raise BadPlan(f"engine {engine!r} is unknown; allowed are {', '.join(ENGINES)}")
    if engine == "auto":
        is_p2p = slow is not None or bool(unsupported_reason(model, workload, plan))
        engine = "p2p" if is_p2p else "torch"
    if engine == "p2p":
        check_sample_sums(model, workload, plan)
        return P2PExecutor(model, workload, plan, groups, slow)
    return PipeliningExecutor(model, workload, plan, groups, slow)


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak of memory of a GPU, so that it is that of the steps that follow."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def combine_ranks(
    result: RunResult, errors: tuple[float, float] | None, device: torch.device
) -> None:
    """Combine the ranks' results: slowest times, largest errors, each rank's memory.

    ``errors`` are the largest errors of a gradient and of a loss on this rank.
    """
    largest = [*result.seconds, *result.launch_seconds, *(errors or (0.0, 0.0))]
    seconds = torch.tensor(largest, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    *times, gradient, loss = seconds.tolist()
    steps = len(result.seconds)
    result.seconds, result.launch_seconds = times[:steps], times[steps:]
    if errors is not None:
        result.worst_gradient, result.worst_loss = gradient, loss
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    peaks = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(peaks, torch.tensor([peak], dtype=torch.int64, device=device))
    result.peak_bytes = [int(p) for p in peaks] if device.type == "cuda" else []


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
