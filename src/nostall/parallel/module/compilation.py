"""Functions compiled by Inductor, which are called as they are where they cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

if TYPE_CHECKING:
    from torch._dynamo.exc import TorchDynamoException

_FAILURES = 12
"""Compilations that may fail until what is left of a function runs as it is."""


class Compiled:
    """A function that ``torch.compile`` compiles at its first call, for fixed shapes.

    A graph that cannot be compiled is halved, again and again, until all parts but the one that
    fails are compiled: a fault of a code generator needs certain operators side by side.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        note: Callable[[str], None],
        failures: list[str] | None = None,
    ) -> None:
        """``note`` is told in one line why a part of the function is not compiled, if one is not.

        ``failures`` are those of the function that this one is a part of.
        """
        self._function, self._note = function, note
        self._failures: list[str] = [] if failures is None else failures
        self._call: Any = torch.compile(function, fullgraph=True, dynamic=False)
        self._has_backward = False

    def __call__(self, *given: Any) -> Any:
        try:
            with self._eager_backward():
                return self._call(*given)
        # By its full name: what compiles nothing does not import Dynamo.
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._call is self._function or isinstance(self._call, _Parts):
                raise
            self._failures.append(failure(error))
            halves = None
            if isinstance(self._function, GraphModule) and len(self._failures) < _FAILURES:
                halves = _halves(self._function)
            if halves is None:
                self._note(self._failures[-1])
                self._call = self._function
            else:
                first, second, passed = halves
                self._call = _Parts(
                    Compiled(first, self._note, self._failures),
                    Compiled(second, self._note, self._failures),
                    passed,
                )
            return self._call(*given)

    def _eager_backward(self) -> AbstractContextManager[Any]:
        """Compile a backward pass with its forward pass, where a failure still leaves a choice."""
        if self._has_backward or not torch.is_grad_enabled():
            return nullcontext()
        self._has_backward = True
        from torch._functorch import config  # with what compiles only

        found: AbstractContextManager[Any] = config.patch(force_non_lazy_backward_lowering=True)
        return found


class _Parts:
    """Two functions, of which the second one is also given some arguments of the first one."""

    def __init__(self, first: Compiled, second: Compiled, passed: Sequence[int]) -> None:
        self._first, self._second, self._passed = first, second, passed

    def __call__(self, *given: Any) -> Any:
        return self._second(*self._first(*given), *(given[i] for i in self._passed))


def _halves(module: GraphModule) -> tuple[GraphModule, GraphModule, list[int]] | None:
    """Two graphs that compute one after the other what one does; None for a single operation.

    The second one reads what the first one returns, then those arguments of the first one whose
    numbers are the last result.
    """
    arguments = [n for n in module.graph.nodes if n.op == "placeholder"]
    nodes = [*arguments, *(n for n in module.graph.nodes if n.op != "placeholder")]
    calls = [n for n in nodes if n.op not in ("placeholder", "get_attr", "output")]
    if len(calls) < 2:
        return None
    middle = nodes.index(calls[len(calls) // 2])
    before, after = nodes[:middle], nodes[middle:]
    inside = set(after)
    crossing = [n for n in before if inside & set(n.users)]
    computed = [n for n in crossing if n in calls]
    passed = [i for i, n in enumerate(arguments) if n in crossing]
    first, second = Graph(), Graph()
    old: dict[Node, Node] = {}
    for node in before:
        old[node] = first.node_copy(node, lambda n: old[n])
    first.output(tuple(old[n] for n in computed))
    new = {n: second.placeholder(n.name) for n in (*computed, *(arguments[i] for i in passed))}
    for node in (*(n for n in crossing if n.op == "get_attr"), *after):
        new[node] = second.node_copy(node, lambda n: new[n])
    return GraphModule(module, first), GraphModule(module, second), passed


def failure(error: TorchDynamoException) -> str:
    """One line that says that something is not compiled, and why."""
    cause = getattr(error, "inner_exception", error)
    text = (str(cause).strip().splitlines() or [""])[0][:200]
    return f"not compiled: {type(cause).__name__}: {text}"
