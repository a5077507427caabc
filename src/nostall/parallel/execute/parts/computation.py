"""The types of a computation: the job with the weights that are trained, and the job as traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from nostall.parallel.errors import BadPlan
from nostall.parallel.module.job import Job

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, eq=False)
class Computation:
    """A job, and the same job in the types in which it computes."""

    job: Job
    """Its module has the weights."""
    traced: Job
    """Its module has tensors of the right shapes and types; values count only if it is ``job``."""
    cast: Callable[[Any], Any] = lambda inputs: inputs
    """Converts the inputs of a batch."""


def in_types_of(job: Job, policy: MixedPrecisionPolicy | None) -> Computation:
    """The job under FSDP2's policy; the floating-point weights of its module become float32.

    Raises :class:`BadPlan` for a type in which gradients cannot be summed.
    """
    if policy is None or policy.param_dtype is None:
        return Computation(job, job)
    dtype = policy.param_dtype
    if policy.reduce_dtype not in (None, dtype, torch.float32):
        raise BadPlan(
            f"gradients cannot be summed in {policy.reduce_dtype}; allowed as reduce_dtype are "
            f"{dtype} and torch.float32"
        )
    skeleton = _skeleton(job.module, dtype)
    float_weights(job, policy)

    def cast(values: Any, to: torch.dtype | None = dtype) -> Any:
        return tree_map(lambda leaf: _cast(leaf, to), values)

    def loss(output: Any, targets: Any) -> torch.Tensor:
        return job.loss(cast(output, policy.output_dtype), targets)

    inputs = cast(job.inputs) if policy.cast_forward_inputs else job.inputs
    traced = replace(job, module=skeleton, inputs=inputs, loss=loss)
    if policy.cast_forward_inputs:
        return Computation(job, traced, cast)
    return Computation(job, traced)


def float_weights(job: Job, policy: MixedPrecisionPolicy | None) -> None:
    """Make the floating-point weights of a job's module float32, if it computes in another type."""
    if policy is None or policy.param_dtype is None:
        return
    for parameter in job.module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()


def _skeleton(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy of a module whose floating-point parameters have a type and no values.

    Memory of parameters that nothing writes is not taken.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        own = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty(parameter.shape, dtype=own, device="cpu")
        memo[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
    return copy.deepcopy(module, memo)


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    is_real = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_real and dtype is not None else leaf
