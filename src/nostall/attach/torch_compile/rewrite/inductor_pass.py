"""What stands among Inductor's passes: stitched kernels are put in, or graphs are looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from nostall.attach.torch_compile.rewrite.kernel_selection import Selection, Stitching
from nostall.attach.torch_compile.store.kernel_store import Kept, code_version
from nostall.core import collector

Observer = Callable[[GraphModule], None]
PASS = "post_grad_custom_post_pass"

_current: ContextVar[Stitching | None] = ContextVar("stitching", default=None)


@contextlib.contextmanager
def stitching(done: Stitching) -> Iterator[None]:
    mark = _current.set(done)
    try:
        yield
    finally:
        _current.reset(mark)


@dataclass(frozen=True)
class StitchPass(CustomGraphPass):  # type: ignore[misc]
    """Puts stitched kernels into Inductor's graphs, behind its own rewriting, before its fusion.

    PyTorch 2.11 keeps its configuration for all threads: where nothing is being stitched, this pass
    must do nothing, and say so in the key of what is compiled.
    """

    selection: Selection
    before: Any = field(default=None, repr=False)
    """A pass that the user has put there; it goes first."""

    def __call__(self, graph: FxGraph) -> None:
        for one in self._before:
            one(graph)
        done = _current.get()
        if done is not None:
            collector.resume()
            # Where PyTorch's caches have the graph nobody needs what finds kernels.
            from nostall.attach.torch_compile.rewrite.rewrite import rewrite

            rewrite(graph.owning_module, Kept(), self.selection, done)

    def uuid(self) -> Any:
        """PyTorch's caches must not mix graphs of different kernels or folders."""
        known = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._before]
        if None in known:
            return None
        if _current.get() is None:
            return ["nostall", "idle", known]
        return ["nostall", code_version(), Kept().identity, *self.selection.name, known]

    @property
    def _before(self) -> list[Any]:
        if self.before is None:
            return []
        return list(self.before) if isinstance(self.before, (list, tuple)) else [self.before]


@dataclass(frozen=True)
class ObservingPass(CustomGraphPass):  # type: ignore[misc]
    """Shows Inductor's graphs to somebody and leaves them as they are."""

    observe: Observer

    def __call__(self, graph: FxGraph) -> None:
        self.observe(graph.owning_module)

    def uuid(self) -> Any:
        return "nostall observes"
