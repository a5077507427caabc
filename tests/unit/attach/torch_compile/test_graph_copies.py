"""Copies of Dynamo graphs that are compiled later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from nostall.attach.torch_compile.graph_copies import (  # noqa: E402
    DynamicInputs,
    clone_graph,
    fake_inputs,
)


def dynamo_graph(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Any]:
    """The graph and the inputs that Dynamo passes to a backend."""
    calls: list[tuple[Any, Any]] = []

    def backend(module: Any, graph_inputs: Any) -> Any:
        calls.append((module, graph_inputs))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    (call,) = calls
    return call


def test_parameters_of_a_copy_are_static_inputs() -> None:
    """Inductor copies other inputs into the memory of a CUDA graph, in each replay."""
    from torch._inductor.compile_fx import compile_fx

    module, inputs = dynamo_graph(nn.Linear(3, 3), torch.ones(2, 3))
    static: list[list[int]] = []

    def inner(graph: Any, graph_inputs: Any, **kwargs: Any) -> Any:
        static.append(list(kwargs["static_input_idxs"]))
        return make_boxed_func(graph.forward)

    copy = clone_graph(module)
    for graph in (module, copy):
        compile_fx(graph, inputs, inner_compile=inner)
    assert static == [[0, 1], [0, 1]]


def test_a_copy_of_the_inputs_has_the_symbol_of_a_python_float() -> None:
    """With it AOTAutograd traces ``x * scale`` for all scales; without it, not at all."""
    memos: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        copies = DynamicInputs(inputs)
        with copies.tracing(), fake_inputs(copies.inputs) as again:
            memos.extend(x.item_memo for x in again if isinstance(x, Tensor))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, scale: x * scale, backend=backend, dynamic=True)
    compiled(torch.ones(2, 3), 2.5)
    assert [type(memo) for memo in memos] == [type(None), torch.SymFloat]
