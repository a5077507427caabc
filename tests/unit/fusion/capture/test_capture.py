"""Tests of capture: lowered graphs compute PyTorch's values, and opaque calls are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")

from benchmarks.fusion.small_models import models  # noqa: E402
from tools.interpreters.reference import interpret  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

from nostall.fusion import BadCapture  # noqa: E402
from nostall.fusion.capture import (  # noqa: E402
    capture,
    inference_graph,
    left_to_pytorch,
    training_graphs,
)
from nostall.fusion.codegen.generate import schedule_operators  # noqa: E402
from nostall.fusion.graph.regions import find_regions  # noqa: E402
from tests.unit.fusion.capture.tracing import traced, values_of  # noqa: E402


def check(module: Any, rtol: float = 1e-9) -> int:
    """Compare each region of a captured graph with PyTorch; returns the number of regions."""
    captured = capture(module)
    values = values_of(module)

    def array(index: int) -> Any:
        return values[captured.origins[index]].detach().numpy()

    regions = find_regions(captured.graph)
    groups = [[region.origins[i] for i in region.graph.operators] for region in regions]
    assert captured.graph.is_acyclic(groups)
    for region in regions:
        results = interpret(region.graph, [array(index) for index in region.inputs])
        for index, result in zip(region.outputs, results, strict=True):
            expected = array(index)
            assert (
                expected.strides
                == tuple(s * expected.itemsize for s in captured.graph[index].strides)
                or expected.size < 2
            )
            np.testing.assert_allclose(result, expected, rtol=rtol, atol=rtol / 100)
    return len(regions)


# Other models have the same operators; benchmarks/fusion/explorers.py traces them.
MODELS = ("bert", "resnet-block", "cross-entropy", "quantised-norm")


@pytest.mark.parametrize("name", MODELS)
def test_regions_compute_the_values_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = models(small=True)[name]()
    doubled = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    if name == "quantised-norm":
        graphs = [inference_graph(module.double(), *doubled)]
    else:
        graphs = list(training_graphs(module.double(), *doubled))
    for graph in graphs:
        assert check(graph) >= 1


def unsupported(function: Any, *inputs: Any, mode: str = "fake") -> dict[str, str]:
    """The opaque calls of a function: ATen operator by reason."""
    captured = capture(traced(function, *inputs, mode=mode))
    return dict(captured.report.unsupported.keys())


def test_a_submodule_with_two_names_keeps_its_parameters() -> None:
    layer = torch.nn.Linear(4, 4)
    weight = layer.weight
    inference_graph(torch.nn.Sequential(layer, torch.nn.ReLU(), layer), torch.randn(2, 4))
    assert layer.weight is weight


def test_opaque_calls_have_reasons() -> None:
    x, square = torch.rand(4, 6), torch.rand(4, 4)
    assert unsupported(lambda x: (x @ x).cumsum(0), square).keys() == {
        "matrix product or convolution, for cuBLAS, cuDNN and CUTLASS",
        "scan: each result depends on the one before",
    }
    assert unsupported(lambda x: torch.rand_like(x) + x, x).keys() == {"random numbers"}
    pairs = torch.rand(4, 3, 2)
    assert "dtype complex64" in unsupported(lambda x: torch.view_as_complex(x) * 2, pairs)
    wide = torch.rand(70, 40), torch.rand(40, 50)
    product = unsupported(lambda a, b: torch.bmm(a[None], b[None]).exp(), *wide)
    assert product.keys() == {"matrix product that does not wait for memory"}


def test_attention_is_named_as_such_though_it_may_draw_random_numbers() -> None:
    q = torch.randn(2, 2, 16, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    found = unsupported(lambda q: attention(q, q, q), q)
    assert "attention, for fused attention kernels" in found
    assert "random numbers" not in found


def test_each_operator_of_attention_is_named_as_such() -> None:
    names = [name for name in dir(torch.ops.aten) if "attention" in name]
    assert len(names) > 9
    reasons = {left_to_pytorch.reason(f"aten.{name}.default") for name in names}
    assert reasons == {left_to_pytorch.ATTENTION}


def test_a_reason_comes_before_tags_and_results() -> None:
    """The gradient of attention has a tag of random numbers, and results that are no tensors."""
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    assert torch.Tag.nondeterministic_seeded in operator.tags
    operands = (q, q, q, q, None, q, q, q, q, 0.0, [True, True, True, False])
    node = graph.call_function(operator, operands)
    graph.output(node)
    q.meta["val"] = torch.empty(2, 2, 8, 8, device="meta")
    node.meta["val"] = (q.meta["val"], q.meta["val"], q.meta["val"], None)
    captured = capture(torch.fx.GraphModule({}, graph))
    assert {reason for reason, _ in captured.report.unsupported} == {
        "attention, for fused attention kernels"
    }


def test_calls_without_result_are_counted() -> None:
    class WithAssertion(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, label: Any) -> Any:
            return x.softmax(-1) - torch.nn.functional.one_hot(label, 6)

    captured = capture(
        inference_graph(WithAssertion(), torch.rand(4, 6), torch.tensor([0, 1, 2, 3]))
    )
    assert captured.report.unsupported == {("no tensor", "aten._assert_async.msg"): 2}
    assert {captured.graph[i].op for i in captured.graph.operators} >= {"exp", "eq"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_casts_to_e4m3_saturate_if_pytorch_does(dtype: Any) -> None:
    """Before PyTorch 2.12, too large numbers become NaN, as in kernels without a clamp."""
    x = torch.tensor([1e4, -1e4, 460.0, -1.5], dtype=dtype)
    graph = capture(traced(lambda x: x.to(torch.float8_e4m3fn), x)).graph
    (result,) = interpret(graph, [x.double().numpy()])
    expected = x.to(torch.float8_e4m3fn).float()
    if bool(expected.isnan().any()):
        assert [graph[i].op for i in graph.operators] == ["cast"]
    else:
        assert result.tolist()[:2] == expected.tolist()[:2] == [448.0, -448.0]
        assert result.tolist()[2:] == [448.0, -1.5]


def test_tensors_mutated_in_place_are_opaque() -> None:
    def mutate(x: Any) -> Any:
        rows = x.view(6, 4)
        doubled = rows * 2
        x.add_(1)
        return doubled + rows

    reasons = unsupported(mutate, torch.rand(4, 6)).keys()
    assert {"changes a tensor in place", "reads a tensor that is changed in place"} <= reasons


def test_lists_of_tensors_mutated_in_place_are_opaque() -> None:
    def mutate(x: Any, y: Any) -> Any:
        torch._foreach_add_([x, y], 1.0)
        return x * y

    reasons = unsupported(mutate, torch.rand(3), torch.rand(3))
    assert reasons["reads a tensor that is changed in place"] == "aten.mul.Tensor"


def symbolic(function: Any, *inputs: Any) -> Any:
    return capture(traced(function, *inputs, mode="symbolic"))


def test_one_dynamic_size_is_supported() -> None:
    """Its placeholder is 5: the first odd prime from 5 on that divides no other size."""

    def function(x: Any) -> Any:
        wide = x[:, None] * torch.full((6,), 2.0)
        return (wide / wide.sum(-1, keepdim=True)).view(-1, 3, 2).transpose(1, 2).clone()

    captured = symbolic(function, torch.rand(5))
    assert not captured.report.unsupported
    assert captured.graph.varying == 5
    shapes = {node.shape for node in captured.graph if node.kind != "constant"}
    assert {(5,), (5, 6), (5, 2, 3)} <= shapes
    assert {size for node in captured.graph for size in node.strides} <= {1, 2, 3, 6}


def test_each_dynamic_size_has_a_prime() -> None:
    """The placeholders are 5 and 7: the first odd primes from 4 and 6 on."""
    two = symbolic(lambda x: (x[:, None] * x).exp().view(-1) * 2, torch.rand(4, 6))
    assert not two.report.unsupported
    assert two.graph.varying == 5 * 7
    assert {(5, 7), (5, 5, 7), (5 * 5 * 7,)} <= {node.shape for node in two.graph}
    assert (5 * 7, 7, 1) in {node.strides for node in two.graph}


def test_other_dynamic_shapes_are_opaque() -> None:
    half = symbolic(lambda x: x[: x.shape[0] // 2].exp(), torch.rand(8))
    reason = "a size that is no product of dynamic dimensions"
    assert reason in {text for text, _ in half.report.unsupported}


def test_numbers_that_depend_on_the_dynamic_size_are_unsupported() -> None:
    reason = "a number that is known at run time only"
    for function in (
        lambda x: x.mean(),
        lambda x: x.var(),
        lambda x: x[-1].exp(),
        lambda x: x / x.shape[0],
        lambda x: torch.ops.aten.split.Tensor(torch.cat([x, x]), x.shape[0])[1].exp(),
    ):
        captured = symbolic(function, torch.rand(5))
        assert captured.report.unsupported
        assert reason in {text for text, _ in captured.report.unsupported}


def test_opaque_results_keep_their_strides() -> None:
    captured = capture(traced(lambda x: x.transpose(0, 1).digamma().exp(), torch.rand(4, 6)))
    (opaque,) = [node for node in captured.graph if node.kind == "opaque" and node.shape == (6, 4)]
    assert opaque.strides == (1, 6)


def test_tensors_with_too_many_elements_are_opaque() -> None:
    with FakeTensorMode():
        x = torch.empty(2**16, 2**15)
    assert unsupported(lambda x: x.exp(), x) == {"more than 2^31 - 1 elements": "aten.exp.default"}


def test_views_of_too_many_elements_are_opaque() -> None:
    """Offsets have 32 bits: the last tokens' logits of a batch lie far from each other."""
    x = torch.empty(32, 4096, 128256, device="meta", dtype=torch.bfloat16)[:, -1]
    found = unsupported(lambda x: x.exp(), x)
    assert found == {"a view of more than 2^31 - 1 elements": "aten.exp.default"}


