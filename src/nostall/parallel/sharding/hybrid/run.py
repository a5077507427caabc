"""Execution of a hybrid plan: one rank runs its part of one stage.

Stages alternate forward and backward passes (1F1B).  A stage keeps only what it receives: its
backward pass runs the forward pass again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from nostall.parallel.module.model import Model
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.graph import Assignment
from nostall.parallel.sharding.hybrid.messages import (
    Direction,
    StageProcesses,
    one_forward_one_backward,
)
from nostall.parallel.sharding.hybrid.stage_job import RECEIVED, StageJob, sent_tensors, stage_job
from nostall.parallel.sharding.placements import REPLICATED
from nostall.parallel.sharding.program.devices import (
    ProcessDevices,
    Values,
    placed_leaves,
    redistribute,
    scatter,
)
from nostall.parallel.sharding.program.program import KeptSums, ShardedProgram

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
        self,
        captured: CapturedStage,
        devices: ProcessDevices,
        device: torch.device = _CPU,
        parameters: Mapping[str, torch.Tensor] | None = None,
        *,
        given_own: bool = False,
    ) -> None:
        """``parameters``: unsharded tensors by the model's names; None takes those of the job.

        With ``given_own``, the rank is given its own samples only, those of :meth:`own`.
        """
        self.captured, self.devices, self.device = captured, devices, device
        self.segment = captured.stage.segment
        self.program = ShardedProgram(
            captured.step, captured.assignment, devices, device,
            captured.stage.batched if given_own else (),
        )  # fmt: skip
        self.is_last = self.segment.computed == ("loss",)
        job, names_of_model = captured.stage.job, captured.stage.names
        whole = {
            name: value if parameters is None else parameters[names_of_model[name]]
            for name, value in job.module.named_parameters()
            if not name.startswith(RECEIVED)
        }
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
        self.buffers = {name: value.to(device) for name, value in job.module.named_buffers()}
        leaves, graph = len(self.segment.leaves), captured.step.graph
        self.sent = {} if self.is_last else sent_tensors(graph, leaves, self.segment.computed)
        """Numbers of the tensors that the stage sends, by name."""
        self.zeros = [torch.zeros_like(t, device=device) for t in list(job.inputs)[leaves:]]
        """Gradients of the sent tensors for the forward pass, which does not read them."""
        self.targets = [leaf.to(device) for leaf in tree_leaves(job.targets)]
        self.gradients: dict[str, Values] = {}
        self.sums = KeptSums(frozenset(self.local))
        """Gradients of steps without a reduction."""

    def own(self, samples: int) -> tuple[int, int]:
        """The samples of a micro-batch that the rank is given; none if the stage reads none."""
        if not any(self.captured.stage.batched):
            return 0, 0
        return self.program.own_samples(samples)

    def leaves(self, part: tuple[Any, Any]) -> list[Any]:
        """What the stage reads of a micro-batch."""
        own = [tree_leaves(part)[i] for i in self.segment.leaves]
        examples = list(self.captured.stage.job.inputs)[: len(own)]
        return placed_leaves(own, examples, self.device)

    def forward(self, received: Tensors, leaves: Sequence[Any]) -> Tensors:
        """The tensors that are sent, whole."""
        record: dict[int, Values] = {}
        self.program.run(
            {**self.local, **self._place(received)}, self._with(received),
            [*leaves, *self.zeros, *self.targets], record, frozenset(self.sent.values()),
        )  # fmt: skip
        return {
            name: self._whole(record[tensor], self.program.placements[tensor])
            for name, tensor in self.sent.items()
        }

    def backward(
        self,
        received: Tensors,
        leaves: Sequence[Any],
        gradients: Sequence[torch.Tensor],
        sums: KeptSums | None = None,
    ) -> tuple[torch.Tensor, Tensors]:
        """The loss, and the gradients of the received tensors; those of parameters are added up.

        With ``sums``, before their reduction over devices.
        """
        result = self.program.run(
            {**self.local, **self._place(received)}, self._with(received),
            [*leaves, *gradients, *self.targets], sums=sums,
        )  # fmt: skip
        back: Tensors = {}
        for name, values in result.gradients.items():
            if name.startswith(RECEIVED):
                placements = self.program.parameter_placements(name)
                back[name.removeprefix(RECEIVED)] = self._whole(values, placements)
                continue
            # Sums over micro-batches have the type of the weights.
            values = [v.to(p.dtype) for v, p in zip(values, self.local[name], strict=True)]
            known = self.gradients.get(name)
            self.gradients[name] = (
                [a + b for a, b in zip(known, values, strict=True)] if known else values
            )
        return result.loss[0], back

    def loss(self, received: Tensors, leaves: Sequence[Any]) -> torch.Tensor:
        """The loss by the forward pass of the last stage alone."""
        return self.program.loss(
            {**self.local, **self._place(received)}, self._with(received), [*leaves, *self.targets]
        )

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

    def _whole(self, values: Values, placements: tuple[str, ...]) -> torch.Tensor:
        whole = (REPLICATED,) * len(self.devices.mesh)
        return redistribute(self.devices, values, placements, whole)[0]


class HybridRank:
    """This rank of a hybrid plan: runs its stage and exchanges tensors with the neighbours."""

    def __init__(
        self,
        own: CapturedStage,
        processes: StageProcesses,
        parameters: Mapping[str, torch.Tensor] | None = None,
        *,
        given_own: bool = False,
    ) -> None:
        """``own`` is the stage of this rank; for the others see :class:`RankOfStage`."""
        self.processes, self.device = processes, processes.device
        with torch.no_grad():
            self.own = RankOfStage(
                own, processes.devices, processes.device, parameters, given_own=given_own
            )

    def step(
        self, micro_batches: Sequence[tuple[Any, Any]], weight: float = 1.0, *, reduce: bool = True
    ) -> torch.Tensor:
        """Run one step; returns the sum of the losses, 0 on ranks of other stages than the last.

        ``micro_batches`` are whole, or the rank's own samples of each, with ``given_own``.
        ``weight`` times the gradients, summed over micro-batches, are in ``own.gradients``.
        Without ``reduce`` they are not: they are kept, and reduced by the next step with it.
        """
        own = self.own
        with torch.no_grad():
            if not reduce or own.sums.values:
                own.sums.scale, own.sums.reduce = weight, False
                return self._step(micro_batches, own.sums, reduce=reduce)
            losses = self._step(micro_batches)
            if weight != 1.0:
                own.gradients = {n: [v * weight for v in vs] for n, vs in own.gradients.items()}
            return losses

    def evaluate(self, micro_batches: Sequence[tuple[Any, Any]]) -> torch.Tensor:
        """The sum of the losses as :meth:`step` gives it, by forward passes alone."""
        own, processes = self.own, self.processes
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for part in micro_batches:
                leaves = own.leaves(part)
                received = dict(zip(own.segment.used, self._receive("forward"), strict=True))
                if own.is_last:
                    losses += own.loss(received, leaves)
                else:
                    processes.send("forward", own.forward(received, leaves).values())
        processes.finish()
        return losses

    def _step(
        self,
        micro_batches: Sequence[tuple[Any, Any]],
        sums: KeptSums | None = None,
        *,
        reduce: bool = True,
    ) -> torch.Tensor:
        """``sums`` receives the gradients; with ``reduce``, the last backward pass reduces them."""
        own, processes = self.own, self.processes
        own.gradients.clear()
        batch = [own.leaves(part) for part in micro_batches]
        kept: dict[int, Tensors] = {}
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        passes = one_forward_one_backward(processes.number, processes.stages, len(batch))
        for at, (direction, number) in enumerate(passes, 1):
            received = self._receive(direction)
            if direction == "forward":
                kept[number] = dict(zip(own.segment.used, received, strict=True))
                if not own.is_last:
                    processes.send("forward", own.forward(kept[number], batch[number]).values())
                continue
            given = kept.pop(number)
            if sums is not None:
                sums.reduce = reduce and at == len(passes)
            loss, back = own.backward(given, batch[number], received, sums)
            losses += loss if own.is_last else 0.0
            processes.send("backward", [
                back[name] if name in back else torch.zeros_like(tensor)
                for name, tensor in given.items() if tensor.is_floating_point()
            ])  # fmt: skip
        processes.finish()
        return losses

    def _receive(self, direction: Direction) -> list[torch.Tensor]:
        """Receive what a pass needs: results of the stage before, or gradients.

        Sent tensors without a gradient have zeros.
        """
        own = self.own
        if direction == "forward":
            stage = own.captured.stage
            tensors = [own_tensor(stage, name, self.device) for name in own.segment.used]
            self.processes.receive(direction, tensors)
            return tensors
        tensors = [torch.empty_like(z) if z.is_floating_point() else z for z in own.zeros]
        self.processes.receive(direction, [t for t in tensors if t.is_floating_point()])
        return tensors


def own_tensor(stage: StageJob, name: str, device: torch.device = _CPU) -> torch.Tensor:
    """An empty tensor for what a stage receives under a name."""
    example: torch.Tensor = getattr(stage.job.module, f"{RECEIVED}{name}")
    return torch.empty_like(example.detach(), device=device)
