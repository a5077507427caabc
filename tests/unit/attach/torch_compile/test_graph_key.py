"""Keys of graphs, and reasons why graphs are not supported."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx import Graph as FxGraph  # noqa: E402
from torch.fx import GraphModule, symbolic_trace  # noqa: E402

from nostall.attach.torch_compile.graph_key import graph_key, unsupported_reason  # noqa: E402
from nostall.attach.torch_compile.options import Options  # noqa: E402


def trace(scale: float) -> GraphModule:
    return symbolic_trace(lambda x, y: (torch.softmax(x * scale, -1) + y,))


def key(module: GraphModule, *inputs: Any, patches: dict[str, Any] | None = None) -> str:
    return graph_key(module, inputs, Options(), patches or {})


def test_equal_graphs_have_equal_keys_and_different_ones_do_not() -> None:
    x = torch.ones(3, 4)
    name = key(trace(2.0), x, x)
    assert key(trace(2.0), x.clone(), x) == name
    others = [
        key(trace(3.0), x, x),
        key(trace(2.0), x.t().contiguous().t(), x),
        key(trace(2.0), x.double(), x),
        key(trace(2.0), x, x.clone().requires_grad_()),
        key(trace(2.0), x, x, patches={"max_autotune": True}),
    ]
    with torch.no_grad():
        others.append(key(trace(2.0), x, x))
    assert len({name, *others}) == 7


def test_a_precision_of_fp32_products_makes_other_keys() -> None:
    """With PyTorch's newer flag, too, beside which it refuses to name a common precision."""
    x, matmul = torch.ones(3, 4), torch.backends.cuda.matmul
    name, before = key(trace(2.0), x, x), getattr(matmul, "fp32_precision", None)
    if before is None:
        pytest.skip("this PyTorch has the older flag only")
    matmul.fp32_precision = "tf32"
    try:
        assert key(trace(2.0), x, x) != name
    finally:
        matmul.fp32_precision = before
    assert key(trace(2.0), x, x) == name


def graph_with_device(device: torch.device) -> GraphModule:
    """A graph that creates a tensor on a device."""
    graph = FxGraph()
    x = graph.placeholder("x")
    numbers = graph.call_function(torch.arange, (3,), {"device": device})
    graph.output((graph.call_function(torch.add, (x, numbers)),))
    return GraphModule(torch.nn.Module(), graph)


def test_a_graph_has_the_same_key_on_every_gpu_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look up the selection of rank 0 by it."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    with FakeTensorMode():
        on_first, on_second = torch.ones(3, device=first), torch.ones(3, device=second)
    name = key(graph_with_device(first), on_first)
    assert key(graph_with_device(second), on_second) == name
    assert key(graph_with_device(second), on_first) != name


def test_unsupported_graphs_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    module = trace(2.0)
    assert unsupported_reason(module, [torch.ones(3)]) == "not on a GPU"
    assert unsupported_reason(module, [1]) == "no input is a tensor"
    assert unsupported_reason(module, [torch.ones(3), torch.ones(3, device="meta")]) == (
        "tensors on several devices"
    )

    class Image(torch.Tensor):  # type: ignore[misc, name-defined]
        """As torchvision's: PyTorch refuses operators on it in the first call of a graph."""

    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    image = torch.ones(3).as_subclass(Image)
    for value in (image, torch.nn.Parameter(image)):
        assert unsupported_reason(module, [value]) == "a tensor subclass"
    assert unsupported_reason(module, [torch.nn.Parameter(torch.ones(3)), torch.ones(3)]) is None
