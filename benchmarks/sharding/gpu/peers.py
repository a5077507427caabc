"""Peers of sharding plans: PyTorch's DDP and FSDP2, and tensor parallelism written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.sharding.gpu.models import GpuModel, cross_entropy

Step = Callable[[], torch.Tensor]
"""Runs the forward and backward pass of one step and returns the local loss."""


def peers(gpus: int) -> dict[str, Callable[[GpuModel, str], Step]]:
    """Functions that parallelize a model in place, by name; the second argument is the device."""
    found: dict[str, Callable[[GpuModel, str], Step]] = {
        "DDP": _ddp,
        "FSDP2": lambda model, device: _fsdp(model, device, gathers_again=True),
        "FSDP2 without resharding": lambda model, device: _fsdp(model, device, gathers_again=False),
        "tensor parallel": lambda model, device: _tensor_parallel(
            model, init_device_mesh(device, (gpus,))
        ),
    }
    if gpus >= 4:
        found["FSDP2 x tensor parallel"] = lambda model, device: _two_dimensions(
            model, init_device_mesh(device, (2, gpus // 2), mesh_dim_names=("data", "model"))
        )
    return found


def _own_samples(model: GpuModel, rank: int, ranks: int) -> GpuModel:
    """The model with this rank's part of the batch."""
    inputs, targets = (t.chunk(ranks)[rank].clone() for t in (model.inputs, model.targets))
    return GpuModel(model.module, inputs, targets)


def _step(module: nn.Module, model: GpuModel, context: Any = nullcontext) -> Step:
    def run() -> torch.Tensor:
        with context():
            loss = cross_entropy(module(model.inputs), model.targets)
            loss.backward()
        for parameter in module.parameters():
            parameter.grad = None
        return loss.detach()

    return run


def _ddp(model: GpuModel, device: str) -> Step:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = _own_samples(model, rank, ranks)
    module = nn.parallel.DistributedDataParallel(model.module, gradient_as_bucket_view=True)
    return _step(module, own)


def _fsdp(model: GpuModel, device: str, *, gathers_again: bool) -> Step:
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    _shard_layers(model.module, mesh, gathers_again)
    return _step(model.module, _own_samples(model, mesh.get_rank(), mesh.size()))


def _shard_layers(module: Any, mesh: DeviceMesh, gathers_again: bool) -> None:
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=gathers_again)
    fully_shard(module, mesh=mesh, reshard_after_forward=gathers_again)


def _tensor_parallel(model: GpuModel, mesh: DeviceMesh) -> Step:
    _parallelize(model.module, mesh)
    return _step(model.module, model, _sharded_loss)


@contextmanager
def _sharded_loss() -> Iterator[None]:
    """Cross-entropy on logits that are sharded by classes."""
    with loss_parallel():
        yield


def _parallelize(module: Any, mesh: DeviceMesh) -> None:
    """Megatron's tensor parallelism: columns, then rows; the loss on sharded logits."""
    plan: dict[str, Any] = {"lm_head": ColwiseParallel(use_local_output=False)}
    if hasattr(module, "embed_tokens"):
        plan["embed_tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Replicate()
        )
    for name, _ in module.named_modules():
        last = name.rpartition(".")[2]
        if last in ("q_proj", "k_proj", "v_proj", "up_proj"):
            plan[name] = ColwiseParallel()
        elif last in ("o_proj", "down_proj"):
            plan[name] = RowwiseParallel()
    parallelize_module(module, mesh, plan)


def _two_dimensions(model: GpuModel, mesh: DeviceMesh) -> Step:
    _parallelize(model.module, mesh["model"])
    _shard_layers(model.module, mesh["data"], gathers_again=True)
    own = _own_samples(model, mesh["data"].get_local_rank(), mesh["data"].size())
    return _step(model.module, own, _sharded_loss)
