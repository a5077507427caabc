"""Plans of equal replication on ``torch.distributed.pipelining``, over pp x dp ranks.

Every replica number makes one pipeline of its own; gradients are summed over replicas (and over
stages that share a parameter) once all micro-batches are through.  Tensors that skip stages are
handed through, because the runtime knows neighbours only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.executor import agree
from nostall.parallel.execute.gradients import GradientSums
from nostall.parallel.execute.groups import Groups
from nostall.parallel.execute.passes import StagePasses
from nostall.parallel.execute.private import lacking, make_schedule, make_stage, require
from nostall.parallel.execute.slow import SlowLinks
from nostall.parallel.execute.warming import warm_up
from nostall.parallel.module.job import on_device, part_of
from nostall.parallel.module.model import Model
from nostall.parallel.module.piece import Piece
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.program import program
from nostall.parallel.slices import Slices


def stands_against(model: Model, work: Workload, plan: Plan) -> str:
    """Why torch's runtime cannot run the plan; '' when it can."""
    sizes = {len(stage.gpus) for stage in plan.stages}
    replicas = max(sizes)
    if part := lacking():
        return f"this torch has no {part}"
    if len(plan.stages) == 1:
        return "there is one stage only"
    if len(sizes) > 1:
        return f"its stages have different numbers of replicas ({plan.split})"
    if work.global_batch % (work.micro_batches * replicas):
        return (
            f"{work.global_batch} samples are no whole number for each of {work.micro_batches} "
            f"micro-batches and {replicas} replicas"
        )
    if plan.recompute:
        return "it re-computes activations"
    groups = list(dict.fromkeys(stage.gpus for stage in plan.stages))
    if len(groups) < 2:
        return "all stages are on the same GPUs"
    for stage in plan.stages[:-1]:
        for name in model.crossing(stage.end):
            if not model.dtype(name).is_floating_point or model.rows[name] is None:
                return f"{name}, which crosses layer {stage.end}, is no tensor of samples"
    return ""


class _Module(torch.nn.Module):  # type: ignore[misc]
    """A piece as torch's runtime wants it; told by a number which micro-batch it is.

    The batch itself stays on the rank: every stage finds its own part of the model's inputs there.
    """

    def __init__(self, piece: Piece, last: bool) -> None:
        super().__init__()
        self.piece = piece
        self.last = last
        self.own = torch.nn.ParameterList(
            [t for t in piece.own if isinstance(t, torch.nn.Parameter)]
        )
        self.parts: list[tuple[Any, Any]] = []

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        given = dict(zip(self.piece.received, received, strict=True))
        made = self.piece(given, *self.parts[int(number)])
        if self.last:
            return made["loss"].reshape(1)
        # A view: what is handed through must not be the very tensor that came in.
        sent = (made[n] if n in made else given[n].view_as(given[n]) for n in self.piece.sent)
        return tuple(sent)


class TorchPipeline:
    """One rank of a run on torch's runtime; the same interface as ``Executor``."""

    def __init__(
        self,
        model: Model,
        work: Workload,
        plan: Plan,
        groups: Groups,
        slow: SlowLinks | None = None,
    ) -> None:
        require()
        if why := stands_against(model, work, plan):
            raise BadPlan(
                f"torch.distributed.pipelining cannot run this plan: {why}; use --engine p2p"
            )
        if slow is not None:
            raise BadPlan("torch.distributed.pipelining cannot emulate slow links; use engine p2p")
        agree(model)
        self.model, self.work, self.plan = model, work, plan
        self.device = groups.device
        mesh = list(dict.fromkeys(stage.gpus for stage in plan.stages))
        rank = dist.get_rank()
        self.row = next((gpus for gpus in mesh if rank in gpus), ())
        self.replica = self.row.index(rank) if self.row else 0
        columns = list(zip(*mesh, strict=True))
        self._groups = [groups.of(column, "pipeline", messages=True) for column in columns]
        self.slices = Slices(work, plan)
        self.own = [s for s, stage in enumerate(plan.stages) if stage.gpus == self.row]
        self.gradients = GradientSums(model, plan, rank, groups)
        self.gradients.broadcast()
        self.modules: list[_Module] = []
        self._cold = True
        if self.row:
            operations = program(work, plan)
            column = columns[self.replica]
            # A group numbers its ranks by size, whatever the order of their stages.
            rows = {
                sorted(column).index(r): [
                    f"{op.stage}{op.kind}{op.micro_batch}" for op in operations[gpus]
                ]
                for r, gpus in zip(column, mesh, strict=True)
            }
            self._split = any(op.kind == "W" for op in operations[self.row])
            stages = [self._stage(s) for s in self.own]
            self.schedule = make_schedule(stages, work.micro_batches, self._loss, rows)

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """One iteration on a batch of the iteration's size; returns this rank's part of the loss.

        Gradients are in the parameters' ``.grad`` afterwards; clear them before the next step.
        """
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if not self.row:
            return loss
        count, samples = self.work.micro_batches, self.work.global_batch
        for s, module in zip(self.own, self.modules, strict=True):
            module.parts = [
                on_device(
                    part_of((inputs, targets), samples, *self.slices.part(s, self.replica, m)),
                    self.device,
                )
                for m in range(count)
            ]
        if self._cold:
            self._warm_up()
        numbers = torch.arange(count)
        losses: list[torch.Tensor] = []
        self.schedule.step(target=numbers, losses=losses, number=numbers, return_outputs=False)
        self.gradients.finish()
        for part in losses:
            loss += part.detach()
        return loss

    def _warm_up(self) -> None:
        for s, module in zip(self.own, self.modules, strict=True):
            first, end = self.slices.part(s, self.replica, 0)
            stage = self.plan.stages[s]
            passes = StagePasses(self.model.stage_parameters(stage.first, stage.end), False)
            part, size = module.parts[0], end - first
            warm_up(self.model, passes, module.piece, part, size, self.device, split=self._split)
        self._cold = False

    def _stage(self, s: int) -> Any:
        stage = self.plan.stages[s]
        first, end = self.slices.part(s, self.replica, 0)
        piece = self.model.piece(stage.first, stage.end, end - first, self.device)
        last = s == len(self.plan.stages) - 1
        self.modules.append(_Module(piece, last))
        received = [self._example(name, end - first) for name in piece.received]
        sent = [self._example(name, end - first) for name in piece.sent]
        if last:
            kind = self.model.loss_dtype
            sent = [torch.empty(1, dtype=kind, device=self.device, requires_grad=True)]
        group = self._groups[self.replica]
        stages = len(self.plan.stages)
        return make_stage(self.modules[-1], s, stages, self.device, group, received, sent)

    def _example(self, name: str, samples: int) -> torch.Tensor:
        shape, dtype = self.model.shape(name, samples), self.model.dtype(name)
        # The runtime makes its buffers like these: what they require decides what comes back.
        return torch.empty(shape, dtype=dtype, device=self.device, requires_grad=True)

    def _loss(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        parts = self.work.micro_batches * len(self.plan.stages[0].gpus)
        mean = self.model.job.reduction == "mean"
        return output.sum() / parts if mean else output.sum()
