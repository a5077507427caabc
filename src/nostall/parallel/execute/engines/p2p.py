"""The ``p2p`` engine: runs any plan with nostall's own point-to-point messages between stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from nostall.parallel.execute.communication.boundary_link import (
    BoundaryLink,
    PendingTensors,
    Tensors,
)
from nostall.parallel.execute.communication.gradient_reducer import GradientReducer
from nostall.parallel.execute.communication.process_groups import ProcessGroups
from nostall.parallel.execute.engines.executor import check_same_model
from nostall.parallel.execute.engines.kernel_warm_up import warm_up
from nostall.parallel.execute.engines.stage_passes import StagePasses
from nostall.parallel.execute.run_config import Engine
from nostall.parallel.module.job import to_device
from nostall.parallel.module.model import Model
from nostall.parallel.module.segment import Segment
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.rank_schedule import Operation, rank_schedules
from nostall.parallel.slices import OwnSamples, Slices

LOOKAHEAD = 2
"""Receives from other servers are started for the current operation and for those after it, this
many in all: NCCL sends little over a network before the receive starts."""
AHEAD_WITHIN_SERVER = False
"""Whether receives within a server are started as early.  A kernel of NCCL that waits for its
message takes multiprocessors from the operators beside it, and links within a server need none."""

Batch = tuple[Any, Any]
"""Inputs and targets."""


class P2PExecutor:
    """One rank of a run on the ``p2p`` engine; see :class:`~.executor.Executor`.

    A rank that the plan does not use takes part in creating process groups and then does nothing.
    """

    engine: ClassVar[Engine] = "p2p"

    def __init__(
        self,
        model: Model,
        workload: Workload,
        plan: Plan,
        groups: ProcessGroups,
    ) -> None:
        check_same_model(model.fingerprint)
        self.model, self.workload, self.plan = model, workload, plan
        self.device = groups.device
        self.rank = dist.get_rank()
        self.slices = Slices(workload, plan)
        stages = [s for s, stage in enumerate(plan.stages) if self.rank in stage.gpus]
        gpus = plan.stages[stages[0]].gpus if stages else ()
        self.replica = gpus.index(self.rank) if gpus else 0
        self.own = self.slices.own(stages[0], self.replica) if stages else OwnSamples(())
        self.operations = rank_schedules(workload, plan).get(gpus, [])
        self.parameters = {
            s: model.stage_parameters(plan.stages[s].first, plan.stages[s].end) for s in stages
        }
        is_random = bool(model.random_operations)
        self.passes = {
            s: StagePasses(self.parameters[s], plan.recompute, is_random) for s in stages
        }
        self._compiled: dict[tuple[int, int], Segment] = {}
        self._first_of_size = self._trace_segments()
        self.gradients = GradientReducer(model, plan, self.rank, groups)
        self.gradients.broadcast_parameters()
        self.links = self._create_links(groups)
        self._local: dict[tuple[str, int, int], Tensors] = {}
        """Tensors between two stages of this rank, by direction, boundary and micro-batch."""
        self._receives: dict[Operation, PendingTensors] = {}
        self._last_backward = {op.stage: op for op in self.operations if op.kind in "BW"}
        self._is_cold, self._scale = True, 1.0

    def step(
        self, inputs: Any, targets: Any, *, scale: float = 1.0, reduce: bool = True
    ) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._scale = scale
        batch = (inputs, targets)
        if self._is_cold:
            self._warm_up(batch)
        for at, operation in enumerate(self.operations):
            self._start_receive(operation)
            for upcoming in self.operations[at + 1 : at + LOOKAHEAD]:
                if self._is_received_ahead(upcoming):
                    self._start_receive(upcoming)
            is_last = reduce and operation == self._last_backward[operation.stage]
            if is_last:
                self.gradients.reduce_during_backward()
            part = self._run(operation, batch)
            if part is not None:
                loss += part
            if is_last and len(self.plan.stages) > 1:
                gpus = self.plan.stages[operation.stage].gpus
                self.gradients.reduce_stage(self.parameters[operation.stage], gpus)
        if reduce:
            self.gradients.finish()
        for link in self.links.values():
            link.finish()
        return loss

    def compile(self, note: Callable[[str], None]) -> None:
        """See :class:`~.executor.Executor`."""
        if any(operation.kind == "W" for operation in self.operations) or self.plan.recompute:
            note("not compiled: backward passes in two halves, and re-computed forward passes")
            return
        for s, samples in self._first_of_size:
            self._compiled[s, samples] = self._segment(s, samples).compiled(note)
        self._is_cold = True

    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """This rank's part of the loss by the forward passes alone, without gradients."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        if self._is_cold:
            self._warm_up((inputs, targets))
        with torch.no_grad():
            for operation in self.operations:
                if operation.kind != "F":
                    continue
                self._start_receive(operation)
                part = self._run(operation, (inputs, targets))
                self.passes[operation.stage].forget(operation.micro_batch)
                if part is not None:
                    loss += part
        for link in self.links.values():
            link.finish()
        return loss

    def _run(self, operation: Operation, batch: Batch) -> torch.Tensor | None:
        """Run one operation; returns the loss of a forward pass of the last stage."""
        s, m = operation.stage, operation.micro_batch
        first, end = self.slices.samples(s, self.replica, m)
        if first == end:  # this replica's slice of the micro-batch is empty
            return None
        if operation.kind == "F":
            return self._forward(operation, end - first, batch)
        if operation.kind == "W":
            self.passes[s].backward_weights(m)
            return None
        gradients = self._take(operation, "backward", s) if s + 1 < len(self.plan.stages) else {}
        passes = self.passes[s]
        run_backward = passes.backward if operation.kind == "B" else passes.backward_inputs
        input_gradients = run_backward(m, gradients)
        if s > 0:
            self._give("backward", s - 1, m, input_gradients)
        return None

    def _forward(self, operation: Operation, samples: int, batch: Batch) -> torch.Tensor | None:
        s, m = operation.stage, operation.micro_batch
        received = self._take(operation, "forward", s - 1) if s else {}
        is_mean = self.model.job.reduction == "mean"
        weight = samples / self.workload.global_batch if is_mean else 1.0
        passes = self.passes[s]
        segment, part = self._segment(s, samples), self._slice(batch, m)
        sent, loss = passes.forward(m, segment, received, part, weight, self._scale)
        if s + 1 < len(self.plan.stages):
            self._give("forward", s, m, sent)
        return loss

    def _segment(self, s: int, samples: int) -> Segment:
        if (s, samples) in self._compiled:
            return self._compiled[s, samples]
        stage = self.plan.stages[s]
        return self.model.segment(stage.first, stage.end, samples, self.device)

    def _slice(self, batch: Batch, m: int) -> Batch:
        """The samples of a micro-batch, on the device."""
        part = self.model.job.take(batch, slice(*self.own.place(m)))
        inputs, targets = to_device(part, self.device)
        return inputs, targets

    def _start_receive(self, operation: Operation) -> None:
        """Start to receive the tensors that an operation needs from another rank, if any."""
        s, m = operation.stage, operation.micro_batch
        first, end = self.slices.samples(s, self.replica, m)
        boundary = s - 1 if operation.kind == "F" else s
        if operation.kind == "W" or first == end or operation in self._receives:
            return
        link = self.links.get(boundary)
        if link is not None:
            is_forward = operation.kind == "F"
            receive = link.receive_forward if is_forward else link.receive_backward
            self._receives[operation] = receive(m)

    def _is_received_ahead(self, operation: Operation) -> bool:
        """Whether an operation's tensors may come from another server, or always."""
        boundary = operation.stage - (1 if operation.kind == "F" else 0)
        if AHEAD_WITHIN_SERVER or boundary not in self.links:
            return True
        link = self.links[boundary]
        server = self.workload.cluster.server
        return len({server[gpu] for gpu in (*link.sources, *link.targets)}) > 1

    def _take(self, operation: Operation, direction: str, boundary: int) -> Tensors:
        """The tensors that an operation needs over a boundary; waits for their messages."""
        if boundary in self.links:
            return self._receives.pop(operation).wait()
        return self._local.pop((direction, boundary, operation.micro_batch))

    def _give(self, direction: str, boundary: int, micro_batch: int, values: Tensors) -> None:
        """Pass tensors over a boundary: to another rank, or to another stage of this rank."""
        link = self.links.get(boundary)
        if link is None:
            self._local[direction, boundary, micro_batch] = values
        elif direction == "forward":
            link.send_forward(micro_batch, values)
        else:
            link.send_backward(micro_batch, values)

    def _create_links(self, groups: ProcessGroups) -> dict[int, BoundaryLink]:
        """Create the groups of all boundaries, on every rank in the same order.

        Returns the links of this rank by boundary.
        """
        links: dict[int, BoundaryLink] = {}
        for boundary in range(len(self.plan.stages) - 1):
            sources, targets = self.plan.stages[boundary].gpus, self.plan.stages[boundary + 1].gpus
            if sources == targets:
                continue
            ranks = (*sources, *targets)
            forward = groups.get(ranks, f"forward {boundary}", messages=True)
            backward = groups.get(ranks, f"backward {boundary}", messages=True)
            if self.rank in ranks:
                links[boundary] = BoundaryLink(
                    self.model,
                    self.plan,
                    self.slices,
                    boundary,
                    self.rank,
                    self.device,
                    {"forward": forward, "backward": backward},
                )
        return links

    def _trace_segments(self) -> dict[tuple[int, int], int]:
        """Trace the stages for each slice size of the run, so no iteration waits for tracing.

        Returns the first micro-batch of each (stage, samples).
        """
        first_of_size: dict[tuple[int, int], int] = {}
        for operation in self.operations:
            if operation.kind == "F":
                s, m = operation.stage, operation.micro_batch
                first, end = self.slices.samples(s, self.replica, m)
                if first < end and (s, end - first) not in first_of_size:
                    self._segment(s, end - first)
                    first_of_size[s, end - first] = m
        return first_of_size

    def _warm_up(self, batch: Batch) -> None:
        split_backward = any(operation.kind == "W" for operation in self.operations)
        for (s, samples), m in self._first_of_size.items():
            segment = self._segment(s, samples)
            part = self._slice(batch, m)
            warm_up(
                self.model,
                self.passes[s],
                segment,
                part,
                samples,
                self.device,
                split_backward=split_backward,
            )
        self._is_cold = False
