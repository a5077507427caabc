"""One rank's part of a hybrid plan: its shards of one stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.parts.computation import Computation
from nostall.parallel.execute.parts.part import (
    Part,
    PartOptions,
    RankMesh,
    TrainingModes,
)
from nostall.parallel.execute.parts.sharded_part import EVAL_DIFFERS, counted_shards
from nostall.parallel.module.job import Job
from nostall.parallel.module.model import Model
from nostall.parallel.sharding.hybrid.messages import StageProcesses
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.hybrid.run import CapturedStage, HybridRank, capture_stage
from nostall.parallel.sharding.placements import REPLICATED, Placements
from nostall.parallel.sharding.program.devices import redistribute
from nostall.parallel.slices import OwnSamples


class HybridPart(Part):
    """See :class:`~.part.Part`; stages have consecutive ranks."""

    engine: str = "hybrid"

    def __init__(self, computation: Computation, plan: HybridFile, options: PartOptions) -> None:
        """Raises :class:`BadPlan` if the plan was made for another module."""
        super().__init__()
        job, device = computation.job, options.device
        model = Model(computation.traced)
        if plan.stages[-1][0].end != len(model):
            raise BadPlan(
                f"the plan is for {plan.stages[-1][0].end} layers and the module has {len(model)}; "
                "plan again"
            )
        self.job, self.plan, self.device, self.samples = job, plan, device, plan.samples
        self.loss_dtype, self.computation_dtype = model.loss_dtype, model.computation_dtype
        self.random_operators, self.loss_samples = model.random_operations, plan.micro_batch
        self._traced = computation.traced
        self._modes = TrainingModes(job.module, computation.traced.module)
        stages = _captured(model, plan)
        _check_shared(stages)
        self._stages = stages
        self._processes = StageProcesses([s.devices for s in stages], device, options.deadline)
        own = stages[self._processes.number]
        weights = dict(job.module.named_parameters())
        self._rank = HybridRank(own, self._processes, weights, given_own=True)
        self._held = _held_parameters(job, stages, own)
        """The rank's parameters, also those that no stage reads."""
        names, part = own.stage.names, self._rank.own
        self.parameters: Mapping[str, torch.nn.Parameter] = {
            names[name]: torch.nn.Parameter(values[0], weights[names[name]].requires_grad)
            for name, values in part.local.items()
        }
        gradients = own.step.joint.gradients
        self.trained = frozenset(names[name] for name in part.local if name in gradients)
        self.placements: Mapping[str, Placements] = {
            names[name]: part.program.parameter_placements(name) for name in part.local
        }
        firsts = self._processes.firsts
        self.meshes: tuple[RankMesh, ...] = tuple(
            RankMesh(first, (stage.devices,)) for first, stage in zip(firsts, stages, strict=False)
        )
        self.mesh = self._processes.number
        self.counted = counted_shards(self.placements, self._processes.devices.coordinates[0])
        self._is_same_in_eval: bool | None = None

    def own(self, samples: int) -> OwnSamples:
        size = self.plan.micro_batch
        if samples % size:
            raise BadPlan(
                f"a batch of {samples} samples cannot be cut into the plan's micro-batches of "
                f"{size}; give a multiple, or leave the short batch out (drop_last=True)"
            )
        first, end = self._rank.own.own(size)
        starts = range(0, samples, size) if end > first else range(0)
        return OwnSamples(tuple((start + first, start + end) for start in starts))

    def step(
        self, inputs: Any, targets: Any, samples: int, *, scale: float = 1.0, reduce: bool = True
    ) -> torch.Tensor:
        weight, micro_batches = self._scale(samples), self._micro_batches(inputs, targets, samples)
        loss = self._rank.step(micro_batches, scale * weight, reduce=reduce) * weight
        for name, (gradient,) in self._rank.own.gradients.items():
            own = self._rank.own.captured.stage.names[name]
            self.parameters[own].grad = gradient.clone() if scale * weight == 1.0 else gradient
        return self._on_first_of_stage(loss)

    def compile(self) -> None:
        self._rank.own.program.compile(self.note)

    def drop_capture(self) -> None:
        self._processes.forget()

    def drop_kept(self) -> None:
        self._rank.own.sums.values.clear()

    def evaluate(
        self, inputs: Any, targets: Any, samples: int, *, is_training: bool
    ) -> torch.Tensor:
        if not (is_training or self._has_same_step_in_eval()):
            raise BadPlan(EVAL_DIFFERS)
        loss = self._rank.evaluate(self._micro_batches(inputs, targets, samples))
        return self._on_first_of_stage(loss * self._scale(samples))

    def whole_gradients(self) -> Mapping[str, torch.Tensor | None]:
        result: dict[str, torch.Tensor | None] = dict.fromkeys(self._held)
        devices = self._processes.devices
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                own = self.placements[name]
                whole = (REPLICATED,) * len(devices.mesh)
                (result[name],) = redistribute(devices, [parameter.grad], own, whole)
        return result

    def close(self) -> None:
        self._processes.close()

    def _micro_batches(self, inputs: Any, targets: Any, samples: int) -> list[tuple[Any, Any]]:
        """The rank's own samples of each micro-batch."""
        own, batch = self.own(samples), (inputs, targets)
        places = [own.place(m) for m in range(len(own.ranges))]
        places = places or [(0, 0)] * (samples // self.plan.micro_batch)
        return [self.job.take(batch, slice(*place)) for place in places]

    def _scale(self, samples: int) -> float:
        """Weight of a micro-batch in the loss."""
        return self.plan.micro_batch / samples if self.job.reduction == "mean" else 1.0

    def _on_first_of_stage(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss on one rank, and 0 on others."""
        return loss if self._processes.is_first_of_stage else torch.zeros_like(loss)

    def _has_same_step_in_eval(self) -> bool:
        if self._is_same_in_eval is None:
            with self._modes.set(is_training=False):
                model = Model(self._traced)
                own = _fingerprints(model, self.plan)
            self._is_same_in_eval = own == [s.step.graph.fingerprint for s in self._stages]
        return self._is_same_in_eval


def _fingerprints(model: Model, plan: HybridFile) -> list[str]:
    size = plan.micro_batch
    captured = (capture_stage(model, s.first, s.end, size, s.devices) for s, _ in plan.stages)
    return [own.step.graph.fingerprint for own in captured]


def _captured(model: Model, plan: HybridFile) -> list[CapturedStage]:
    """The stages with their strategies; every rank captures all of them."""
    stages = []
    for stage, file in plan.stages:
        found = capture_stage(model, stage.first, stage.end, plan.micro_batch, stage.devices)
        assignment = file.assignment(found.step.graph)
        stages.append(CapturedStage(found.stage, found.step, assignment))
    return stages


def _check_shared(stages: Sequence[CapturedStage]) -> None:
    """Raise :class:`BadPlan` if two stages read one parameter: each would train its own copy."""
    seen: set[str] = set()
    for own in stages:
        names = set(own.stage.names.values())
        if shared := sorted(seen & names):
            raise BadPlan(
                f"two stages of the hybrid read {shared[0]}, and their gradients would not be "
                "added; plan again for this module, which cuts no layers that share a parameter"
            )
        seen |= names


def _held_parameters(
    job: Job, stages: Sequence[CapturedStage], own: CapturedStage
) -> Sequence[str]:
    """The names of a stage's parameters, and of those that no stage reads."""
    others = {name for s in stages if s is not own for name in s.stage.names.values()}
    return [name for name, _ in job.module.named_parameters() if name not in others]
