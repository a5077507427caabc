"""A loss that a program computes outside of its modules: eager kernels read its logits many times.

``torch.nn.functional.cross_entropy`` of large tensors is compiled; calls that Dynamo traces as a
part of a module stay as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nostall.attach.program.shadow import (
    CLASSES,
    Call,
    Finding,
    check_module,
    clone,
    current_autocast,
    line_of,
)

NAME = "cross_entropy"
LEAST_ELEMENTS = 1 << 22
"""Elements of logits from which the loss is compiled: smaller ones stay in the L2 cache."""


class Losses:
    """The function in ``torch.nn.functional``, and the one in its place."""

    def __init__(self, is_outside: Callable[[], bool]) -> None:
        """``is_outside``: whether no watched module is being called."""
        self.largest = 0
        """Most elements of logits outside of modules while it was watched."""
        self.version: Callable[..., Any] | None = None
        """The function that computes the loss of large logits; None: the original one."""
        self.call: Call | None = None
        """The last call that was kept for a check."""
        self.wanted = False
        """Whether the next call is to be kept."""
        self.failure = ""
        """The first error of a version; the original runs since."""
        self.original: Callable[..., Any] | None = None
        self._is_outside = is_outside
        self._owner: Any = None
        self._placed: Any = None

    def install(self, module: Any) -> None:
        """Stand in the place of the function of ``module``, ``torch.nn.functional``."""
        if self._owner is not None:
            return
        losses, original = self, getattr(module, NAME)
        is_compiling = sys.modules["torch"].compiler.is_compiling

        @functools.wraps(original)
        def loss(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            return losses.made(args, kwargs)

        self._owner, self.original, self._placed = module, original, loss
        setattr(module, NAME, loss)

    def made(self, args: Any, kwargs: Any) -> Any:
        """The loss of one call, by the version if its logits are large."""
        assert self.original is not None
        if not args or not _is_large(args[0]):
            return self.original(*args, **kwargs)
        if self._is_outside():
            self.largest = max(self.largest, args[0].numel())
        if self.wanted:
            self._keep(args, kwargs)
        if self.version is None:
            return self.original(*args, **kwargs)
        try:
            return self.version(*args, **kwargs)
        except Exception as error:  # any error: the original decides what the program sees
            self.failure, self.version = line_of(error), None
        return self.original(*args, **kwargs)

    def _keep(self, args: Any, kwargs: Any) -> None:
        self.wanted = False
        try:
            args, kwargs = clone((args, kwargs))
        except Exception:  # such as too little memory: the check says that it saw no call
            return
        grad = sys.modules["torch"].is_grad_enabled()
        self.call = Call(args, kwargs, True, grad, current_autocast())

    def settle(self) -> None:
        """Take it out unless a version runs, which stays."""
        if self.version is not None or self._owner is None:
            return
        if getattr(self._owner, NAME) is self._placed:
            setattr(self._owner, NAME, self.original)
        self._owner = None


def _is_large(logits: Any) -> bool:
    """Not of tensors without data, with which compilers call the function while they trace it."""
    torch = sys.modules["torch"]
    return (
        type(logits) is torch.Tensor
        and logits.is_cuda
        and logits.requires_grad
        and logits.numel() >= LEAST_ELEMENTS
    )


class CompiledLoss:
    """``torch.compile`` of the loss."""

    def __init__(self, losses: Losses) -> None:
        self.losses = losses
        self._version: Callable[..., Any] | None = None

    def missing(self) -> str:
        """Why nothing would be changed; empty if something would."""
        return "" if self.losses.original is not None else f"{NAME} of PyTorch is not called"

    def check(self, calls: Mapping[int, Sequence[Call]]) -> Finding:
        call, self.losses.call = self.losses.call, None
        if call is None:
            return Finding(CLASSES[0], f"no call of {NAME} was seen that a copy could repeat")
        original = self.losses.original

        class Loss(sys.modules["torch"].nn.Module):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return original(*args, **kwargs)  # type: ignore[misc]

        finding = check_module(Loss(), [call], lambda *_: self._compiled())
        if finding.refusal:
            return finding
        return max(finding, Finding("within rounding"), key=Finding.rank)

    def _compiled(self) -> Callable[..., Any]:
        if self._version is None:
            original = self.losses.original

            def loss(*args: Any, **kwargs: Any) -> Any:  # Dynamo skips calls in PyTorch's files
                return original(*args, **kwargs)  # type: ignore[misc]

            self._version = sys.modules["torch"].compile(loss)
        version: Callable[..., Any] = self._version
        return version

    def on(self) -> None:
        self.losses.version = self._compiled()

    def off(self) -> None:
        self.losses.version = None
