"""Execution of a hybrid plan: one rank runs its part of one stage.

All forward passes run before the first backward pass (GPipe), and a stage keeps only what it
receives: its backward pass runs the forward pass again.  Ranks of a stage have consecutive numbers.
Between stages, whole tensors are sent, by the first rank of a stage to all ranks of the next, and
gradients back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from nostall.parallel.module.model import Model
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.graph import Assignment
from nostall.parallel.sharding.hybrid.stage_job import RECEIVED, StageJob, stage_job
from nostall.parallel.sharding.placements import REPLICATED
from nostall.parallel.sharding.program.devices import (
    ProcessDevices,
    Values,
    redistribute,
    scatter,
)
from nostall.parallel.sharding.program.program import ShardedProgram

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class CapturedStage:
    """A stage with its graph on a mesh of one dimension, and the strategies of a plan."""

    stage: StageJob
    step: CapturedStep
    assignment: Assignment

    @property
    def devices(self) -> int:
        """Number of GPUs."""
        return self.step.graph.mesh[0]


def capture_stage(model: Model, first: int, end: int, samples: int, devices: int) -> CapturedStage:
    """Capture a stage for a micro-batch; every tensor is replicated."""
    stage = stage_job(model, first, end, samples)
    step = capture(stage.job, samples, (devices,), f"layers {first} to {end - 1}")
    return CapturedStage(stage, step, ((0,) * len(step.graph.operators),))


class _RankOfStage:
    """The part of this rank in one stage."""

    def __init__(self, captured: CapturedStage, devices: ProcessDevices) -> None:
        self.captured, self.devices = captured, devices
        self.segment = captured.stage.segment
        self.program = ShardedProgram(captured.step, captured.assignment, devices)
        self.is_last = self.segment.computed == ("loss",)
        module = captured.stage.job.module
        whole = {n: p for n, p in module.named_parameters() if not n.startswith(RECEIVED)}
        names = {captured.step.graph.operators[i].target for i in captured.step.graph.parameters}
        self.local = {
            name: scatter(devices, value.detach(), self.program.parameter_placements(name))
            for name, value in whole.items()
            if name in names
        }
        self.buffers = dict(module.named_buffers())
        self.sent = {} if self.is_last else self._sent_tensors()
        self.gradients: dict[str, Values] = {}

    def _sent_tensors(self) -> dict[str, int]:
        """Numbers of the tensors that the stage sends: those multiplied with their gradients."""
        graph, found = self.captured.step.graph, {}
        for place, name in enumerate(self.segment.computed):
            target = f"batch {len(self.segment.leaves) + place}"
            given = {o.outputs[0] for o in graph.operators if o.target == target}
            for operator in graph.operators:  # a branch returns its input
                if operator.kind == "branch" and set(operator.inputs) <= given:
                    given.update(operator.outputs)
            product = next(o for o in graph.operators if o.is_forward
                           and o.kind == "operation" and given & set(o.inputs))  # fmt: skip
            (found[name],) = (t for t in product.inputs if t not in given)
        return found

    def forward(self, received: Tensors, leaves: Sequence[Any]) -> Tensors:
        """The tensors that are sent, whole."""
        record: dict[int, Values] = {}
        zeros = [torch.zeros_like(t) for t in self.captured.stage.job.inputs[len(leaves) :]]  # type: ignore[index]
        self.program.run(
            {**self.local, **self._place(received)}, self._with(received),
            [*leaves, *zeros, *self._target()], record, frozenset(self.sent.values()),
        )  # fmt: skip
        return {
            name: self._whole(record[tensor], self.program.placements[tensor])
            for name, tensor in self.sent.items()
        }

    def backward(
        self, received: Tensors, leaves: Sequence[Any], gradients: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Tensors]:
        """The loss, and the gradients of the received tensors; those of parameters are added up."""
        result = self.program.run(
            {**self.local, **self._place(received)}, self._with(received),
            [*leaves, *gradients, *self._target()],
        )  # fmt: skip
        back: Tensors = {}
        for name, values in result.gradients.items():
            if name.startswith(RECEIVED):
                placements = self.program.parameter_placements(name)
                back[name.removeprefix(RECEIVED)] = self._whole(values, placements)
            elif name in self.gradients:
                self.gradients[name] = [
                    a + b for a, b in zip(self.gradients[name], values, strict=True)
                ]
            else:
                self.gradients[name] = values
        return result.loss[0], back

    def whole_gradients(self, scale: float) -> Tensors:
        """Gradients by the model's names."""
        return {
            self.captured.stage.names[name]: scale
            * self._whole(values, self.program.parameter_placements(name))
            for name, values in self.gradients.items()
        }

    def _place(self, received: Tensors) -> dict[str, Values]:
        known = {o.target for o in self.captured.step.graph.operators if o.kind == "parameter"}
        return {
            name: scatter(self.devices, value, self.program.parameter_placements(name))
            for short, value in received.items()
            if (name := f"{RECEIVED}{short}") in known
        }

    def _with(self, received: Tensors) -> Tensors:
        """The buffers, with the received tensors that have no gradient."""
        return {**self.buffers, **{f"{RECEIVED}{name}": t for name, t in received.items()
                                   if f"{RECEIVED}{name}" in self.buffers}}  # fmt: skip

    def _target(self) -> list[Any]:
        return [*tree_leaves(self.captured.stage.job.targets)]

    def _whole(self, values: Values, placements: tuple[str, ...]) -> torch.Tensor:
        whole = (REPLICATED,) * len(self.devices.mesh)
        return redistribute(self.devices, values, placements, whole)[0]


