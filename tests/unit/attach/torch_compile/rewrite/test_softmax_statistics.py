"""Softmax in graphs of Inductor for GPUs, which has one call for a maximum and a sum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from tools.interpreters.reference import interpret  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._inductor import inductor_prims  # noqa: E402
from torch.fx import GraphModule, Node  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from nostall.attach.torch_compile.measure.baselines import inductor_baselines  # noqa: E402
from nostall.attach.torch_compile.rewrite import rewrite  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import (  # noqa: E402
    KernelFilter,
    RewriteResult,
)
from nostall.attach.torch_compile.rewrite.matching import match_kernels  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.fusion.capture import capture  # noqa: E402

Function = Callable[[Tensor], tuple[Tensor, ...]]
PRIM = "prims.prepare_softmax_online.default"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))


def softmax_along(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    largest, total = inductor_prims.prepare_softmax_online(x, dim)
    return ((x - largest).exp() / total,)


def softmax(x: Tensor) -> tuple[Tensor, ...]:
    return softmax_along(x, -1)


def log_softmax(x: Tensor) -> tuple[Tensor, ...]:
    largest, total = inductor_prims.prepare_softmax_online(x, -1)
    return (x - largest - total.log(), largest, total.log())


def softmax_of_columns(x: Tensor) -> tuple[Tensor, ...]:
    return softmax_along(x, 0)


def softmax_of_permuted(x: Tensor) -> tuple[Tensor, ...]:
    return softmax((x * 2).permute(1, 0))


PROGRAMS: list[Function] = [softmax, log_softmax, softmax_of_columns, softmax_of_permuted]


def traced(function: Function, *args: Tensor) -> GraphModule:
    module = make_fx(function, tracing_mode="fake")(*args)
    assert isinstance(module, GraphModule)
    return module


@pytest.mark.parametrize("function", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_is_captured_with_one_exponential(function: Function, dtype: torch.dtype) -> None:
    x = torch.randn(12, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    captured = capture(traced(function, x))
    assert not captured.report.unsupported
    operators = [node.op for node in captured.graph]
    assert [operators.count(op) for op in ("amax", "exp", "sum")] == [1, 1, 1]
    expected = {
        softmax: (x.softmax(-1),),
        log_softmax: (
            x.log_softmax(-1),
            x.amax(-1, True),
            (x - x.amax(-1, True)).exp().sum(-1, True).log(),
        ),
        softmax_of_columns: (x.softmax(0),),
        softmax_of_permuted: ((x * 2).t().softmax(-1),),
    }[function]
    for found, value in zip(interpret(captured.graph, [x.numpy()]), expected, strict=True):
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-5, atol=1e-6)


def softmax_of_columns_of_a_part(x: Tensor) -> tuple[Tensor, ...]:
    return softmax(x[:, 4:36:2])


def softmax_of_expanded(x: Tensor) -> tuple[Tensor, ...]:
    return softmax(x.expand(3, 12, 40))


def softmax_of_one_permuted_batch(x: Tensor) -> tuple[Tensor, ...]:
    return softmax((x * 2).view(1, 12, 40).permute(1, 0, 2))


@pytest.mark.parametrize(
    "function", [softmax_of_columns_of_a_part, softmax_of_expanded, softmax_of_one_permuted_batch]
)
def test_softmax_of_a_view_is_captured_with_one_exponential(function: Function) -> None:
    """PyTorch's ``x - maximum`` has other strides than ``x``."""
    x = torch.randn(12, 40, generator=torch.Generator().manual_seed(0))
    module = traced(function, x)
    captured = capture(module)
    operators = [node.op for node in captured.graph]
    assert [operators.count(op) for op in ("amax", "sub", "exp", "sum")] == [1, 1, 1, 1]
    for node, value in captured.values.items():
        if isinstance(value, int) and captured.graph[value].op in ("sub", "exp", "div"):
            assert captured.graph[value].strides == node.meta["val"].stride()
    (found,) = interpret(captured.graph, [x.numpy()])
    np.testing.assert_allclose(found, function(x)[0].numpy(), rtol=1e-5, atol=1e-6)