def test_report_text_has_counts_and_reasons() -> None:
    captured = capture(traced(lambda x: (x @ x).exp().cumsum(0).cumsum(1) * 2, torch.rand(4, 4)))
    text = str(captured.report)
    assert "2 ATen calls can be fused, 3 stay" in text
    assert "2 x aten.cumsum.default: scan: each result depends on the one before" in text


class Pooling(torch.nn.Module):
    """Attention of DIEN: one query for each sequence weights its positions."""

    def forward(self, x: Any, query: Any) -> Any:
        weights = torch.einsum("btd,bd->bt", x, query).softmax(-1)
        return torch.einsum("bt,btd->bd", weights, x)


def test_attention_by_einsum_becomes_dots_in_both_passes() -> None:
    inputs = [torch.rand(4, 10, 16).requires_grad_(), torch.rand(4, 16).requires_grad_()]
    for module in training_graphs(Pooling(), *inputs):
        captured = capture(module)
        assert not captured.report.unsupported
        (region,) = find_regions(captured.graph)
        assert sum(node.op == "dot" for node in region.graph) >= 2
        schedule = schedule_operators(region.graph, region.graph.operators)
        assert schedule.kind == "dots"


def test_small_matrix_products_are_fused() -> None:
    def function(a: Any, b: Any) -> Any:
        return torch.bmm(a, b).relu().sum((1, 2))

    module = traced(
        function, torch.rand(8, 3, 4, dtype=torch.float64), torch.rand(8, 4, 2).double()
    )
    captured = capture(module)
    assert "dot" in {node.op for node in captured.graph}
    assert check(module) == 1


