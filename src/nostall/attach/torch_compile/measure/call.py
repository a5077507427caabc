"""A recorded call of a graph, by which versions of the graph can be run and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class AccuracyError(Exception):
    """The candidate does not compute what the baseline computes."""


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

    @property
    def sizes(self) -> str:
        """The shapes of the tensors that are no parameters, each once, and the numbers."""
        given = [x for x in self.args if not isinstance(x, torch.nn.Parameter)]
        shapes = ["x".join(map(str, x.shape)) if isinstance(x, Tensor) else str(x) for x in given]
        return ", ".join(dict.fromkeys(shapes))

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

        Mutated arguments are copied, the others share the user's memory. Those of them that have a
        gradient are no leaves: PyTorch refuses to change a leaf in place.
        """
        args = []
        for index, value in enumerate(self.args):
            if isinstance(value, Tensor):
                leaf = value.detach()
                if index in self.mutated:
                    leaf = clone_with_strides(leaf)
                value = leaf.requires_grad_(value.requires_grad) if self.grad else leaf
                if index in self.mutated and value.requires_grad:
                    value = with_history(value)
            args.append(value)
        return args

    @property
    def device(self) -> torch.device:
        """The device of the first tensor on a GPU; the CPU if there is none."""
        devices = (x.device for x in self.args if isinstance(x, Tensor))
        return next((x for x in devices if x.type != "cpu"), torch.device("cpu"))

    @property
    def keeps_history(self) -> bool:
        """Whether a run leaves its history in an argument, so that the next one needs others."""
        values = (self.args[index] for index in self.mutated)
        return self.grad and any(isinstance(x, Tensor) and x.requires_grad for x in values)


def with_history(leaf: Tensor) -> Tensor:
    """A copy of a leaf with its strides and gradient, which may be changed in place."""
    copy = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return copy.copy_(leaf)


def clone_with_strides(value: Tensor) -> Tensor:
    """A copy with the same strides, padded ones included, without a gradient.

    ``Tensor.clone`` removes padding, and compiled graphs check the strides of their arguments.
    Elements that share memory still do so.
    """
    value = value.detach()
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        return value.clone()
    if (copy := torch.empty_like(value)).stride() != value.stride():
        # Memory between the elements is not copied: a column of a cache reads no other columns.
        copy = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    distinct_elements(copy).copy_(distinct_elements(value))
    return copy


def distinct_elements(value: Tensor) -> Tensor:
    """A view of the same memory that has each element once, so that it can be written.

    An expanded axis has size 1.  If elements overlap in another way, as those of ``unfold`` may,
    the view has one axis over all the memory from the first element to the last.
    """
    value = value.detach()
    if not value.numel():
        return value
    shape = [
        size if stride else 1 for size, stride in zip(value.shape, value.stride(), strict=True)
    ]
    once = value.as_strided(shape, value.stride())
    extent = 1  # elements from the first to the last, over the axes so far
    for stride, size in sorted(zip(value.stride(), shape, strict=True)):
        if size > 1 and stride < extent:
            break
        extent += (size - 1) * stride
    else:
        return once
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(shape, value.stride(), strict=True)
    )
    return value.as_strided((extent,), (1,))


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
