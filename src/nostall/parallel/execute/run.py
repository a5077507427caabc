"""Training by a plan in a process group that is already there: the part of one rank."""

from __future__ import annotations

from time import perf_counter
from typing import get_args

import torch
import torch.distributed as dist

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.check import Reference, optimizer_of
from nostall.parallel.execute.executor import Executor
from nostall.parallel.execute.groups import Groups
from nostall.parallel.execute.order import Engine, Ran
from nostall.parallel.execute.pipelining import TorchPipeline, stands_against
from nostall.parallel.execute.slow import SlowLinks
from nostall.parallel.module.job import on_device
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan, Workload

ENGINES: tuple[Engine, ...] = get_args(Engine)
"""``torch``: torch.distributed.pipelining, for equal replication; ``p2p``: nostall's own executor,
for any plan; ``auto``: the former where it can."""


def run_plan(
    model: Model,
    work: Workload,
    plan: Plan,
    steps: int,
    device: torch.device,
    *,
    engine: Engine = "auto",
    slow: SlowLinks | None = None,
    check: bool = False,
    deadline: float | None = None,
) -> Ran:
    """Train for some steps; every rank calls this, with rank r on GPU r of the plan's cluster.

    ``deadline`` in seconds: the longest wait for another rank within a step; None is torch's own
    for new process groups.  Raises :class:`BadPlan` for a plan of another model, or one that the
    engine cannot run.
    """
    check_fits(model, work)
    reference = Reference(model.job, device) if check else None
    groups = Groups(device, deadline)
    runner = _engine(engine, slow, model, work, plan)(model, work, plan, groups, slow)
    names = {
        name: p
        for name, p in model.parameters.items()
        if any(p is own for own in runner.gradients.own)
    }
    own = list({id(p): p for p in names.values()}.values())
    optimizer = optimizer_of(model.job, own) if own else None
    ran = Ran("torch" if isinstance(runner, TorchPipeline) else "p2p")
    worst = 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(steps):
        inputs, targets = model.job.batch(step, work.global_batch)
        inputs, targets = on_device((inputs, targets), device)
        _wait(device)
        dist.barrier()
        start = perf_counter()
        loss = runner.step(inputs, targets)
        _wait(device)
        ran.seconds.append(perf_counter() - start)
        dist.all_reduce(loss)
        ran.losses.append(float(loss))
        if reference is not None:
            ran.reference_losses.append(reference.step(inputs, targets))
            worst = max(worst, reference.worst(names))
            reference.update()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    _gather(ran, worst if check else None, device)
    groups.close()
    return ran


def check_fits(model: Model, work: Workload) -> None:
    """Raise :class:`BadPlan` unless the plan's profile has the model's layers."""
    planned = tuple(layer.name for layer in work.profile.layers)
    if planned != model.names:
        at = next(
            (i for i, (a, b) in enumerate(zip(planned, model.names, strict=False)) if a != b),
            min(len(planned), len(model.names)),
        )
        here = model.names[at] if at < len(model.names) else "nothing"
        there = planned[at] if at < len(planned) else "nothing"
        raise BadPlan(
            f"the plan is for {len(planned)} layers and the module has {len(model.names)}; the "
            f"first difference is layer {at}: {there} in the plan, {here} in the module; plan "
            "from the module itself (nostall plan module.py:build), with the same --layers"
        )


def _engine(
    engine: Engine, slow: SlowLinks | None, model: Model, work: Workload, plan: Plan
) -> type[Executor] | type[TorchPipeline]:
    if engine not in ENGINES:
        raise BadPlan(f"engine {engine!r} is unknown; allowed are {', '.join(ENGINES)}")
    if engine == "p2p" or (engine == "auto" and slow is not None):
        return Executor
    return TorchPipeline if engine == "torch" or not stands_against(model, work, plan) else Executor


def _gather(ran: Ran, worst: float | None, device: torch.device) -> None:
    """The slowest rank's seconds, every rank's memory, the worst gradient of all."""
    seconds = torch.tensor([*ran.seconds, worst or 0.0], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    *ran.seconds, highest = seconds.tolist()
    ran.worst_gradient = None if worst is None else highest
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    peaks = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(peaks, torch.tensor([peak], dtype=torch.int64, device=device))
    ran.peak_bytes = [int(p) for p in peaks] if device.type == "cuda" else []


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
