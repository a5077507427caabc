"""A recorded call of a graph, by which versions of the graph can be run and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """Arguments and modes of a call."""

    args: tuple[Any, ...]
    # Indices of arguments that the call mutates.
    mutated: frozenset[int]
    # Whether gradients are recorded.
    grad: bool
    # Whether inference mode is on.
    inference: bool

    @classmethod
    def record(cls, args: Sequence[Any], mutated: frozenset[int]) -> Call:
        """A call with these arguments in the current modes."""
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(tuple(args), mutated, grad, inference)

    def copy(self) -> Call:
        """The call on copies of its tensors, which the user may change or free; not of parameters.

        Used if the call cannot be repeated before the end of the step.
        """

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter):
                return value
            return clone_with_strides(value).requires_grad_(value.requires_grad)

        return Call(tuple(map(copy, self.args)), self.mutated, self.grad, self.inference)

    def fresh_args(self) -> list[Any]:
        """Arguments as new autograd leaves, so that gradients do not reach the user's tensors.

        Mutated arguments are copied, the others share the user's memory.
        """
        args = []
        for index, value in enumerate(self.args):
            if isinstance(value, Tensor):
                leaf = value.detach()
                if index in self.mutated:
                    leaf = clone_with_strides(leaf)
                value = leaf.requires_grad_(value.requires_grad) if self.grad else leaf
            args.append(value)
        return args


def clone_with_strides(value: Tensor) -> Tensor:
    """A copy with the same strides, padded ones included, without a gradient.

    ``Tensor.clone`` removes padding, and compiled graphs check the strides of their arguments.
    """
    value = value.detach()
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        return value.clone()
    if not value.numel():
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    if (copy := value.clone()).stride() == value.stride():
        return copy
    pairs = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    memory = value.as_strided((extent,), (1,)).clone()
    return memory.as_strided(value.shape, value.stride(), 0)


def run_and_find_mutations(
    args: Sequence[Any], run: Callable[[], Any]
) -> tuple[Any, frozenset[int]]:
    """The result of ``run``, and the indices of the arguments that it mutated."""

    def versions() -> list[int | None]:
        tensors = (x if isinstance(x, Tensor) and not x.is_inference() else None for x in args)
        return [None if x is None else x._version for x in tensors]

    before = versions()
    result = run()
    mutated = {i for i, (a, b) in enumerate(zip(before, versions(), strict=True)) if a != b}
    # Inference tensors have no version counter, so any of them may be mutated.
    mutated |= {i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_inference()}
    return result, frozenset(mutated)