def run_hybrid(
    model: Model, stages: Sequence[CapturedStage], micro_batches: Sequence[tuple[Any, Any]]
) -> tuple[float, Tensors]:
    """One step of all ranks; returns the mean loss and this rank's stage's whole gradients.

    A collective call.  The loss is that of the last stage, and 0 on other ranks.
    """
    firsts = [sum(s.devices for s in stages[:i]) for i in range(len(stages) + 1)]
    meshes = [
        ProcessDevices(stage.step.graph.mesh, first_rank=first)
        for stage, first in zip(stages, firsts, strict=False)
    ]
    number = next(i for i, mesh in enumerate(meshes) if mesh.coordinates)
    with torch.no_grad():
        own = _RankOfStage(stages[number], meshes[number])
        return _run(own, number, firsts, micro_batches)


def _run(
    own: _RankOfStage,
    number: int,
    firsts: Sequence[int],
    micro_batches: Sequence[tuple[Any, Any]],
) -> tuple[float, Tensors]:
    segment, stage = own.segment, own.captured.stage
    parameters: Mapping[str, torch.Tensor] = dict(stage.job.module.named_parameters())
    kept: list[Tensors] = []
    batch = [[tree_leaves(part)[i] for i in segment.leaves] for part in micro_batches]
    for leaves in batch:
        received = {name: own_tensor(stage, name) for name in segment.used}
        for tensor in received.values():
            dist.recv(tensor, firsts[number - 1])
        kept.append(received)
        if not own.is_last:
            sent = own.forward(received, leaves)
            _send(sent.values(), number, firsts)
    losses = 0.0
    for received, leaves in zip(kept, batch, strict=True):
        gradients = (
            [] if own.is_last else _gradients(stage, len(segment.leaves), firsts[number + 1])
        )
        loss, back = own.backward(received, leaves, gradients)
        losses += float(loss) if own.is_last else 0.0
        is_first_rank = dist.get_rank() == firsts[number]
        for name in segment.used:
            if f"{RECEIVED}{name}" in parameters and is_first_rank:
                for rank in range(firsts[number - 1], firsts[number]):
                    dist.send(back[name].contiguous(), rank)
    count = len(micro_batches)
    return losses / count, own.whole_gradients(1 / count)


def own_tensor(stage: StageJob, name: str) -> torch.Tensor:
    """An empty tensor for what a stage receives under a name."""
    example: torch.Tensor = getattr(stage.job.module, f"{RECEIVED}{name}")
    return torch.empty_like(example.detach())


def _send(tensors: Any, number: int, firsts: Sequence[int]) -> None:
    """Send whole tensors to all ranks of the next stage, if this is the first rank of its own."""
    if dist.get_rank() != firsts[number]:
        return
    for tensor in tensors:
        for rank in range(firsts[number + 1], firsts[number + 2]):
            dist.send(tensor.contiguous(), rank)


def _gradients(stage: StageJob, leaves: int, source: int) -> list[torch.Tensor]:
    """Receive the gradients of the sent tensors; those without a gradient are zero."""
    found = []
    for tensor in list(stage.job.inputs)[leaves:]:
        received = torch.zeros_like(tensor)
        if tensor.is_floating_point():
            dist.recv(received, source)
        found.append(received)
    return found
