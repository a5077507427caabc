"""A Dynamo graph that is compiled a second time, later."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatefulSymbolicContext


def apart(module: GraphModule) -> GraphModule:
    """A copy that a compiler may change; it shares the tensors that the module holds."""
    memo: dict[int, Any] = {id(x): x for x in (*module.parameters(), *module.buffers())}
    found: GraphModule = copy.deepcopy(module, memo)
    _LazyGraphModule.force_recompile(found)
    # Without what Dynamo writes beside a graph no input is known to stay where it is, and a CUDA
    # graph of the copy would copy every parameter in each replay.
    every = {**vars(module), **vars(found)}
    # Names of PyTorch's caches depend on the order, which would be that of what was asked before.
    vars(found).clear()
    vars(found).update(sorted(every.items()))
    old = module.graph.find_nodes(op="placeholder")
    for one, other in zip(old, found.graph.find_nodes(op="placeholder"), strict=True):
        # Where an input comes from: Dynamo writes it beside what copies of nodes take along.
        if hasattr(one, "_dynamo_source"):
            other._dynamo_source = one._dynamo_source
    return found


class Supposes(Exception):
    """A later compilation supposes more of the sizes that vary than Dynamo checks."""


class Traced:
    """The inputs of a graph some of whose sizes vary, as Dynamo traced them; made while Dynamo
    compiles.  ``inputs`` hold no memory."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        context = TracingContext.get()
        assert context.fake_mode is not None and context.fake_mode.shape_env is not None
        self._mode, self._sizes = context.fake_mode, context.fake_mode.shape_env
        self.inputs = [_faked(value, self._mode) for value in inputs]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """To compile for these inputs once more.  Dynamo has written its guards by then: raises
        :class:`Supposes` where one more would be needed."""
        known = len(self._sizes.guards)
        with tracing(TracingContext(self._mode)):
            yield
        more = [str(guard.expr) for guard in self._sizes.guards[known:]]
        if more:
            raise Supposes(f"only where {' and '.join(more)}")


@contextlib.contextmanager
def as_traced(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """As if Dynamo had just traced a graph for these inputs, none of whose sizes varies: without
    that PyTorch's caches are not asked, and not told of what is compiled.  Gives the inputs without
    memory: every process that compiles the graph has such."""
    context = TracingContext.try_get()
    if context is not None:
        assert context.fake_mode is not None
        yield [_faked(value, context.fake_mode) for value in inputs]
        return
    context = TracingContext(mode := FakeTensorMode(shape_env=ShapeEnv()))
    for at, value in enumerate(inputs):
        if isinstance(value, Tensor):
            context.tensor_to_context[value] = StatefulSymbolicContext(
                dynamic_sizes=[DimDynamic.STATIC] * value.dim(),
                constraint_sizes=[None] * value.dim(),
                tensor_source=ConstantSource(f"input_{at}"),
                shape_env_to_source_to_symbol_cache={},
            )
    with tracing(context):
        yield [_faked(value, mode, context.tensor_to_context) for value in inputs]


def _faked(value: Any, mode: Any, contexts: Any = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    symbolic = contexts[value] if contexts is not None else None
    source = symbolic.tensor_source if symbolic is not None else None
    return mode.from_tensor(value, symbolic_context=symbolic, source=source)
