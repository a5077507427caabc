"""FX graphs for tests of capture: traced functions, values of nodes, and Inductor's dropout."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402


def values_of(module: Any) -> dict[Any, Any]:
    """The value of each node of an FX graph for random inputs."""

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node: Any) -> Any:
            values[node] = super().run_node(node)
            return values[node]

    values: dict[Any, Any] = {}
    torch.manual_seed(0)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        if fake.dtype.is_floating_point:
            value = torch.rand(fake.shape, dtype=fake.dtype) + 0.5
        else:
            value = torch.randint(0, 2, fake.shape).to(fake.dtype)
        inputs.append(torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(value))
    Recorder(module).run(*inputs)
    return values


def traced(function: Any, *inputs: Any, mode: str = "fake") -> Any:
    return make_fx(function, tracing_mode=mode)(*inputs)


def inductor_dropout(device: str) -> Any:
    """Dropout in the form of Inductor's graphs: one call draws all seeds of the graph."""
    from torch._inductor import inductor_prims

    graph = torch.fx.Graph()

    def with_value(node: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    def call(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], dtype: Any) -> Any:
        return with_value(graph.call_function(target, args), shape, dtype)

    with FakeTensorMode():
        x = with_value(graph.placeholder("x"), (4, 6), torch.float32)
        seeds = with_value(graph.placeholder("seeds"), (3,), torch.int64)
        seed = call(inductor_prims.lookup_seed, (seeds, 2), (), torch.int64)
        random = call(inductor_prims.random, ([4, 6], seed, "rand"), (4, 6), torch.float32)
        mask = call(torch.ops.aten.gt.Scalar, (random, 0.1), (4, 6), torch.bool)
        graph.output(call(torch.ops.aten.mul.Tensor, (x, mask), (4, 6), torch.float32))
    return torch.fx.GraphModule({}, graph)
