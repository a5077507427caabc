"""Custom passes of Inductor: insert stitched kernels into its graphs, or only observe them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.store.kernel_store import KernelStore, code_version
from nostall.core import garbage_collector

GraphObserver = Callable[[GraphModule], None]
PASS_OPTION = "post_grad_custom_post_pass"
"""Inductor's option for a pass that runs after its own graph passes and before its fusion."""

_result: ContextVar[RewriteResult | None] = ContextVar("rewrite_result", default=None)
"""The result of the compilation in this context; None if kernels are not to be inserted."""


@contextlib.contextmanager
def collect_result(result: RewriteResult) -> Iterator[None]:
    """Activate :class:`StitchPass` in this context and add what it does to ``result``."""
    token = _result.set(result)
    try:
        yield
    finally:
        _result.reset(token)


@dataclass(frozen=True)
class StitchPass(CustomGraphPass):  # type: ignore[misc]
    """Inserts stitched kernels after Inductor's graph passes and before its fusion.

    PyTorch 2.11 shares its configuration between threads, so other threads may run this pass.
    Outside of :func:`collect_result` it does nothing, and its cache key says so.
    """

    kernel_filter: KernelFilter
    user_pass: Any = field(default=None, repr=False)
    """The user's pass for the same option, or a list of them; it runs first."""

    def __call__(self, graph: FxGraph) -> None:
        for user_pass in self._user_passes:
            user_pass(graph)
        result = _result.get()
        if result is not None:
            garbage_collector.resume()
            if self.kernel_filter.nothing:
                return
            # Imported here, because this is not needed if the graph comes from PyTorch's caches.
            from nostall.attach.torch_compile.rewrite.rewrite import insert_all

            insert_all(graph.owning_module, KernelStore(), self.kernel_filter, result)

    def uuid(self) -> Any:
        """Part of PyTorch's cache keys: which kernels are inserted, and the store that has them."""
        keys = [x.uuid() if isinstance(x, CustomGraphPass) else None for x in self._user_passes]
        if None in keys:
            return None
        if _result.get() is None:
            return ["nostall", "idle", keys]
        version, identity = code_version(), KernelStore().identity
        return ["nostall", version, identity, *self.kernel_filter.cache_key, keys]

    @property
    def _user_passes(self) -> list[Any]:
        if self.user_pass is None:
            return []
        if isinstance(self.user_pass, (list, tuple)):
            return list(self.user_pass)
        return [self.user_pass]


@dataclass(frozen=True)
class ObservingPass(CustomGraphPass):  # type: ignore[misc]
    """Passes Inductor's graphs to a callback and does not change them."""

    observe: GraphObserver

    def __call__(self, graph: FxGraph) -> None:
        self.observe(graph.owning_module)

    def uuid(self) -> Any:
        return "nostall observes"
