"""A call of a graph as it happened, to run it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """A call as it happened: its arguments, which of them it changed in place, and whether the
    modes that decide about gradients were on."""

    args: tuple[Any, ...]
    changed: frozenset[int]
    grad: bool
    inference: bool

    @classmethod
    def of(cls, args: Sequence[Any], changed: frozenset[int]) -> Call:
        return cls(tuple(args), changed, torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def kept(self) -> Call:
        """The same on copies of what a program is free to change or drop: all but parameters."""

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter):
                return value
            return value.detach().clone().requires_grad_(value.requires_grad)

        return Call(tuple(map(copy, self.args)), self.changed, self.grad, self.inference)

    def fresh(self) -> list[Any]:
        """Arguments that are leaves of their own, so that nothing reaches the user's gradients, and
        copies of what would be changed."""
        found = []
        for place, value in enumerate(self.args):
            if isinstance(value, Tensor):
                leaf = value.detach()
                if place in self.changed:
                    leaf = leaf.clone()
                value = leaf.requires_grad_(value.requires_grad) if self.grad else leaf
            found.append(value)
        return found


def changes(args: Sequence[Any], run: Callable[[], Any]) -> tuple[Any, frozenset[int]]:
    """The result of a call, and the places of the arguments that it changed in place."""

    def versions() -> list[int | None]:
        tensors = (x if isinstance(x, Tensor) and not x.is_inference() else None for x in args)
        return [None if x is None else x._version for x in tensors]

    before = versions()
    result = run()
    found = {at for at, (a, b) in enumerate(zip(before, versions(), strict=True)) if a != b}
    # Inference tensors do not count their changes.
    found |= {at for at, x in enumerate(args) if isinstance(x, Tensor) and x.is_inference()}
    return result, frozenset(found)
