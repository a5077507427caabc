"""Copies of a Dynamo graph and of its inputs, to compile the graph a second time later."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatefulSymbolicContext


def clone_graph(module: GraphModule) -> GraphModule:
    """A copy that a compiler may modify; parameters and buffers are shared with the original."""
    memo: dict[int, Any] = {id(x): x for x in (*module.parameters(), *module.buffers())}
    clone: GraphModule = copy.deepcopy(module, memo)
    _LazyGraphModule.force_recompile(clone)
    # Dynamo marks parameters as static by attributes of the module.  Without them a CUDA graph of
    # the copy would copy every parameter in each replay.
    attributes = {**vars(module), **vars(clone)}
    # PyTorch's cache keys depend on the order of the attributes, which depends on earlier lookups.
    vars(clone).clear()
    vars(clone).update(sorted(attributes.items()))
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, copied in zip(placeholders, clone.graph.find_nodes(op="placeholder"), strict=True):
        # The source of an input is an attribute of its node, which deepcopy does not copy.
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    return clone


class NeedsNewGuard(Exception):
    """A later compilation assumes more about a dynamic size than Dynamo's guards check."""


class DynamicInputs:
    """Fake inputs of a graph with a dynamic size, in the fake mode of Dynamo's trace.

    Must be created while Dynamo compiles the graph.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        context = TracingContext.get()
        assert context.fake_mode is not None and context.fake_mode.shape_env is not None
        self._mode, self._sizes = context.fake_mode, context.fake_mode.shape_env
        self.inputs = [_fake(value, self._mode) for value in inputs]

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A tracing context in which the graph can be compiled for these inputs once more.

        Raises :class:`NeedsNewGuard` at the end if that added a guard: Dynamo's guards are already
        written.
        """
        known = len(self._sizes.guards)
        with tracing(TracingContext(self._mode)):
            yield
        added = [str(guard.expr) for guard in self._sizes.guards[known:]]
        if added:
            raise NeedsNewGuard(f"valid only if {' and '.join(added)}")


@contextlib.contextmanager
def fake_inputs(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """A tracing context as Dynamo sets it up for inputs of static sizes; yields fake inputs.

    PyTorch reads and writes its compile caches only inside such a context.  Real inputs are
    replaced by fake ones because every process that compiles the graph has the same fake ones.
    """
    context = TracingContext.try_get()
    if context is not None:
        assert context.fake_mode is not None
        yield [_fake(value, context.fake_mode) for value in inputs]
        return
    context = TracingContext(mode := FakeTensorMode(shape_env=ShapeEnv()))
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor):
            context.tensor_to_context[value] = StatefulSymbolicContext(
                dynamic_sizes=[DimDynamic.STATIC] * value.dim(),
                constraint_sizes=[None] * value.dim(),
                tensor_source=ConstantSource(f"input_{index}"),
                shape_env_to_source_to_symbol_cache={},
            )
    with tracing(context):
        yield [_fake(value, mode, context.tensor_to_context) for value in inputs]


def _fake(value: Any, mode: Any, contexts: Any = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    symbolic = contexts[value] if contexts is not None else None
    source = symbolic.tensor_source if symbolic is not None else None
    fake = mode.from_tensor(value, symbolic_context=symbolic, source=source)
    if isinstance(value, FakeTensor):
        # The symbol of a Python float, which PyTorch does not copy.
        fake.item_memo = value.item_memo
    return fake
