"""One rank's part of a plan that PyTorch's DDP, FSDP2 or tensor parallelism runs."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nostall.parallel.errors import BadModel, BadPlan
from nostall.parallel.execute.parts.part import (
    KeptGradients,
    Part,
    PartOptions,
    TrainingModes,
)
from nostall.parallel.execute.parts.tensor_parallel import (
    loss_context,
    parallelize,
    place_gradients,
)
from nostall.parallel.module.compilation import failure
from nostall.parallel.module.effects import random_operators
from nostall.parallel.module.job import Job
from nostall.parallel.module.precision import coarsest, computed_dtypes
from nostall.parallel.module.wrapping import wrapped_blocks
from nostall.parallel.sharding.capture.joint import JointGraph, trace_step
from nostall.parallel.sharding.engine_file import EngineFile
from nostall.parallel.slices import OwnSamples, split_evenly

_TRACED_SAMPLES = 2
_UNKNOWN = "operators of a module that cannot be traced"


class EnginePart(Part):
    """See :class:`~.part.Part`; every rank runs the module on its share of a batch, or with tensor
    parallelism its share of the module on all of a batch.

    The module need not be traceable.  Parameters of FSDP2 and of tensor parallelism are DTensors.
    """

    def __init__(
        self, job: Job, plan: EngineFile, options: PartOptions,
        policy: MixedPrecisionPolicy | None = None,
    ) -> None:  # fmt: skip
        """Raises :class:`BadPlan` if the plan is for another module."""
        super().__init__()
        self.is_traced = False
        self._is_tensor_parallel = plan.engine == "tp"
        self.job, self.plan, self.samples, self.engine = job, plan, plan.samples, str(plan.engine)
        device, module = options.device, job.module
        joint = _traced(job)
        self.loss_dtype = joint.loss.meta["val"].dtype if joint else torch.float32
        nodes = joint.graph.nodes if joint else ()
        self.random_operators = random_operators(nodes) if joint else (_UNKNOWN,)
        self.computation_dtype = coarsest(
            computed_dtypes(nodes) if joint else {p.dtype for p in module.parameters()}
        )
        trainable = {name for name, p in module.named_parameters() if p.requires_grad}
        self.trained = frozenset(joint.gradients if joint else trainable)
        self._modes = TrainingModes(module)
        self._call: Any = module
        self._kept = KeptGradients()
        self._compiled: list[torch.nn.Module] = []
        self._loss: Any = job.loss
        self._are_logits_cut = False
        if self._is_tensor_parallel:
            self._cut(module, device, policy)
        elif plan.engine == "ddp":
            _check_policy(plan, policy)
            module.to(device)
            has_unused = self.trained != trainable or joint is None
            self._call = _ddp(module, has_unused)
            self.overwrites_gradients = True
            if has_unused:
                self.no_graph = "DDP asks all ranks in each step which parameters have gradients"
        else:
            self.is_lost_by_failed_capture = True
            if plan.reshard_after_forward:
                self.no_graph = "FSDP2 frees and gathers parameters in each step"
            self._shard(module, device, policy)
        if joint is None:
            self.no_graph = "the module cannot be traced, so what it draws and decides is unknown"
            self.note(
                "not traced: what the forward pass decides by values or keeps in buffers, a rank "
                "decides and keeps by its own samples, other than a single process would"
            )
        if plan.is_compiled:
            self.compile()
        self.parameters: Mapping[str, torch.nn.Parameter] = dict(module.named_parameters())
        is_first = dist.get_rank() == 0
        self.counted = frozenset(n for n, p in self.parameters.items() if is_first or _is_cut(p))

    def own(self, samples: int) -> OwnSamples:
        if self._is_tensor_parallel:
            return OwnSamples(((0, samples),))
        ranks = dist.get_world_size()
        if samples < ranks:
            raise BadPlan(
                f"a batch of {samples} samples for {ranks} ranks of {self.engine}; each needs one; "
                "leave the short batch out (drop_last=True)"
            )
        return OwnSamples((split_evenly(0, samples, ranks)[dist.get_rank()],))

    def step(
        self, inputs: Any, targets: Any, samples: int, *, scale: float = 1.0, reduce: bool = True
    ) -> torch.Tensor:
        is_ddp, is_fsdp2 = self.plan.engine == "ddp", self.plan.engine == "fsdp2"
        if is_fsdp2:
            self._call.set_requires_gradient_sync(reduce)
        else:
            self._kept.restore(self.parameters)
        # The engines of parts of a batch average over ranks, and gradients of parts are summed.
        factor = 1 if self._is_tensor_parallel else dist.get_world_size()
        # DDP decides in the forward pass whether the backward pass reduces.
        with (
            nullcontext() if reduce or not is_ddp else self._call.no_sync(),
            loss_context(self._are_logits_cut),
        ):
            loss = self._forward(inputs, targets) * self._weight(samples)
            (loss * (scale * factor)).backward()
        if self._is_tensor_parallel:
            place_gradients(self.parameters.values())
        if not (is_fsdp2 or reduce):
            self._kept.keep(self.parameters)
        return self._counted_loss(loss.detach())

    def compile(self) -> None:
        """The whole module, or each block of FSDP2 and of tensor parallelism; and the loss."""
        parts = dict(self.job.module.named_modules())
        blocks = wrapped_blocks(self.job.module) if self._is_tensor_parallel else self.plan.wrap
        self._compiled = [parts[name] for name in blocks] or [self.job.module]
        for part in self._compiled:
            part.compile()
        if not self._are_logits_cut:
            self._loss = torch.compile(self.job.loss)

    def _forward(self, inputs: Any, targets: Any) -> torch.Tensor:
        try:
            return self._run(inputs, targets, self._call)
        except torch._dynamo.exc.TorchDynamoException as error:
            if not self._compiled:
                raise
            reason = failure(error)
            if self.plan.engine == "fsdp2":  # its groups are in the middle of a pass
                raise BadPlan(f"FSDP2's groups are {reason}; leave --compile out") from error
            self.note(reason)
            for part in self._compiled:
                part._compiled_call_impl = None
            self._compiled, self._loss = [], self.job.loss
            return self._run(inputs, targets, self._call)

    def _run(self, inputs: Any, targets: Any, call: Any) -> torch.Tensor:
        output = call(**inputs) if isinstance(inputs, Mapping) else call(*inputs)
        loss: torch.Tensor = self._loss(output, targets)
        return loss

    def drop_kept(self) -> None:
        """Raises :class:`BadModel` for FSDP2, which has no way to drop them."""
        if self.plan.engine == "fsdp2":
            raise BadModel(
                "FSDP2 keeps the gradients of passes with reduce=False inside, where they cannot "
                "be dropped; make a pass with reduce=True, then call zero_grad()"
            )
        self._kept.drop()

    def evaluate(
        self, inputs: Any, targets: Any, samples: int, *, is_training: bool
    ) -> torch.Tensor:
        call = self.job.module if self.plan.engine == "ddp" else self._call
        with (
            torch.no_grad(),
            self._modes.set(is_training=is_training),
            loss_context(self._are_logits_cut),
        ):
            loss = self._counted_loss(self._run(inputs, targets, call) * self._weight(samples))
        # Without a backward pass, FSDP2 may keep what it gathered beyond a step of the optimiser.
        for part in self.job.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        return loss

    def whole_gradients(self) -> Mapping[str, torch.Tensor | None]:
        return {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in self.parameters.items()
        }

    def close(self) -> None:
        """Nothing: the engines use the default process group."""

    def _weight(self, samples: int) -> float:
        """Weight of the rank's own mean in the loss."""
        if self._is_tensor_parallel:
            return 1.0
        return len(self.own(samples)) / samples if self.job.reduction == "mean" else 1.0

    def _counted_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The rank's part of the loss; with tensor parallelism, rank 0 has all of it."""
        loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss).double()
        is_counted = not self._is_tensor_parallel or dist.get_rank() == 0
        return loss if is_counted else torch.zeros_like(loss)

    def prepare_capture(self, stream: torch.cuda.Stream | None) -> None:
        """DDP anew on the stream of the capture: its nodes that add gradients stay on one stream.

        A collective call.
        """
        if self.plan.engine != "ddp":
            return
        has_unused = self._call.find_unused_parameters
        self._call = None
        gc.collect()  # the nodes live as long as the former DDP, which refers to itself
        with torch.cuda.stream(stream):
            self._call = _ddp(self.job.module, has_unused)

    def changed_buffers(self) -> Sequence[torch.Tensor]:
        return list(self.job.module.buffers())

    def _cut(
        self, module: torch.nn.Module, device: torch.device, policy: MixedPrecisionPolicy | None
    ) -> None:
        """Tensor parallelism; raises :class:`BadModel` for a step that draws random numbers."""
        _check_policy(self.plan, policy)
        if self.random_operators:
            raise BadModel(
                f"the step draws random numbers ({', '.join(self.random_operators[:3])}), and "
                "ranks of tensor parallelism would draw others; set the dropout to 0, or plan "
                "with ddp"
            )
        module.to(device)
        self._are_logits_cut = parallelize(self.job, self.plan.styles, device)
        if "classes" in self.plan.styles.values() and not self._are_logits_cut:
            self.note("the head is whole: the loss takes no logits that are cut by classes")

    def _shard(
        self, module: torch.nn.Module, device: torch.device, policy: MixedPrecisionPolicy | None
    ) -> None:
        parts = dict(module.named_modules())
        mesh = DeviceMesh(device.type, torch.arange(dist.get_world_size()))
        for name in self.plan.wrap:
            if name not in parts:
                raise BadPlan(
                    f"the plan wraps {name}, which the module does not have; plan again from "
                    f"{self.plan.module}"
                )
        if scalar := next((n for n, p in module.named_parameters() if p.dim() == 0), ""):
            raise BadPlan(
                f"FSDP2 shards no scalar, and {scalar} is one; give it one dimension "
                "(torch.ones(1)), or plan with ddp"
            )
        seen: set[int] = set()
        for part in (*(parts[name] for name in self.plan.wrap), module):
            own = [p for p in part.parameters() if id(p) not in seen]
            seen.update(map(id, own))
            if len(types := sorted({str(p.dtype) for p in own if p.requires_grad})) > 1:
                raise BadPlan(
                    f"FSDP2 needs one type in each group of trained parameters, and one has "
                    f"{', '.join(types)}; convert them, or plan with ddp"
                )
        # The root must stay a submodule call: its hooks run in __call__.
        for part in (*(parts[name] for name in self.plan.wrap), module):
            fully_shard(
                part,
                mesh=mesh,
                mp_policy=policy or MixedPrecisionPolicy(),
                reshard_after_forward=self.plan.reshard_after_forward,
            )


def _ddp(module: torch.nn.Module, has_unused: bool) -> DistributedDataParallel:
    """DDP; gradients that are views of its buckets save a copy of each."""
    return DistributedDataParallel(
        module, find_unused_parameters=has_unused, gradient_as_bucket_view=True
    )


def _traced(job: Job) -> JointGraph | None:
    """The step of a few samples; None if it cannot be traced, which the engines do not need."""
    try:
        return trace_step(job, _TRACED_SAMPLES)
    except BadModel:
        return None


def _is_cut(parameter: torch.nn.Parameter) -> bool:
    """Whether ranks have different values of a parameter."""
    return isinstance(parameter, DTensor) and not all(
        p.is_replicate() for p in parameter.placements
    )


def _check_policy(plan: EngineFile, policy: MixedPrecisionPolicy | None) -> None:
    if policy is not None and policy.param_dtype is not None:
        raise BadPlan(
            f"{plan.engine} computes in the types of the module's weights; leave precision out, "
            "use autocast in the forward pass, or plan with --planner fsdp2"
        )
