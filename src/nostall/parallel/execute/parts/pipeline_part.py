"""One rank's part of a pipeline plan: the executor of its stages, on batches of any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
import torch.distributed as dist

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.communication.process_groups import ProcessGroups
from nostall.parallel.execute.engines.executor import Executor
from nostall.parallel.execute.engines.p2p import P2PExecutor
from nostall.parallel.execute.engines.pipelining import PipeliningExecutor, unsupported_reason
from nostall.parallel.execute.parts.computation import Computation
from nostall.parallel.execute.parts.part import (
    KeptGradients,
    Part,
    PartOptions,
    TrainingModes,
)
from nostall.parallel.execute.preconditions import check_layers, check_sample_sums
from nostall.parallel.execute.run_config import Engine
from nostall.parallel.module.layering import GRANULARITIES
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.rank_schedule import rank_schedules
from nostall.parallel.slices import OwnSamples

ENGINES: tuple[Engine, ...] = get_args(Engine)


class PipelinePart(Part):
    """See :class:`~.part.Part`; rank r is GPU r of the plan's cluster."""

    def __init__(self, model: Model, workload: Workload, plan: Plan, options: PartOptions) -> None:
        """Raises :class:`BadPlan` if the plan is for another model or the engine cannot run it."""
        super().__init__()
        self.no_graph = _no_graph(workload, plan, options)
        self._is_compiled = False
        check_layers(model, workload)
        if options.engine not in ENGINES:
            raise BadPlan(f"engine {options.engine!r} is unknown; allowed are {', '.join(ENGINES)}")
        self.model, self.workload, self.plan, self.options = model, workload, plan, options
        self.samples, self.loss_dtype = workload.global_batch, model.loss_dtype
        self.computation_dtype = model.computation_dtype
        self.loss_samples = workload.micro_batch_samples if len(plan.stages[-1].gpus) == 1 else 0
        self.random_operators = model.random_operations
        self._modes = TrainingModes(model.job.module, model.traced.module)
        self._groups = ProcessGroups(options.device, options.deadline)
        self._executors: dict[int, Executor] = {}
        self._evaluators: dict[tuple[int, bool], P2PExecutor] = {}
        self._eval_model: Model | None = None
        self._kept = KeptGradients()
        executor = self._executor(self.samples)
        self.engine: str = executor.engine
        held = {id(p) for p in executor.gradients.parameters}
        named = dict(model.job.module.named_parameters())
        self.parameters: Mapping[str, torch.nn.Parameter] = {
            name: p for name, p in named.items() if id(p) in held
        }
        self.trained = frozenset(n for n, p in self.parameters.items() if id(p) in model.trained)
        self.counted = frozenset(
            name for name, p in self.parameters.items() if executor.gradients.is_first_holder(p)
        )

    def own(self, samples: int) -> OwnSamples:
        own = self._executor(samples).own
        return own if self._reads_samples(samples) else OwnSamples(())

    def step(
        self, inputs: Any, targets: Any, samples: int, *, scale: float = 1.0, reduce: bool = True
    ) -> torch.Tensor:
        self._kept.restore(self.parameters)
        loss = self._executor(samples).step(inputs, targets, scale=scale, reduce=reduce)
        if not reduce:
            self._kept.keep(self.parameters)
        return loss

    def compile(self) -> None:
        self._is_compiled = True
        for executor in self._executors.values():
            executor.compile(self.note)

    def prepare_capture(self, stream: Any) -> None:
        """The engine p2p for the plan's batch: torch's runtime asks the GPU during a step."""
        if self.engine != "p2p":
            check_sample_sums(self.model, self.workload, self.plan)
            with self._modes.set(is_training=True):
                self._add(P2PExecutor(self.model, self.workload, self.plan, self._groups))
            self.engine = "p2p"

    def drop_capture(self) -> None:
        """A step that ended in the middle keeps micro-batches and messages."""
        with self._modes.set(is_training=True):
            self._add(P2PExecutor(self.model, self.workload, self.plan, self._groups))

    def drop_kept(self) -> None:
        self._kept.drop()

    def evaluate(
        self, inputs: Any, targets: Any, samples: int, *, is_training: bool
    ) -> torch.Tensor:
        key = (samples, is_training)
        if key not in self._evaluators:
            workload = replace(self.workload, global_batch=samples)
            with self._modes.set(is_training=is_training):
                model = self.model if is_training else self._in_eval_mode()
                check_sample_sums(model, workload, self.plan)
                self._evaluators[key] = P2PExecutor(model, workload, self.plan, self._groups)
        return self._evaluators[key].evaluate(inputs, targets)

    def whole_gradients(self) -> Mapping[str, torch.Tensor | None]:
        return {name: p.grad for name, p in self.parameters.items()}

    def close(self) -> None:
        self._groups.close()

    def _executor(self, samples: int) -> Executor:
        """The executor of batches of this size; the first call for a size is a collective one."""
        if samples not in self._executors:
            workload = replace(self.workload, global_batch=samples)
            with self._modes.set(is_training=True):
                self._add(self._new_executor(workload), samples)
        return self._executors[samples]

    def _add(self, executor: Executor, samples: int | None = None) -> None:
        """Let an executor run batches of a size, the plan's by default."""
        if self._is_compiled:
            executor.compile(self.note)
        self._executors[self.samples if samples is None else samples] = executor

    def _new_executor(self, workload: Workload) -> Executor:
        engine, model, plan = self.options.engine, self.model, self.plan
        is_supported = not unsupported_reason(model, workload, plan)
        if workload.global_batch != self.samples and not is_supported:
            engine = "p2p"  # a short batch may not divide as torch's runtime needs it
        if engine == "auto":
            engine = "torch" if is_supported else "p2p"
        if engine == "p2p":
            check_sample_sums(model, workload, plan)
            return P2PExecutor(model, workload, plan, self._groups)
        return PipeliningExecutor(model, workload, plan, self._groups)

    def _reads_samples(self, samples: int) -> bool:
        """Whether one of the rank's stages reads a batched leaf of the batch."""
        batched, device = self.model.job.batched_leaves, self.options.device
        own = self._executor(samples).own
        sizes = {end - first for first, end in own.ranges if end > first}
        for stage in self.plan.stages:
            if sizes and dist.get_rank() in stage.gpus:
                segment = self.model.segment(stage.first, stage.end, min(sizes), device)
                if any(batched[leaf] for leaf in segment.leaves):
                    return True
        return False

    def _in_eval_mode(self) -> Model:
        """The layers traced in eval mode; raises :class:`BadPlan` if they are others."""
        if self._eval_model is None:
            model = Model(self.model.job, self.model.granularity, self.model.traced)
            check_layers(model, self.workload)
            self._eval_model = model
        return self._eval_model


def _no_graph(workload: Workload, plan: Plan, options: PartOptions) -> str:
    """Why the steps of a plan cannot be CUDA graphs; empty if they may be."""
    ranks = [rank for stage in plan.stages for rank in stage.gpus]
    if options.engine == "torch" and len(plan.stages) > 1:
        return "the engine torch is not captured; take the engine p2p or auto"
    if len(set(ranks)) < len(ranks):
        return "a rank has several stages of the pipeline"
    if any(op.kind == "W" for own in rank_schedules(workload, plan).values() for op in own):
        return "backward passes run in two halves"
    return ""


def planned_model(computation: Computation, workload: Workload) -> Model:
    """The job with the layers of the plan's profile, at the granularity that gives these layers.

    Raises :class:`BadPlan` if no granularity does.
    """
    names = tuple(layer.name for layer in workload.profile.layers)
    job, traced = computation.job, computation.traced
    models = (Model(job, granularity, traced) for granularity in GRANULARITIES)
    first = next(models)
    if first.layer_names == names:
        return first
    matching = next((model for model in models if model.layer_names == names), None)
    check_layers(matching or first, workload)
    return matching or first
