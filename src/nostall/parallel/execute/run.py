"""Training by a plan in an existing process group: one rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.communication.process_groups import ProcessGroups
from nostall.parallel.execute.communication.slow_links import SlowLinks
from nostall.parallel.execute.engines.executor import Executor
from nostall.parallel.execute.engines.p2p import P2PExecutor
from nostall.parallel.execute.engines.pipelining import PipeliningExecutor, unsupported_reason
from nostall.parallel.execute.preconditions import (
    check_deterministic,
    check_layers,
    check_optimizer,
    check_sample_sums,
)
from nostall.parallel.execute.reference import Reference, make_optimizer
from nostall.parallel.execute.run_config import Engine, RunResult
from nostall.parallel.execute.train import train
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
    if len(plan.stages) > 1:
        check_optimizer(model.job, is_sharded=False)
    if options.check:
        check_deterministic(model.random_operations)
    device, dtype = options.device, model.computation_dtype
    reference = Reference(model.job, device, dtype) if options.check else None
    groups = ProcessGroups(device, options.deadline)
    executor = _make_executor(model, workload, plan, groups, options)
    trainer = _PipelineTrainer(model, executor)
    result = train(
        model.job, workload.global_batch, trainer, options.steps, device,
        RunResult(executor.engine), reference,
    )  # fmt: skip
    groups.close()
    return result


class _PipelineTrainer:
    """The executor of a rank, with the optimiser of the parameters that the rank holds."""

    def __init__(self, model: Model, executor: Executor) -> None:
        self.step, self.loss_dtype = executor.step, model.loss_dtype
        self.parameters = _held_parameters(model, executor)
        distinct = {id(p): p for p in self.parameters.values()}
        self.optimizer = make_optimizer(model.job, distinct.values())

    def whole_gradients(self) -> Mapping[str, torch.Tensor | None]:
        return {name: p.grad for name, p in self.parameters.items()}

    def update(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


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