def test_float_numbers_promote_integer_tensors() -> None:
    def function(x: Any) -> Any:
        return x.clamp(0.25, 0.75) + torch.add(x, x, alpha=2) + x.pow(3.0) + x.sum() / 7

    module = traced(function, torch.randint(0, 2, (5, 3)))
    captured = capture(module)
    assert not captured.report.unsupported
    assert check(module, rtol=1e-6) == 1  # PyTorch promotes integers to fp32


def test_graph_without_fake_values_is_rejected() -> None:
    module = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(BadCapture, match=r"meta\['val'\]"):
        capture(module)


def test_untraceable_modules_are_rejected() -> None:
    class Branches(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(BadCapture, match="Branches"):
        inference_graph(Branches(), torch.rand(3))
    with pytest.raises(BadCapture, match="no backward pass"):
        training_graphs(torch.nn.ReLU(), torch.rand(3))


@pytest.mark.parametrize("dim", [1, -1, 0])
def test_glu_is_fused(dim: int) -> None:
    module = traced(lambda x: torch.nn.functional.glu(x, dim), torch.randn(4, 6).double())
    captured = capture(module)
    assert not captured.report.unsupported
    assert check(module) == 1


def test_glu_is_rounded_once() -> None:
    """As in ATen, the sigmoid is not rounded before the product."""
    captured = capture(traced(lambda x: torch.nn.functional.glu(x, 1), torch.randn(4, 6).half()))
    (sigmoid,) = [node for node in captured.graph if node.op == "sigmoid"]
    assert (sigmoid.dtype, captured.graph[captured.graph.outputs[0]].dtype) == (
        "float32",
        "float16",
    )


def test_fma_becomes_a_product_and_a_sum() -> None:
    inputs = [torch.randn(4, 6).double() for _ in range(3)]
    module = traced(lambda *x: torch.ops.prims.fma(*x), *inputs)
    assert [n.op for n in capture(module).graph if n.kind != "input"] == ["mul", "add"]
    assert check(module) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.slice_scatter(x, y, 1, 3, 6),
        lambda x, y: torch.slice_scatter(x, y, 1, -3),
        lambda x, y: torch.slice_scatter(torch.full((4, 6), 0.0), y.exp(), 1, 0, 3) + x,
        lambda x, y: torch.slice_scatter(torch.cat([x, x], 1), y, 1, 9),
        lambda x, y: torch.slice_scatter(x, y, 1, 0, 6, 2),
        lambda x, y: torch.slice_scatter(x, y.exp(), 1, 1, step=2) + x,
        lambda x, y: torch.slice_scatter(x.view(2, 12), y.view(3, 4)[:2], 1, 2, step=3),
        lambda x, y: torch.slice_scatter(x.view(6, 4), y.view(3, 4), 0, -5, step=2),
        lambda x, y: x * torch.ops.prims.iota(
            6, start=2, step=3, dtype=torch.int64, device="cpu", requires_grad=False
        ),
    ],
)  # fmt: skip
def test_equal_parts_of_a_result_and_counters_are_fused(function: Any) -> None:
    inputs = torch.rand(4, 6), torch.rand(4, 3)
    captured = capture(traced(function, *inputs))
    assert not captured.report.unsupported
    (result,) = interpret(captured.graph, [x.numpy() for x in inputs][: len(captured.graph.inputs)])
    assert np.allclose(result, function(*inputs).numpy())


@pytest.mark.parametrize(("start", "stop", "step"), [(2, 5, 1), (0, 4, 2), (1, 4, 3)])
def test_unequal_parts_of_a_result_are_opaque(start: int, stop: int, step: int) -> None:
    part = torch.rand(4, len(range(start, stop, step)))
    reasons = unsupported(
        lambda x, y: torch.slice_scatter(x, y, 1, start, stop, step), torch.rand(4, 6), part
    )
    assert "a part of a result that is not one of several equal parts" in reasons
