"""The ``torch`` engine: runs plans with equal replication on ``torch.distributed.pipelining``.

The ranks form a grid of pipeline stages x replicas.  The ranks of one replica number form one
pipeline; gradients are summed over replicas, and over stages that share a parameter, after all
micro-batches.  The runtime connects only neighbouring stages, so stages pass on tensors that skip
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.communication.gradient_reducer import GradientReducer
from nostall.parallel.execute.communication.process_groups import ProcessGroups
from nostall.parallel.execute.engines.executor import check_same_model
from nostall.parallel.execute.engines.kernel_warm_up import warm_up
from nostall.parallel.execute.engines.stage_passes import StagePasses
from nostall.parallel.execute.engines.torch_internals import (
    make_schedule,
    make_stage,
    missing_part,
    require_parts,
)
from nostall.parallel.execute.run_config import Engine
from nostall.parallel.module.job import to_device
from nostall.parallel.module.model import Model
from nostall.parallel.module.segment import Segment
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.rank_schedule import rank_schedules
from nostall.parallel.slices import OwnSamples, Slices


def unsupported_reason(model: Model, workload: Workload, plan: Plan) -> str:
    """Why torch's runtime cannot run the plan; empty if it can."""
    replica_counts = {len(stage.gpus) for stage in plan.stages}
    replicas = max(replica_counts)
    if part := missing_part():
        return f"this torch has no {part}"
    if len(plan.stages) == 1:
        return "it has only one stage"
    if len(replica_counts) > 1:
        return f"its stages have different numbers of replicas ({plan.split})"
    if workload.global_batch % (workload.micro_batches * replicas):
        return (
            f"its {workload.global_batch} samples do not divide evenly into "
            f"{workload.micro_batches} micro-batches and {replicas} replicas"
        )
    if plan.recompute:
        return "it re-computes activations"
    if len({stage.gpus for stage in plan.stages}) < 2:
        return "all of its stages are on the same GPUs"
    for stage in plan.stages[:-1]:
        for name in model.crossing(stage.end):
            if not model.dtype(name).is_floating_point or model.sample_dim[name] is None:
                return (
                    f"{name}, which crosses layer {stage.end}, is not a floating-point tensor with "
                    "a sample dimension"
                )
    return ""


class _StageModule(torch.nn.Module):  # type: ignore[misc]
    """A segment as a module that torch's runtime can call, with the number of the micro-batch.

    The batch stays on the rank, so each stage reads the model's inputs from ``parts``.
    """

    def __init__(self, segment: Segment, is_last: bool) -> None:
        super().__init__()
        self.segment = segment
        self.is_last = is_last
        self.own_parameters = torch.nn.ParameterList(
            [t for t in segment.own if isinstance(t, torch.nn.Parameter)]
        )
        self.parts: list[tuple[Any, Any]] = []
        """Inputs and targets of each micro-batch of the iteration, on the device."""

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        inputs = dict(zip(self.segment.received, received, strict=True))
        outputs = self.segment(inputs, *self.parts[int(number)])
        if self.is_last:
            return outputs["loss"].reshape(1)
        # A tensor that is passed on must not be the received tensor object itself, hence the view.
        # The runtime sends contiguous tensors only.
        return tuple(
            outputs[n].contiguous() if n in outputs else inputs[n].view_as(inputs[n])
            for n in self.segment.sent
        )


