"""Steps of a training loop, as far as graphs can see them: is a backward pass still to come?

Versions of a graph are compared and exchanged between steps only: then no backward pass waits for
the memory, or for the version, that its forward pass had.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Action = Callable[[], None]
COMPILED = "CompiledFunctionBackward"
"""What AOTAutograd calls the node of a compiled function."""


class Steps:
    """What all graphs of a process share.

    ``undecided`` are those that still have to choose; while there are none, and nothing waits,
    a call costs nothing here.
    """

    def __init__(self) -> None:
        self.undecided: weakref.WeakSet[Any] = weakref.WeakSet()
        self.waiting: list[Action] = []
        self._pending: set[int] = set()
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether calls have to be followed at all."""
        return bool(self.waiting) or len(self.undecided) > 0

    @property
    def quiet(self) -> bool:
        """Whether no backward pass is pending and no CUDA graph is being captured."""
        return not self._pending and not capturing()

    def follow(self, result: Any, retained: Action | None = None) -> None:
        """Remember that a backward pass belongs to the result of a call, until it ran or cannot
        run any more.  ``retained`` is called where it ran with ``retain_graph``."""
        for node in _grad_fns(result):
            self._count += 1
            number = self._count
            self._pending.add(number)
            done = _Done(self._pending, number, retained)
            node.register_hook(done)
            # The node holds the hook; without the node there is no backward pass.
            weakref.finalize(done, self._pending.discard, number)

    def when_quiet(self, action: Action) -> None:
        """Do something between this step and the next."""
        self.waiting.append(action)

    def begin(self) -> None:
        """A call begins: do what waits for it, if this is between two steps."""
        while self.waiting and self.quiet:
            self.waiting.pop(0)()


class _Done:
    """A hook behind a backward pass."""

    def __init__(self, pending: set[int], number: int, retained: Action | None) -> None:
        self._pending, self._number, self._retained = pending, number, retained

    def __call__(self, *_: Any) -> None:
        self._pending.discard(self._number)
        if self._retained is not None and torch._C._autograd._get_current_graph_task_keep_graph():
            self._retained()


def capturing() -> bool:
    """Whether the user is capturing a CUDA graph on this stream."""
    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def _grad_fns(result: Any) -> list[Any]:
    """The nodes of the backward passes of a result.

    All that a compiled function computes has one.  What is a view of an input has a node of its own
    beside it, which says nothing of that backward pass and may live longer or shorter.
    """
    values = result if isinstance(result, (tuple, list)) else (result,)
    every = (x.grad_fn for x in values if isinstance(x, Tensor) and x.requires_grad)
    nodes = list(dict.fromkeys(node for node in every if node is not None))
    compiled = [node for node in nodes if type(node).__name__ == COMPILED]
    return compiled or nodes


STEPS = Steps()
