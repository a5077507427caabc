"""Execution of a hybrid plan: one rank runs its part of one stage.

All forward passes run before the first backward pass (GPipe), and a stage keeps only what it
receives: its backward pass runs the forward pass again.  Ranks of a stage have consecutive numbers.
Between stages, whole tensors are sent, by the first rank of a stage to all ranks of the next, and
gradients back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
_CPU = torch.device("cpu")


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


class RankOfStage:
    """The part of this rank in one stage: its local parameters and their gradients."""

    def __init__(
        self, captured: CapturedStage, devices: ProcessDevices, device: torch.device = _CPU
    ) -> None:
        self.captured, self.devices, self.device = captured, devices, device
        self.segment = captured.stage.segment
        self.program = ShardedProgram(captured.step, captured.assignment, devices, device)
        self.is_last = self.segment.computed == ("loss",)
        module = captured.stage.job.module
        whole = {n: p for n, p in module.named_parameters() if not n.startswith(RECEIVED)}
        names = {captured.step.graph.operators[i].target for i in captured.step.graph.parameters}
        self.local = {
            name: [
                part.clone().to(device)
                for part in scatter(
                    devices, value.detach(), self.program.parameter_placements(name)
                )
            ]
            for name, value in whole.items()
            if name in names
        }
        self.buffers = {name: value.to(device) for name, value in module.named_buffers()}
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
        sent: Any = self.captured.stage.job.inputs[len(leaves) :]  # type: ignore[index]
        zeros = [torch.zeros_like(t, device=self.device) for t in sent]
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
        return [leaf.to(self.device) for leaf in tree_leaves(self.captured.stage.job.targets)]

    def _whole(self, values: Values, placements: tuple[str, ...]) -> torch.Tensor:
        whole = (REPLICATED,) * len(self.devices.mesh)
        return redistribute(self.devices, values, placements, whole)[0]


class HybridRank:
    """This rank of a hybrid plan.  A collective call: every rank creates it."""

    def __init__(
        self,
        stages: Sequence[CapturedStage],
        device: torch.device = _CPU,
        deadline: float | None = None,
    ) -> None:
        """``deadline`` is the longest wait for another rank in seconds; None is torch's default."""
        self.device = device
        self.firsts = [sum(s.devices for s in stages[:i]) for i in range(len(stages) + 1)]
        """First rank of each stage, and the number of ranks."""
        meshes = [
            ProcessDevices(stage.step.graph.mesh, deadline, first)
            for stage, first in zip(stages, self.firsts, strict=False)
        ]
        self.number = next(i for i, mesh in enumerate(meshes) if mesh.coordinates)
        with torch.no_grad():
            self.own = RankOfStage(stages[self.number], meshes[self.number], device)

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank sends the tensors of its stage."""
        return bool(dist.get_rank() == self.firsts[self.number])

    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> float:
        """Run one step; returns the sum of the losses, 0 on ranks of other stages than the last.

        The gradients, summed over micro-batches, are in ``own.gradients``.
        """
        with torch.no_grad():
            return self._step(micro_batches)

    def _step(self, micro_batches: Sequence[tuple[Any, Any]]) -> float:
        own, number, firsts = self.own, self.number, self.firsts
        segment, stage = own.segment, own.captured.stage
        parameters: Mapping[str, torch.Tensor] = dict(stage.job.module.named_parameters())
        own.gradients.clear()
        kept: list[Tensors] = []
        leaves = [tree_leaves(part) for part in micro_batches]
        batch = [[part[i].to(self.device) for i in segment.leaves] for part in leaves]
        for inputs in batch:
            received = {name: own_tensor(stage, name, self.device) for name in segment.used}
            for tensor in received.values():
                dist.recv(tensor, firsts[number - 1])
            kept.append(received)
            if not own.is_last:
                self._send(own.forward(received, inputs).values(), number + 1)
        losses = 0.0
        for received, inputs in zip(kept, batch, strict=True):
            gradients = [] if own.is_last else self._gradients(stage, len(segment.leaves))
            loss, back = own.backward(received, inputs, gradients)
            losses += float(loss) if own.is_last else 0.0
            names = [name for name in segment.used if f"{RECEIVED}{name}" in parameters]
            self._send([back[name] for name in names], number - 1)
        return losses

    def _send(self, tensors: Iterable[torch.Tensor], stage: int) -> None:
        """Send whole tensors to all ranks of a stage, if this is the first rank of its own."""
        if not self.is_first_of_stage:
            return
        for tensor in tensors:
            for rank in range(self.firsts[stage], self.firsts[stage + 1]):
                dist.send(tensor.contiguous(), rank)

    def _gradients(self, stage: StageJob, leaves: int) -> list[torch.Tensor]:
        """Receive the gradients of the sent tensors; those without a gradient are zero."""
        found = []
        for tensor in list(stage.job.inputs)[leaves:]:
            received = torch.zeros_like(tensor, device=self.device)
            if tensor.is_floating_point():
                dist.recv(received, self.firsts[self.number + 1])
            found.append(received)
        return found


def run_hybrid(
    stages: Sequence[CapturedStage], micro_batches: Sequence[tuple[Any, Any]]
) -> tuple[float, Tensors]:
    """One step of all ranks on CPUs: the mean loss and the whole gradients of this rank's stage.

    A collective call.  The loss is that of the last stage, and 0 on other ranks.
    """
    rank, count = HybridRank(stages), len(micro_batches)
    return rank.step(micro_batches) / count, rank.own.whole_gradients(1 / count)


def own_tensor(stage: StageJob, name: str, device: torch.device = _CPU) -> torch.Tensor:
    """An empty tensor for what a stage receives under a name."""
    example: torch.Tensor = getattr(stage.job.module, f"{RECEIVED}{name}")
    return torch.empty_like(example.detach(), device=device)