def test_values_that_are_changed_in_place_are_not_those_of_other_calls() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        largest, total = inductor_prims.prepare_softmax_online(x, -1)
        shifted = x - largest
        changed, kept = shifted.exp(), shifted.exp()
        changed.add_(x @ x)
        return (changed, kept / total)

    module = traced(function, torch.randn(16, 16))
    values = capture(module).values
    changed, kept = (node for node in values if str(node.target) == "aten.exp.default")
    assert values[changed] != values[kept]
    assert capture(module).graph[values[kept]].op == "exp"


def attention(x: Tensor) -> tuple[Tensor, ...]:
    """Softmax between two products, as in the attention of a model."""
    scores = x @ x.permute(1, 0) * 0.25
    return (softmax(scores)[0] @ x,)


def statistics_alone(x: Tensor) -> tuple[Tensor, ...]:
    """The sum of a loss, which needs only one row of the softmax."""
    largest, total = inductor_prims.prepare_softmax_online(x @ x.permute(1, 0), -1)
    return (largest + total.log(),)


def with_maximum(x: Tensor) -> tuple[Tensor, ...]:
    """PyTorch does not take two results of a graph as one, so it keeps the second maximum."""
    return (softmax(x)[0], x.amax(-1, True))


def with_exponentials(x: Tensor) -> tuple[Tensor, ...]:
    largest, total = inductor_prims.prepare_softmax_online(x, -1)
    return ((x - largest).exp() / total, (x - largest).exp(), (x - largest).exp())


@pytest.mark.parametrize("function", [attention, statistics_alone, with_maximum, with_exponentials])
def test_a_kernel_replaces_the_call_and_what_computes_the_same(function: Function) -> None:
    module = traced(function, torch.randn(64, 64))
    result = RewriteResult()
    rewrite.insert_kernels(module, KernelStore(), KernelFilter("all"), result)
    left = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert len(result.kernels) == 1
    assert left <= {
        "aten.mm.default",
        "aten.permute.default",
        "nostall.stitched.default",
        "<built-in function getitem>",
    }


class Recorder(torch.fx.Interpreter):
    def run_node(self, node: Node) -> object:
        value = super().run_node(node)
        self.seen[node.name] = value
        return value


@pytest.mark.parametrize("function", [attention, statistics_alone])
def test_inductor_is_compared_with_the_whole_softmax(function: Function) -> None:
    """Its graph does not read ``x - maximum`` from memory, and computes what the graph does."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    module = traced(function, x)
    recorder = Recorder(module)
    recorder.seen = {}
    recorder.run(x)
    matched = match_kernels(module, KernelStore(), KernelFilter("all"), RewriteResult())
    assert matched is not None
    (baseline,) = inductor_baselines(module, *matched)
    nodes = baseline.module.graph.nodes
    assert sum(str(node.target) == PRIM for node in nodes) == 1
    inputs = [recorder.seen[node.name] for node in nodes if node.op == "placeholder"]
    assert [tuple(value.shape) for value in inputs] == [(64, 64)]
    outputs = baseline.module.graph.output_node().all_input_nodes
    for node, value in zip(outputs, baseline.module(*inputs), strict=True):
        torch.testing.assert_close(value, recorder.seen[node.name])


def changed_in_place(x: Tensor) -> tuple[Tensor, ...]:
    """The difference changes behind the exponential that the statistics have computed."""
    largest, total = inductor_prims.prepare_softmax_online(x, -1)
    shifted = x - largest
    power = shifted.exp()
    return (shifted.add_(1.0), power / total)


def test_a_value_that_changes_in_place_is_not_shared() -> None:
    x = torch.randn(12, 40, generator=torch.Generator().manual_seed(0))
    captured = capture(traced(changed_in_place, x))
    (shifted,) = (n for n in captured.values if n.target is torch.ops.aten.sub.Tensor)
    first, *_ = (node for node in captured.graph if node.op == "exp")
    assert captured.values[shifted] not in first.inputs


def changed_exponential(x: Tensor) -> tuple[Tensor, ...]:
    """The exponential twice: one result is changed in place, and then the other is read."""
    largest, total = inductor_prims.prepare_softmax_online(x, -1)
    power = (x - largest).exp()
    changed = power.zero_()
    return (total, changed, (x - largest).exp() * (x @ x))


def test_a_result_that_is_changed_in_place_is_not_that_of_another_call() -> None:
    captured = capture(traced(changed_exponential, torch.randn(8, 8)))
    exponentials = [
        value for node, value in captured.values.items() if str(node.target) == "aten.exp.default"
    ]
    assert len(set(exponentials)) == 2
