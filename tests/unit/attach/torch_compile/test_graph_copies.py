"""Copies of Dynamo graphs that are compiled later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from nostall.attach.torch_compile.graph_copies import clone_graph  # noqa: E402


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
