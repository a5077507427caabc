"""Tensor parallelism by PyTorch's ``parallelize_module``, compared with the whole module once."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map

from nostall.parallel.errors import BadPlan
from nostall.parallel.module.job import Job, to_device
from nostall.parallel.sharding.engine_file import Style

SAMPLES = 2
"""Samples of the comparison."""
_STYLES: Mapping[Style, type[ParallelStyle]] = {
    "colwise": ColwiseParallel, "rowwise": RowwiseParallel,
}  # fmt: skip
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative errors of the loss and the norms of gradients by the coarsest type; 0.05 for others."""

_LEAST = 0.05
"""Share of the largest value below which differences are not relative: a gradient that is 0 but for
rounding, such as that of the bias of keys, has any other value."""


def parallelize(job: Job, styles: Mapping[str, Style], device: torch.device) -> None:
    """Cut the linear layers of a job's module over all ranks, in place; all else is on each rank.

    All parameters become DTensors.  Raises :class:`BadPlan` if a style names no linear layer, or if
    the module then computes another loss or other gradients: a fixed number of heads in a view, for
    example, fits no part of the heads.
    """
    module, parts = job.module, dict(job.module.named_modules())
    for name in styles:
        if not isinstance(parts.get(name), nn.Linear):
            raise BadPlan(
                f"the plan cuts {name}, which is no linear layer of the module; plan again from it"
            )
    expected = _loss_and_norms(job, device)
    before = {
        name: (id(p), p.requires_grad)
        for name, p in module.named_parameters(remove_duplicate=False)
    }
    mesh = DeviceMesh(device.type, torch.arange(dist.get_world_size()))
    for name, part in parts.items():
        if name not in styles:
            _replicate(part, mesh)
    parallelize_module(module, mesh, {name: _STYLES[own]() for name, own in styles.items()})
    _tie(module, before)
    try:
        found = _loss_and_norms(job, device)
    except Exception as error:  # of the user's module, which may check a width itself
        text = " ".join(str(error).split("\n", 1)[0][:200].split())
        raise BadPlan(_refusal(f"{type(error).__name__}: {text}".rstrip(": "))) from error
    tolerance = _tolerance(module)
    least = _LEAST * max((abs(v) for v in expected.values() if isfinite(v)), default=0.0)
    for name, value in expected.items():
        own = found.get(name, 0.0)
        is_close = abs(own - value) <= tolerance * max(abs(value), least)
        if not (is_close if isfinite(own) and isfinite(value) else str(own) == str(value)):
            raise BadPlan(_refusal(f"{name} is {own:.6g} and not {value:.6g}"))


def _replicate(part: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module's own parameters DTensors; a leaf then computes with these, and returns local
    tensors as before."""
    own = dict(part.named_parameters(recurse=False))
    for name, parameter in own.items():
        whole = distribute_tensor(parameter.detach(), mesh, [Replicate()])
        part.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
    if not own or any(True for _ in part.children()):
        return

    def given(_: nn.Module, inputs: Any, named: Any) -> Any:
        return tree_map(lambda leaf: _as_replica(leaf, mesh), (inputs, named))

    def returned(_: nn.Module, inputs: Any, output: Any) -> Any:
        return tree_map(_as_local, output)

    part.register_forward_pre_hook(given, with_kwargs=True)
    part.register_forward_hook(returned)


def _as_replica(leaf: Any, mesh: DeviceMesh) -> Any:
    is_local = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
    return DTensor.from_local(leaf, mesh, [Replicate()], run_check=False) if is_local else leaf


def _as_local(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def _tie(module: nn.Module, before: Mapping[str, tuple[int, bool]]) -> None:
    """Let names that had one parameter have one again, and frozen parameters be frozen: PyTorch's
    styles may make them trainable."""
    first: dict[int, nn.Parameter] = {}
    for name, (identity, is_trained) in before.items():
        holder, _, own = name.rpartition(".")
        part = module.get_submodule(holder)
        found = first.setdefault(identity, part.get_parameter(own))
        part.register_parameter(own, found.requires_grad_(is_trained))


def _loss_and_norms(job: Job, device: torch.device) -> dict[str, float]:
    """Loss of a few samples, and the norm of each gradient; every rank computes all of it."""
    with torch.enable_grad():
        loss = job.run(*to_device(job.example_batch(SAMPLES), device))
        loss.backward()
    found = {"the loss": float(_as_local(loss.detach()))}
    for name, parameter in job.module.named_parameters():
        if parameter.grad is not None:
            whole = _as_local(parameter.grad)
            found[f"the norm of the gradient of {name}"] = float(whole.double().norm())
            parameter.grad = None
    return found


def _tolerance(module: nn.Module) -> float:
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    return max((_TOLERANCES.get(dtype, 0.05) for dtype in dtypes), default=0.05)


def _refusal(found: str) -> str:
    return (
        f"tensor parallelism changes what the module computes ({found}); write its forward pass "
        "for any number of heads (view(..., -1, head)), with parameters in modules without "
        "submodules, or plan with --planner sharding"
    )
