"""A compilation that another process does beforehand: what goes there, and what comes back.

Its result is in PyTorch's caches.  A name in that of compiled graphs (``FxGraphCache``) says all of
what was compiled: operators, sizes, Inductor's configuration, our pass.  So who compiles the same
graph later finds it, and what was compiled for something else is found by nobody: a process in
which anything is set otherwise costs time, and nothing else.

Names in AOTAutograd's cache say what is traced, and how a process is set up as far as PyTorch
thinks of it.  Only stitched versions go there: those are compared with Inductor's before they run.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from nostall.attach.torch_compile.graph_copies import apart
from nostall.attach.torch_compile.rewrite.compilers import InductorHost
from nostall.attach.torch_compile.rewrite.kernel_selection import Selection, Stitching
from nostall.attach.torch_compile.workers.cpu_time import COMPILERS
from nostall.attach.torch_compile.workers.torch_state import Surroundings, Unsent

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device, bool]
"""Of a tensor: shape, strides, dtype, device, and whether it requires a gradient."""
ALIGNMENT = 16
"""Bytes: Inductor looks whether inputs begin at a multiple of them."""
STATIC, SOURCE = "_dynamo_static_input_type", "_dynamo_source"
"""What Dynamo writes beside a parameter, which stays where it is, and beside every input."""


_writing = threading.Lock()
"""PyTorch changes what all threads see while it writes a graph down."""


def _forked() -> None:
    """A child has none of its parent's threads, one of which may hold it."""
    global _writing
    _writing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@dataclass(frozen=True)
class Errand:
    """``module`` for inputs like ``inputs`` (a tensor's :data:`Layout`, or what is no tensor), as
    ``selection`` says; without one as it is."""

    module: GraphModule
    inputs: tuple[Any, ...]
    patches: dict[str, Any]
    selection: Selection | None
    surroundings: Surroundings = field(default_factory=Surroundings.here)

    def written(self) -> bytes:
        """For :meth:`fulfil`.  Raises :class:`Unsent`."""
        from torch.fx._graph_pickler import GraphPickler, Options

        nodes = self.module.graph.find_nodes(op="placeholder")
        told = [(getattr(node, SOURCE, None), _static(node)) for node in nodes]
        rest = (self.inputs, self.patches, self.selection, self.surroundings)
        every = Options(ops_filter=None, node_metadata_key_filter=lambda key: False)
        try:
            # A copy, as being written changes a module.
            with _writing:
                return bytes(GraphPickler.dumps((apart(self.module), told, *rest), every))
        except Exception as error:  # whatever a graph may hold
            raise Unsent(f"{type(error).__name__}: {error}") from error

    @staticmethod
    def fulfil(text: bytes) -> Stitching:
        """Compile what was :meth:`written`, forward and backward: what became of the graphs, where
        they were not in the cache already."""
        from torch._guards import TracingContext, tracing
        from torch._inductor import compile_fx  # noqa: F401, as graphs call operators it defines
        from torch._inductor import config as inductor
        from torch._subclasses import FakeTensorMode
        from torch.fx._graph_pickler import GraphPickler
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode, done = FakeTensorMode(shape_env=ShapeEnv()), Stitching()
        read: Any = GraphPickler.loads(text, mode)
        module, told, inputs, patches, selection, surroundings = read
        module = apart(module)
        host = InductorHost(patches)
        for node, (source, kind) in zip(
            module.graph.find_nodes(op="placeholder"), told, strict=True
        ):
            setattr(node, SOURCE, source)
            if kind is not None:
                node.meta["tensor_dict"] = {STATIC: kind}
        with contextlib.ExitStack() as stack:
            stack.enter_context(surroundings.set(traced=selection is not None))
            compilers = min(COMPILERS, inductor.compile_threads or COMPILERS)
            stack.enter_context(inductor.patch(compile_threads=compilers))
            _know(module, inputs, mode)
            stack.enter_context(tracing(TracingContext(mode)))
            fakes = [_fake(value, mode) for value in inputs]
            if selection is None:
                host.plain(module, fakes)
            else:
                host.stitched(module, fakes, selection, done)
        return done


def layouts(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What an errand says of inputs.  Raises :class:`Unsent` where that is not all there is to say:
    memory that they share, or at odd places, and sizes that vary."""
    found: list[Any] = []
    places: set[int] = set()
    for value in inputs:
        if not isinstance(value, Tensor):
            if not isinstance(value, (int, float, bool, type(None))):
                raise Unsent(f"an input is {type(value).__name__}")
            found.append(value)
            continue
        place = value.untyped_storage()._cdata
        if place in places:
            raise Unsent("inputs share memory")
        places.add(place)
        sizes = (*value.shape, *value.stride())
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise Unsent("a size varies")
        if value.storage_offset() * value.element_size() % ALIGNMENT:
            raise Unsent("an input begins at an odd place")
        shape, strides = tuple(value.shape), tuple(value.stride())
        found.append((shape, strides, value.dtype, value.device, value.requires_grad))
    return tuple(found)


def _know(module: GraphModule, inputs: Sequence[Any], mode: Any) -> None:
    """Tell every node what it gives, as Dynamo does: AOTAutograd's cache asks whose methods are
    called."""

    class Knowing(Interpreter):  # type: ignore[misc]
        def run_node(self, node: torch.fx.Node) -> Any:
            node.meta["example_value"] = found = super().run_node(node)
            return found

    with contextlib.suppress(Exception), mode:  # the other cache is there without
        Knowing(module).run(*(_fake(value, mode) for value in inputs))


def _static(node: torch.fx.Node) -> str | None:
    found: str | None = node.meta.get("tensor_dict", {}).get(STATIC)
    return found


def _fake(value: Any, mode: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    shape, strides, dtype, device, requires_grad = value
    with mode:
        found = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return found.requires_grad_(requires_grad)