class PipeliningExecutor:
    """One rank of a run on torch's runtime; see :class:`~.executor.Executor`."""

    engine: ClassVar[Engine] = "torch"

    def __init__(
        self,
        model: Model,
        workload: Workload,
        plan: Plan,
        groups: ProcessGroups,
    ) -> None:
        """Raises :class:`BadPlan` if torch's runtime cannot run the plan."""
        require_parts()
        if reason := unsupported_reason(model, workload, plan):
            raise BadPlan(
                f"torch.distributed.pipelining cannot run this plan: {reason}; use --engine p2p"
            )
        check_same_model(model.fingerprint)
        self.model, self.workload, self.plan = model, workload, plan
        self.device = groups.device
        grid = list(dict.fromkeys(stage.gpus for stage in plan.stages))
        rank = dist.get_rank()
        self.row = next((gpus for gpus in grid if rank in gpus), ())
        """Ranks with the same stages as this one; empty if the plan does not use this rank."""
        self.replica = self.row.index(rank) if self.row else 0
        pipelines = list(zip(*grid, strict=True))
        self._groups = [groups.get(ranks, "pipeline", messages=True) for ranks in pipelines]
        self.slices = Slices(workload, plan)
        self.stages = [s for s, stage in enumerate(plan.stages) if stage.gpus == self.row]
        """Numbers of this rank's stages."""
        self.own = self.slices.own(self.stages[0], self.replica) if self.stages else OwnSamples(())
        self.gradients = GradientReducer(model, plan, rank, groups)
        self.gradients.broadcast_parameters()
        self.modules: list[_StageModule] = []
        self._is_cold, self._scale = True, 1.0
        self._losses: list[torch.Tensor] = []
        if self.row:
            operations = rank_schedules(workload, plan)
            ranks = pipelines[self.replica]
            # A group numbers its ranks in ascending order, whatever the order of their stages.
            rows = {
                sorted(ranks).index(r): [
                    f"{op.stage}{op.kind}{op.micro_batch}" for op in operations[gpus]
                ]
                for r, gpus in zip(ranks, grid, strict=True)
            }
            self._split_backward = any(op.kind == "W" for op in operations[self.row])
            stages = [self._make_stage(s) for s in self.stages]
            self.schedule = make_schedule(stages, workload.micro_batches, self._loss, rows)

    def step(
        self, inputs: Any, targets: Any, *, scale: float = 1.0, reduce: bool = True
    ) -> torch.Tensor:
        self._scale, self._losses = scale, []
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if not self.row:
            return loss
        take, places = self.model.job.take, map(self.own.place, range(len(self.own.ranges)))
        parts = [to_device(take((inputs, targets), slice(*p)), self.device) for p in places]
        for module in self.modules:
            module.parts = parts
        if self._is_cold:
            self._warm_up()
        numbers = torch.arange(self.workload.micro_batches)
        self.schedule.step(target=numbers, number=numbers, return_outputs=False)
        if reduce:
            self.gradients.finish()
        for part in self._losses:
            loss += part
        return loss

    def compile(self, note: Callable[[str], None]) -> None:
        """See :class:`~.executor.Executor`."""
        if self.row and self._split_backward:
            note("not compiled: backward passes in two halves")
            return
        for module in self.modules:
            module.segment = module.segment.compiled(note)
        self._is_cold = True

    def _warm_up(self) -> None:
        for s, module in zip(self.stages, self.modules, strict=True):
            first, end = self.slices.samples(s, self.replica, 0)
            stage = self.plan.stages[s]
            passes = StagePasses(self.model.stage_parameters(stage.first, stage.end), False)
            warm_up(
                self.model,
                passes,
                module.segment,
                module.parts[0],
                end - first,
                self.device,
                split_backward=self._split_backward,
            )
        self._is_cold = False

    def _make_stage(self, s: int) -> Any:
        """torch's ``PipelineStage`` for stage ``s``; appends its module to ``modules``."""
        stage = self.plan.stages[s]
        first, end = self.slices.samples(s, self.replica, 0)
        segment = self.model.segment(stage.first, stage.end, end - first, self.device)
        is_last = s == len(self.plan.stages) - 1
        self.modules.append(_StageModule(segment, is_last))
        received = [self._example(name, end - first) for name in segment.received]
        sent = [self._example(name, end - first) for name in segment.sent]
        if is_last:
            dtype = self.model.loss_dtype
            sent = [torch.empty(1, dtype=dtype, device=self.device, requires_grad=True)]
        group = self._groups[self.replica]
        stages = len(self.plan.stages)
        return make_stage(self.modules[-1], s, stages, self.device, group, received, sent)

    def _example(self, name: str, samples: int) -> torch.Tensor:
        shape, dtype = self.model.shape(name, samples), self.model.dtype(name)
        # The runtime creates its buffers like these examples; requires_grad decides whether it
        # sends gradients back.
        return torch.empty(shape, dtype=dtype, device=self.device, requires_grad=True)

    def _loss(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        """A micro-batch's part in the loss of the iteration; all slices have equal size."""
        parts = self.workload.micro_batches * len(self.plan.stages[0].gpus)
        is_mean = self.model.job.reduction == "mean"
        loss = output.sum() / parts if is_mean else output.sum()
        self._losses.append(loss.detach())
        return loss * self._scale
