"""Tests of finding products that one kernel can compute with their readers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from nostall.fusion.graph.graph import Graph
from nostall.fusion.products.find import FoundProduct, Products
from nostall.fusion.products.rules import CHANGED, NO_READER, PART, product_call, refusal
from tests.unit.fusion.products.programs import (
    captured_forward,
    feed_forward,
    found_backward,
    found_forward,
    residual,
    swiglu,
    tensors,
)

RESIDUAL = ((32, 16), (16, 24), (24,), (32, 24), (24, 24))


def operators(found: FoundProduct) -> list[str]:
    graph = found.kernel.graph
    return [graph[i].op for i in found.kernel.epilogue]


def with_readers(products: Products) -> list[FoundProduct]:
    """The kernels that read the left operands of their products."""
    return [each for each in products.found if not each.kernel.prologue]


def with_operator(products: Products, op: str) -> list[FoundProduct]:
    return [each for each in with_readers(products) if op in operators(each)]


def test_an_activation_is_computed_with_the_product_that_it_reads() -> None:
    products = found_forward(feed_forward, *tensors((32, 16), (16, 24), (24, 16)))
    (found,) = with_readers(products)
    assert "erf" in operators(found)
    shape = found.kernel.shape
    assert (shape.rows, shape.columns, shape.depth, shape.count) == (32, 24, 16, 1)
    assert len(found.kernel.graph.outputs) == 1
    assert found.bytes_saved == 2 * 32 * 24 * 2


def test_a_product_that_is_also_returned_is_written() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, torch.tanh(y)

    (found,) = found_forward(program, *tensors((32, 16), (16, 24))).found
    assert len(found.kernel.graph.outputs) == 2


def test_two_products_of_one_left_operand_become_a_pair() -> None:
    products = found_forward(swiglu, *tensors((32, 16), (16, 24), (16, 24), (24, 16)))
    pair, *singles = with_readers(products)
    assert pair.kernel.shape.count == 2
    assert len(pair.kernel.graph.inputs) == 3, "the left operand is read once"
    assert [each.kernel.shape.count for each in singles] == [1, 1]
    assert "1 pairs" in products.lines()[0]


def test_products_of_different_left_operands_are_no_pair() -> None:
    def program(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.sigmoid(x @ a) * (y @ b)

    products = found_forward(program, *tensors((32, 16), (32, 16), (16, 24), (16, 24)))
    assert {each.kernel.shape.count for each in products.found} == {1}


def test_the_derivative_of_an_activation_joins_the_product_of_the_gradient() -> None:
    products = found_backward(feed_forward, *tensors((32, 16), (16, 24), (24, 16)))
    (found,) = with_operator(products, "exp")
    assert "erf" in operators(found)
    assert len(found.kernel.graph.inputs) == 3, "gradient, weight and the saved product"


def test_a_bias_is_added_before_the_product_is_rounded() -> None:
    products = found_forward(residual, *tensors(*RESIDUAL))
    graph = products.found[0].kernel.graph
    (dot,) = products.found[0].kernel.dots
    (added,) = graph.users[dot]
    (rounded,) = graph.users[added]
    assert (graph[added].op, graph[added].dtype) == ("add", "float32")
    assert (graph[rounded].op, graph[rounded].dtype) == ("cast", "bfloat16")


def test_a_residual_that_is_read_again_is_written_by_the_kernel() -> None:
    products = found_forward(residual, *tensors(*RESIDUAL))
    first = products.found[0]
    assert [first.kernel.graph[i].op for i in first.kernel.graph.outputs] == ["add"]


def test_operators_that_only_a_reduction_reads_stay_with_it() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).square().sum(-1)

    products = found_forward(program, *tensors((32, 16), (16, 24)))
    assert all(each.kernel.reductions for each in products.found)


def _sliced(x: Tensor, w: Tensor) -> Tensor:
    left, right = (x @ w).chunk(2, -1)
    return left * right


def _matrix(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@pytest.mark.parametrize(("program", "reason"), [(_sliced, PART), (_matrix, NO_READER)])
def test_products_without_readers_at_their_elements_are_refused(
    program: Callable[..., Tensor], reason: str
) -> None:
    products = found_forward(program, *tensors((32, 16), (16, 24)))
    assert not products.found
    assert products.refused[reason] == 1
    assert reason in "\n".join(products.lines())


def test_a_product_in_fp32_needs_permission_for_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors((32, 16), (16, 24), (24, 16), dtype=torch.float32)
    refused = found_forward(feed_forward, *inputs)
    assert not refused.found
    assert any("TF32" in reason for reason in refused.refused)
    monkeypatch.setattr("nostall.fusion.products.rules.allows_tf32", lambda: True)
    assert found_forward(feed_forward, *inputs).found


def test_a_scaled_addmm_is_refused() -> None:
    def program(c: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(c, x, w, beta=0.5))

    captured = captured_forward(program, *tensors((32, 24), (32, 16), (16, 24)))
    (call,) = filter(None, map(product_call, captured.values))
    assert refusal(call) == "addmm with alpha or beta other than 1"


def test_a_product_with_a_vector_is_refused() -> None:
    products = found_forward(feed_forward, *tensors((1, 16), (16, 24), (24, 16)))
    assert not products.found
    assert any("a vector" in reason for reason in products.refused)


def test_a_dynamic_size_is_refused_in_words() -> None:
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx import Graph as FxGraph
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    graph = FxGraph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    node = graph.call_function(torch.ops.aten.mm.default, (left, right))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    left.meta["val"] = mode.from_tensor(
        torch.randn(6, 4), symbolic_context=sizes, source=ConstantSource("left")
    )
    with mode:
        right.meta["val"] = torch.empty(4, 8)
        node.meta["val"] = torch.mm(left.meta["val"], right.meta["val"])
    call = product_call(node)
    assert call is not None and refusal(call) == "a product of a dynamic size"


def test_an_operand_that_is_changed_in_place_is_refused() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx import Graph as FxGraph
    from torch.fx import GraphModule

    from nostall.fusion.capture import capture
    from nostall.fusion.products.find import find_products

    aten, graph = torch.ops.aten, FxGraph()
    with FakeTensorMode():
        left, right = graph.placeholder("left"), graph.placeholder("right")
        left.meta["val"] = torch.empty(8, 4, dtype=torch.float16)
        right.meta["val"] = torch.empty(4, 8, dtype=torch.float16)
        node = graph.call_function(aten.mm.default, (left, right))
        read = graph.call_function(aten.tanh.default, (node,))
        changed = graph.call_function(aten.copy_.default, (right, right))
        for each in (node, read, changed):
            each.meta["val"] = each.target(*(x.meta["val"] for x in each.args))
    graph.output((read,))
    products = find_products(capture(GraphModule({}, graph)))
    assert not products.found and products.refused[CHANGED] == 1


def test_kernels_do_not_need_values_that_are_computed_from_their_results() -> None:
    """A reader whose other operand comes from a second product of the result is left out."""

    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = torch.tanh(x @ w)
        return y + y @ v

    first = found_forward(program, *tensors((32, 16), (16, 24), (24, 24))).found[0]
    assert operators(first) == ["cast", "tanh"]


def test_graphs_of_equal_layers_are_equal() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(x @ w) @ v
        return x

    products = found_forward(program, *tensors((32, 16), (16, 24), (24, 16)))
    assert len(with_readers(products)) == 2
    assert len({each.kernel.graph.key for each in with_readers(products)}) == 1


def test_results_have_all_elements_of_the_product() -> None:
    products = found_forward(swiglu, *tensors((32, 16), (16, 24), (16, 24), (24, 16)))
    for each in with_readers(products):
        graph: Graph = each.kernel.graph
        assert all(math.prod(graph[i].shape) == 32 * 24 for i in graph.outputs)


def test_the_gradient_of_a_bias_is_reduced_by_the_kernel_of_a_product() -> None:
    def program(x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x @ first + bias) @ second

    reducing, plain = found_backward(program, *tensors((32, 16), (16, 24), (24,), (24, 16))).found
    assert operators(reducing) == [*operators(plain), "sum"]
    assert len(reducing.kernel.graph.outputs) == len(plain.kernel.graph.outputs) + 1
    assert reducing.bytes_saved > plain.bytes_saved


def test_what_is_widened_for_a_reduction_is_not_written() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = torch.relu(x @ w).float()
        return y - y.mean(0)

    reducing, *_ = found_forward(program, *tensors((32, 16), (16, 24))).found
    graph = reducing.kernel.graph
    assert [graph[i].op for i in graph.outputs] == ["relu", "mul"]
    by_rows = found_forward(lambda x, w: torch.softmax(x @ w, -1), *tensors((32, 16), (16, 24)))
    assert not any(each.kernel.reductions for each in by_rows.found)


def test_a_mean_behind_a_product_is_a_reduction_with_its_scaling() -> None:
    def program(x: Tensor, w: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        total = kept + x @ w
        return total, total.float().square().mean(-1)

    reducing, plain = found_forward(program, *tensors((32, 16), (16, 24), (32, 24))).found
    assert operators(reducing)[-3:] == ["square", "sum", "mul"]
    assert "square" not in operators(plain), "Inductor computes it with the sum"
    partial = found_forward(
        lambda x, w: (x @ w).view(8, 4, 24).sum(1), *tensors((32, 16), (16, 24))
    )
    assert not partial.found
