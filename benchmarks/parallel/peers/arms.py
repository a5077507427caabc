"""Arms of ``parallel.peers``: what trains a model, eager, compiled and captured.

A step of every arm has the forward and backward pass, the reductions and AdamW, which stays outside
of CUDA graphs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.parallel.peers.models import MODELS, Experts, adamw
from nostall.parallel import Trainer, build
from nostall.parallel.errors import CaptureFailed
from nostall.parallel.execute.parts.any_plan import AnyPlan, load_any_plan
from nostall.parallel.execute.parts.captured_steps import WARM_UPS
from nostall.parallel.module import Job
from nostall.parallel.module.job import to_device
from nostall.parallel.sharding.engine_file import CANDIDATES
from nostall.parallel.sharding.program.cuda_graph import CudaGraph

Step = Callable[[], torch.Tensor]
"""Runs one training step and returns the loss, a mean over the samples of :attr:`Arms.own`."""


class Arms:
    """One trained copy of a model, whose steps run in one or more ways."""

    name: str
    is_whole_loss = False
    """Whether a step returns the loss of the whole batch."""

    def compile(self) -> None:
        raise NotImplementedError

    def step(self) -> torch.Tensor:
        raise NotImplementedError

    def captured(self) -> Step:
        """A step that replays a CUDA graph; raises :class:`CaptureFailed`."""
        raise NotImplementedError

    def close(self) -> None:
        """Destroy the graphs."""


class Peer(Arms):
    """One of PyTorch's engines; all of its steps run on one stream, as captured DDP needs."""

    def __init__(self, model: str, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.job = fresh_job(model, device)
        self.module: nn.Module = self.job.module
        self.inputs, self.targets = self._own_samples()
        self._loss: Any = self.job.loss
        self._graphs: list[CudaGraph[torch.Tensor]] = []
        with self._on_stream():
            self._parallelize()
        self.optimizer = adamw(self.module.parameters())

    def _own_samples(self) -> tuple[torch.Tensor, torch.Tensor]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        (inputs,) = self.job.inputs
        return inputs.chunk(ranks)[rank].clone(), self.job.targets.chunk(ranks)[rank].clone()

    def _parallelize(self) -> None:
        raise NotImplementedError

    def compile(self) -> None:
        """The blocks and the loss, as torchtitan does."""
        for layer in self.job.module.layers:  # type: ignore[union-attr]
            layer.compile()
        self._loss = torch.compile(self.job.loss)

    def passes(self) -> torch.Tensor:
        """Forward and backward pass; the gradients are new."""
        for parameter in self.module.parameters():
            parameter.grad = None
        with self._context():
            loss = self._loss(self.module(self.inputs), self.targets)
            loss.backward()
        loss = loss.detach()
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def _context(self) -> Any:
        return nullcontext()

    def step(self) -> torch.Tensor:
        with self._on_stream():
            loss = self.passes()
            self.optimizer.step()
        return loss

    def update(self) -> torch.Tensor:
        """The optimiser's step with the gradients that are there."""
        with self._on_stream():
            self.optimizer.step()
        return torch.zeros(())

    def captured(self) -> Step:
        if self.stream is None:
            raise CaptureFailed("a CUDA graph needs a GPU")
        with self._on_stream():
            for _ in range(WARM_UPS):
                self.passes()
        graph = CudaGraph.capture(self.passes, warm_ups=0, stream=self.stream)
        self._graphs.append(graph)
        own = [p for p in self.module.parameters() if p.grad is not None]
        gradients = [p.grad for p in own]

        def step() -> torch.Tensor:
            with self._on_stream():
                loss = graph()
                for parameter, gradient in zip(own, gradients, strict=True):
                    parameter.grad = gradient
                self.optimizer.step()
            assert loss is not None
            return loss

        return step

    def close(self) -> None:
        for graph in self._graphs:
            graph.close()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        main = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            yield
        main.wait_stream(self.stream)


class Ddp(Peer):
    """DistributedDataParallel; compiled as a whole, which its own optimizer cuts at buckets."""

    name = "ddp"
    reduces = True

    def _parallelize(self) -> None:
        self.module = nn.parallel.DistributedDataParallel(
            self.job.module, gradient_as_bucket_view=True
        )

    def compile(self) -> None:
        self.job.module.compile()
        self._loss = torch.compile(self.job.loss)

    def without_reductions(self) -> Step:
        """A captured step without reductions: its time if all communication were hidden."""
        self.reduces = False
        step = self.captured()
        self.reduces = True
        return step

    def _context(self) -> Any:
        return nullcontext() if self.reduces else self.module.no_sync()


class Fsdp2(Peer):
    """``fully_shard`` of each layer, which keeps gathered parameters until the backward pass."""

    name = "fsdp2"

    def _parallelize(self) -> None:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for part in (*self.job.module.layers, self.job.module):  # type: ignore[misc]
            fully_shard(part, mesh=mesh, reshard_after_forward=False)


class TensorParallel(Peer):
    """``parallelize_module``: columns, then rows; cross-entropy on classes that are sharded."""

    name = "tp"

    def _own_samples(self) -> tuple[torch.Tensor, torch.Tensor]:
        (inputs,) = self.job.inputs
        return inputs, self.job.targets

    def _parallelize(self) -> None:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        plan: dict[str, Any] = {"lm_head": ColwiseParallel(use_local_output=False)}
        if hasattr(self.job.module, "embed_tokens"):
            plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        for name, part in self.job.module.named_modules():
            if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                plan[name] = ColwiseParallel()
            elif name.rpartition(".")[2] in ("o_proj", "down_proj"):
                plan[name] = RowwiseParallel()
            elif isinstance(part, Experts):
                _shard_experts(part, mesh)
        parallelize_module(self.job.module, mesh, plan)

    def compile(self) -> None:
        for layer in self.job.module.layers:  # type: ignore[union-attr]
            layer.compile()

    def _context(self) -> Any:
        return loss_parallel()


def _shard_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Columns of the first product of each expert, and rows of the second."""

    def cut(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, dim in (("up", 2), ("down", 1)):
            own = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(dim)])
            module.register_parameter(name, nn.Parameter(own))

    def given(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

    def returned(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        assert output.placements == (Partial(),), output.placements
        return output.redistribute(placements=[Replicate()]).to_local()

    distribute_module(experts, mesh, cut, given, returned)


class Plan(Arms):
    """A plan of nostall through its trainer."""

    is_whole_loss = True

    def __init__(
        self, name: str, plan: AnyPlan, model: str, device: torch.device, *, on_cpu: bool = False
    ) -> None:
        """``on_cpu`` gives the trainer a job on the CPU, with the same values."""
        self.name = name
        job = fresh_job(model, device)
        if on_cpu:
            inputs, targets = to_device((job.inputs, job.targets), torch.device("cpu"))
            job = replace(job, module=job.module.cpu(), inputs=inputs, targets=targets)
            device = torch.device("cpu")
        self.trainer: Trainer = build(plan, job)
        (inputs,) = job.inputs
        own = torch.tensor(self.trainer.own_samples(), device=device)
        self._batch = (inputs[own].clone(), job.targets[own].clone())
        self._launched = self.trainer._steps

    def compile(self) -> None:
        self.trainer.compile()

    def step(self) -> torch.Tensor:
        """Operators are launched one by one."""
        captured, self.trainer._steps = self.trainer._steps, self._launched
        loss = self.trainer.step(self._batch)
        self.trainer._steps = captured
        return loss

    def captured(self) -> Step:
        self.trainer.capture()
        self.trainer.forward_backward(self._batch)
        self.trainer.zero_grad()
        if not self.trainer._steps.is_captured:  # type: ignore[union-attr]
            raise CaptureFailed("; ".join(self.trainer.notes))
        return lambda: self.trainer.step(self._batch)

    def close(self) -> None:
        self.trainer.close()


def fresh_job(model: str, device: torch.device) -> Job:
    """The model with the same values in every copy and on every rank."""
    torch.manual_seed(0)
    with device:
        return MODELS[model]()


def candidate(path: Path, engine: str) -> AnyPlan:
    """The candidate of an engine in a plan file; raises LookupError if it lists none."""
    listed = json.loads(path.read_text()).get(CANDIDATES) or ()
    document = next((own for own in listed if own["planner"] == engine), None)
    if document is None:
        raise LookupError(f"the plan file lists no candidate {engine}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        file.write_text(json.dumps(document))
        return load_any_plan(file)
