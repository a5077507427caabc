"""Runs a plan over torch.distributed, whatever its replicas: one process a GPU, by rank.

Rank r is GPU r of the plan's cluster.  Ranks that the plan does not use take part in setting up
process groups and then have nothing to do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nostall.parallel.errors import BadModel
from nostall.parallel.execute.gradients import GradientSums
from nostall.parallel.execute.groups import Groups
from nostall.parallel.execute.links import Link, Receipt, Tensors
from nostall.parallel.execute.passes import StagePasses
from nostall.parallel.execute.slow import Delays, SlowLinks
from nostall.parallel.execute.warming import warm_up
from nostall.parallel.module.job import on_device, part_of
from nostall.parallel.module.model import Model
from nostall.parallel.module.piece import Piece
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.program import Operation, program
from nostall.parallel.slices import Slices

AHEAD = 2
"""Operations ahead of their turn whose messages are already awaited."""


class Executor:
    """One rank of a run.  All ranks make one at the same time; :meth:`step` is one iteration."""

    def __init__(
        self,
        model: Model,
        work: Workload,
        plan: Plan,
        groups: Groups,
        slow: SlowLinks | None = None,
    ) -> None:
        agree(model)
        device = groups.device
        self.model, self.work, self.plan, self.device = model, work, plan, device
        self.rank = dist.get_rank()
        self.slices = Slices(work, plan)
        self.stages = [s for s, stage in enumerate(plan.stages) if self.rank in stage.gpus]
        gpus = plan.stages[self.stages[0]].gpus if self.stages else ()
        self.replica = gpus.index(self.rank) if gpus else 0
        self.operations = program(work, plan).get(gpus, [])
        self.parameters = {
            s: model.stage_parameters(plan.stages[s].first, plan.stages[s].end) for s in self.stages
        }
        self.passes = {s: StagePasses(self.parameters[s], plan.recompute) for s in self.stages}
        self._firsts = self._make_pieces()
        delays = Delays(device) if slow is not None else None
        self.gradients = GradientSums(model, plan, self.rank, groups, slow, delays)
        self.gradients.broadcast()
        self.links = self._links(groups, slow, delays)
        self._local: dict[tuple[str, int, int], Tensors] = {}
        self._receipts: dict[Operation, Receipt] = {}
        self._last = {op.stage: op for op in self.operations if op.kind in "BW"}
        self._cold = True

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """One iteration on a batch of the iteration's size; returns this rank's part of the loss.

        Gradients are in the parameters' ``.grad`` afterwards; clear them before the next step.
        """
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        batch = (inputs, targets)
        if self._cold:
            self._warm_up(batch)
        for at, operation in enumerate(self.operations):
            for coming in self.operations[at : at + AHEAD]:
                self._await(coming)
            if operation == self._last[operation.stage]:
                self.gradients.listen()
            found = self._run(operation, batch)
            if found is not None:
                loss += found
            if operation == self._last[operation.stage] and len(self.plan.stages) > 1:
                gpus = self.plan.stages[operation.stage].gpus
                self.gradients.stage_done(self.parameters[operation.stage], gpus)
        self.gradients.finish()
        for link in self.links.values():
            link.finish()
        return loss

    def _run(self, operation: Operation, batch: tuple[Any, Any]) -> torch.Tensor | None:
        s, m = operation.stage, operation.micro_batch
        first, end = self.slices.part(s, self.replica, m)
        if first == end:  # no sample of this micro-batch is this replica's
            return None
        if operation.kind == "F":
            return self._forward(s, m, first, end, batch)
        if operation.kind == "W":
            self.passes[s].backward_weights(m)
            return None
        gradients = self._take(operation, "back", s) if s + 1 < len(self.plan.stages) else {}
        whole = operation.kind == "B"
        back = (self.passes[s].backward if whole else self.passes[s].backward_inputs)(m, gradients)
        if s > 0:
            self._give("back", s - 1, m, back)
        return None

    def _forward(
        self, s: int, m: int, first: int, end: int, batch: tuple[Any, Any]
    ) -> torch.Tensor | None:
        received = self._take(Operation("F", s, m), "onward", s - 1) if s else {}
        mean = self.model.job.reduction == "mean"
        weight = (end - first) / self.work.global_batch if mean else 1.0
        piece, part = self._piece(s, end - first), self._part(batch, first, end)
        sent, loss = self.passes[s].forward(m, piece, received, part, weight)
        if s + 1 < len(self.plan.stages):
            self._give("onward", s, m, sent)
        return loss

    def _piece(self, s: int, samples: int) -> Piece:
        stage = self.plan.stages[s]
        return self.model.piece(stage.first, stage.end, samples, self.device)

    def _part(self, batch: tuple[Any, Any], first: int, end: int) -> tuple[Any, Any]:
        part = part_of(batch, self.work.global_batch, first, end)
        inputs, targets = on_device(part, self.device)
        return inputs, targets

    def _await(self, operation: Operation) -> None:
        """Begin to receive what an operation needs from another rank."""
        s, m = operation.stage, operation.micro_batch
        first, end = self.slices.part(s, self.replica, m)
        boundary = s - 1 if operation.kind == "F" else s
        if operation.kind == "W" or first == end or operation in self._receipts:
            return
        link = self.links.get(boundary)
        if link is not None:
            forward = operation.kind == "F"
            receive = link.receive_forward if forward else link.receive_backward
            self._receipts[operation] = receive(m)

    def _take(self, operation: Operation, way: str, boundary: int) -> Tensors:
        if boundary in self.links:
            return self._receipts.pop(operation).wait()
        return self._local.pop((way, boundary, operation.micro_batch))

    def _give(self, way: str, boundary: int, micro_batch: int, values: Tensors) -> None:
        link = self.links.get(boundary)
        if link is None:  # both stages are on this rank
            self._local[way, boundary, micro_batch] = values
        elif way == "onward":
            link.send_forward(micro_batch, values)
        else:
            link.send_backward(micro_batch, values)

    def _links(
        self, groups: Groups, slow: SlowLinks | None, delays: Delays | None
    ) -> dict[int, Link]:
        """Groups of all boundaries, made by every rank in the same order; links of this rank's."""
        found: dict[int, Link] = {}
        for boundary in range(len(self.plan.stages) - 1):
            one, two = self.plan.stages[boundary].gpus, self.plan.stages[boundary + 1].gpus
            if one == two:
                continue
            ranks = (*one, *two)
            ways = (
                groups.of(ranks, f"onward {boundary}", messages=True),
                groups.of(ranks, f"back {boundary}", messages=True),
            )
            if self.rank in ranks:
                found[boundary] = Link(
                    self.model,
                    self.plan,
                    self.slices,
                    boundary,
                    self.rank,
                    self.device,
                    ways,
                    slow,
                    delays,
                )
        return found

    def _make_pieces(self) -> dict[tuple[int, int], int]:
        """Trace for every slice size that will come, so that no iteration waits for it.

        The micro-batch that comes first with each (stage, samples).
        """
        found: dict[tuple[int, int], int] = {}
        for operation in self.operations:
            if operation.kind == "F":
                s, m = operation.stage, operation.micro_batch
                first, end = self.slices.part(s, self.replica, m)
                if first < end and (s, end - first) not in found:
                    self._piece(s, end - first)
                    found[s, end - first] = m
        return found

    def _warm_up(self, batch: tuple[Any, Any]) -> None:
        split = any(operation.kind == "W" for operation in self.operations)
        for (s, samples), m in self._firsts.items():
            piece, part = (
                self._piece(s, samples),
                self._part(batch, *self.slices.part(s, self.replica, m)),
            )
            warm_up(self.model, self.passes[s], piece, part, samples, self.device, split=split)
        self._cold = False


def agree(model: Model) -> None:
    """Raise :class:`BadModel` unless all ranks built the same model."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, model.fingerprint)
    other = [rank for rank, text in enumerate(found) if text != found[0]]
    if other:
        raise BadModel(
            f"ranks 0 and {other[0]} built different models; build the same one in every process"
        )
