"""Boundaries of training steps: whether a backward pass is still pending.

Versions of a graph are compared and exchanged only between steps.  Then no backward pass holds
memory, and none still needs the version of its forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Action = Callable[[], None]
MOST_UNUSED = 16
"""Results in a row without a backward pass behind which none is expected: a program may call models
with gradients on and keep a result, but never run a backward pass."""
COMPILED_NODE = "CompiledFunctionBackward"
"""Class name of the autograd node of a function that AOTAutograd compiled."""


class TrainingSteps:
    """Pending graphs and backward passes of this process.

    A call of a graph costs nothing here if no graph is pending and no action waits.
    """

    def __init__(self) -> None:
        self.pending: weakref.WeakSet[Any] = weakref.WeakSet()
        """Graphs whose version is not selected yet and that are still called."""
        self.actions: list[Action] = []
        """Actions that wait for the end of the current step."""
        self._backward_passes: set[int] = set()
        self._count = 0
        # Results since the last backward pass.
        self._unused = 0

    @property
    def is_active(self) -> bool:
        """Whether calls of graphs have to be tracked."""
        return bool(self.actions) or len(self.pending) > 0

    @property
    def between_steps(self) -> bool:
        """Whether no backward pass is pending and no CUDA graph is being captured."""
        is_pending = bool(self._backward_passes) and self._unused < MOST_UNUSED
        return not is_pending and not is_capturing()

    def leave(self, graph: Any) -> None:
        """Note that a graph's version is selected.

        Graphs that were called only once leave, too, until their next call: Dynamo may have
        compiled their function again for another guard.
        """
        idle = [other for other in self.pending if other.report.calls == 1]
        self.pending.difference_update([graph, *idle])

    def track_backward(self, result: Any, on_retained: Action | None = None) -> None:
        """Track the backward passes of a call's result until they ran or cannot run any more.

        ``on_retained`` is called if a backward pass ran with ``retain_graph``.
        """
        nodes = _backward_nodes(result)
        self._unused += bool(nodes)
        for node in nodes:
            self._count += 1
            number = self._count
            self._backward_passes.add(number)
            hook = _BackwardHook(self, number, on_retained)
            node.register_hook(hook)
            # The node owns the hook, so the hook is freed when the backward pass cannot run again.
            weakref.finalize(hook, self._backward_passes.discard, number)

    def end_backward(self, number: int) -> None:
        """Note that a backward pass, by its number, has run."""
        self._backward_passes.discard(number)
        self._unused = 0

    def run_between_steps(self, action: Action) -> None:
        """Run an action at the next call that begins between two steps."""
        self.actions.append(action)

    def run_actions(self) -> None:
        """Run the waiting actions, as long as no step is in progress."""
        while self.actions and self.between_steps:
            self.actions.pop(0)()


class _BackwardHook:
    """A hook that runs after a backward pass and marks it as done."""

    def __init__(self, steps: TrainingSteps, number: int, on_retained: Action | None) -> None:
        self._steps, self._number, self._on_retained = steps, number, on_retained

    def __call__(self, *_: Any) -> None:
        self._steps.end_backward(self._number)
        if self._on_retained is None:
            return
        if torch._C._autograd._get_current_graph_task_keep_graph():
            self._on_retained()


def is_capturing() -> bool:
    """Whether the user captures a CUDA graph on the current stream."""
    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def _backward_nodes(result: Any) -> list[Any]:
    """The autograd nodes of a result's backward passes.

    Values that a compiled function computed have AOTAutograd's node.  Outputs that are views of an
    input have another node, which is unrelated to this backward pass and can outlive it.
    """
    values = result if isinstance(result, (tuple, list)) else (result,)
    candidates = (x.grad_fn for x in values if isinstance(x, Tensor) and x.requires_grad)
    nodes = list(dict.fromkeys(node for node in candidates if node is not None))
    compiled = [node for node in nodes if type(node).__name__ == COMPILED_NODE]
    return compiled or nodes


STEPS = TrainingSteps()
