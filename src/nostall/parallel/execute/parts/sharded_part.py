"""One rank's part of a sharding plan: local parameters, and the program of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from nostall.parallel.errors import BadPlan
from nostall.parallel.execute.parts.computation import Computation
from nostall.parallel.execute.parts.part import (
    Part,
    PartOptions,
    RankMesh,
    TrainingModes,
)
from nostall.parallel.module.effects import random_operators
from nostall.parallel.module.precision import coarsest, computed_dtypes
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.placements import (
    COLLECTIVES,
    REPLICATED,
    Placements,
    is_sharded,
)
from nostall.parallel.sharding.plan_file import PlanFile
from nostall.parallel.sharding.program.devices import (
    ProcessDevices,
    Values,
    placed_leaves,
    redistribute,
)
from nostall.parallel.sharding.program.program import KeptSums, ShardedProgram
from nostall.parallel.slices import OwnSamples

EVAL_DIFFERS = (
    "the module in eval mode has another step than the plan was made for (dropout has, and layers "
    "that look at their mode); evaluate it in training mode, or in a process of its own from a "
    "checkpoint"
)


class ShardedPart(Part):
    """See :class:`~.part.Part`; rank r is device r of the plan's mesh."""

    engine: str = "sharded"

    def __init__(self, computation: Computation, plan: PlanFile, options: PartOptions) -> None:
        """Raises :class:`BadPlan` if the plan was made for another module, or if an operator of the
        step has no kernel on the device."""
        super().__init__()
        job, device = computation.job, options.device
        self._is_compiled = False
        self.computation, self.plan, self.device = computation, plan, device
        self.samples = plan.samples
        self._modes = TrainingModes(job.module, computation.traced.module)
        self._devices = ProcessDevices(plan.mesh, options.deadline)
        self._steps: dict[int, CapturedStep] = {}
        self._programs: dict[int, ShardedProgram] = {}
        program = self._program(plan.samples)
        nodes = program.step.joint.graph.nodes
        self.loss_dtype = program.step.joint.loss.meta["val"].dtype
        self.random_operators = random_operators(nodes)
        self.computation_dtype = coarsest(computed_dtypes(nodes))
        whole = dict(job.module.named_parameters())
        self._names = tuple(whole)
        """Names of all parameters of the module, also of those that the step does not read."""
        with torch.no_grad():
            local = program.shard_parameters(whole)
        self.parameters: Mapping[str, torch.nn.Parameter] = {
            name: torch.nn.Parameter(values[0].to(device), whole[name].requires_grad)
            for name, values in local.items()
        }
        self.trained = frozenset(program.step.joint.gradients)
        self._sums = KeptSums(frozenset(self.parameters))
        self.placements: Mapping[str, Placements] = {
            name: program.parameter_placements(name) for name in self.parameters
        }
        self.meshes: tuple[RankMesh, ...] = (RankMesh(0, plan.mesh),)
        self.counted = counted_shards(self.placements, self._devices.coordinates[0])
        self._buffers = {name: b.to(device) for name, b in job.module.named_buffers()}
        self._is_same_in_eval: bool | None = None

    @property
    def has_shards(self) -> bool:
        """Whether a parameter is sharded."""
        return any(is_sharded(p) for own in self.placements.values() for p in own)

    def own(self, samples: int) -> OwnSamples:
        if not any(self.computation.job.batched_leaves):
            return OwnSamples(())
        return OwnSamples((self._program(samples).own_samples(samples),))

    def step(
        self, inputs: Any, targets: Any, samples: int, *, scale: float = 1.0, reduce: bool = True
    ) -> torch.Tensor:
        counts = self._devices.collectives
        counts.clear()
        self._sums.scale, self._sums.reduce = scale, reduce
        with torch.no_grad():
            result = self._program(samples).run(
                self._values(), self._buffers, self._leaves(inputs, targets), sums=self._sums
            )
        seen: set[int] = set()
        for name, (gradient,) in result.gradients.items():
            parameter = self.parameters[name]
            own = gradient.to(parameter.dtype)
            if own.data_ptr() in seen or 0 in own.stride():
                # Clipping and accumulation change gradients in place, and two parameters may have
                # one gradient, or all of its entries one place.
                own = own.clone(memory_format=torch.contiguous_format)
            seen.add(own.data_ptr())
            parameter.grad = own
        self.collectives = {kind: counts[kind] for kind in COLLECTIVES if counts[kind]}
        return self._on_first_rank(result.loss[0])

    def compile(self) -> None:
        self._is_compiled = True
        for program in self._programs.values():
            program.compile(self.note)

    def drop_kept(self) -> None:
        self._sums.values.clear()

    def evaluate(
        self, inputs: Any, targets: Any, samples: int, *, is_training: bool
    ) -> torch.Tensor:
        if not (is_training or self._has_same_step_in_eval()):
            raise BadPlan(EVAL_DIFFERS)
        with torch.no_grad():
            loss = self._program(samples).loss(
                self._values(), self._buffers, self._leaves(inputs, targets)
            )
        return self._on_first_rank(loss)

    def whole_gradients(self) -> Mapping[str, torch.Tensor | None]:
        """Gathered gradients of all parameters of the module; None where the step has none."""
        replicated = (REPLICATED,) * len(self._devices.mesh)
        result: dict[str, torch.Tensor | None] = dict.fromkeys(self._names)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                own = self.placements[name]
                (result[name],) = redistribute(self._devices, [parameter.grad], own, replicated)
        return result

    def close(self) -> None:
        self._devices.close()

    def _program(self, samples: int) -> ShardedProgram:
        """The program of batches of this size, with the plan's strategies."""
        if samples not in self._programs:
            step = self._captured(samples)
            assignment = self.plan.assignment(step.graph, self._short_of(samples))
            batched = self.computation.job.batched_leaves
            program = ShardedProgram(step, assignment, self._devices, self.device, batched)
            if self._is_compiled:
                program.compile(self.note)
            self._programs[samples] = program
        return self._programs[samples]

    def _captured(self, samples: int) -> CapturedStep:
        if samples not in self._steps:
            with self._modes.set(is_training=True):
                self._steps[samples] = capture(self.computation.traced, samples, self.plan.mesh)
        return self._steps[samples]

    def _short_of(self, samples: int) -> Any:
        """The graph of the plan for a batch of another size, None for one of the plan's."""
        return None if samples == self.samples else self._captured(self.samples).graph

    def _has_same_step_in_eval(self) -> bool:
        if self._is_same_in_eval is None:
            with self._modes.set(is_training=False):
                step = capture(self.computation.traced, self.samples, self.plan.mesh)
            known = self._captured(self.samples).graph
            self._is_same_in_eval = step.graph.fingerprint == known.fingerprint
        return self._is_same_in_eval

    def _values(self) -> dict[str, Values]:
        return {name: [p.detach()] for name, p in self.parameters.items()}

    def _leaves(self, inputs: Any, targets: Any) -> list[Any]:
        job = self.computation.job
        examples = tree_leaves((job.inputs, job.targets))
        return placed_leaves(tree_leaves((inputs, targets)), examples, self.device)

    def _on_first_rank(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss on rank 0, and 0 on others."""
        loss = loss.double()
        return loss if dist.get_rank() == 0 else torch.zeros_like(loss)


def counted_shards(
    placements: Mapping[str, Placements], coordinates: tuple[int, ...]
) -> frozenset[str]:
    """The parameters whose shard at these coordinates is the first of its copies in a mesh."""
    return frozenset(
        name
        for name, own in placements.items()
        if all(is_sharded(p) or at == 0 for p, at in zip(own, coordinates, strict=True))
    )
