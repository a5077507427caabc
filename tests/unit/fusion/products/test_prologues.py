"""Tests of products that compute their left operand: which there are, and their source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor
from torch.nn import functional

from nostall.fusion.capture import capture, inference_graph, training_graphs
from nostall.fusion.capture.randomness import replace_random_ops
from nostall.fusion.codegen.tiling.product_config import (
    PROLOGUE_CONFIGS,
    PROLOGUE_REGISTERS,
    RESERVED_REGISTERS,
    ProductConfig,
    configs,
)
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.builder import Builder
from nostall.fusion.products.emit import emit_products
from nostall.fusion.products.find import FoundProduct, find_products, prologue_sources
from nostall.fusion.products.product_graph import ProductGraph
from tests.unit.fusion.codegen.sm90_code import opcodes
from tests.unit.fusion.products.programs import (
    AsModule,
    captured_forward,
    down_projection,
    feed_forward,
    found_backward,
    found_forward,
    hand_written_norm,
    swiglu,
    tensors,
)

DOWN = ((2, 16, 32), (2, 16, 32), (24, 32), (2, 16, 24))


def computed(function: Callable[..., object], *inputs: Tensor) -> list[FoundProduct]:
    """The kernels that compute the left operand of their products."""
    return [each for each in found_forward(function, *inputs).found if each.kernel.prologue]


def prologue(found: FoundProduct) -> set[str]:
    return {found.kernel.graph[i].op for i in found.kernel.prologue}


def epilogue(found: FoundProduct) -> set[str]:
    return {found.kernel.graph[i].op for i in found.kernel.epilogue}


def input_shapes(found: FoundProduct) -> list[tuple[int, ...]]:
    graph = found.kernel.graph
    return [graph[i].shape for i in graph.inputs]


def test_a_gate_is_computed_with_the_product_that_reads_it_with_and_without_readers() -> None:
    both, alone = computed(down_projection, *tensors(*DOWN))
    for found in (both, alone):
        assert {"sigmoid", "mul"} <= prologue(found) and "sigmoid" not in epilogue(found)
        shape = found.kernel.shape
        assert (shape.rows, shape.columns, shape.depth) == (32, 24, 32)
        assert shape.prologue_bytes == 4, "two tensors of 16 bits"
    assert "add" in epilogue(both) and "add" not in epilogue(alone)
    assert both.bytes_saved == alone.bytes_saved + 2 * 32 * 24
    assert alone.bytes_saved == 2 * (32 * 32 * 2) + 32 * 24 * 2


def test_a_norm_is_applied_where_it_is_read_and_its_statistics_are_a_vector() -> None:
    def program(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return hand_written_norm(x, scale) @ weight

    (found,) = computed(program, *tensors((32, 16), (16,), (16, 24)))
    assert "rsqrt" in prologue(found) and "square" not in prologue(found)
    assert sorted(input_shapes(found)) == [(16,), (16, 24), (32, 1), (32, 16)]
    (wide,) = found.repeated
    assert wide in found.operators, "the cast is computed again, not read in fp32"
    assert found.kernel.shape.prologue_bytes == 2


def test_a_pair_of_products_computes_its_left_operand_once() -> None:
    def program(x: Tensor, scale: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        normed = hand_written_norm(x, scale)
        return functional.silu(normed @ gate) * (normed @ up)

    (pair,) = computed(program, *tensors((32, 16), (16,), (16, 24), (16, 24)))
    assert len(pair.calls) == 2 and pair.kernel.shape.count == 2


def test_a_mask_and_a_cast_are_part_of_the_prologue() -> None:
    def dropped(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        return (x * mask * 2.0).to(torch.bfloat16) @ weight.to(torch.bfloat16)

    (found,) = computed(dropped, torch.randn(32, 16), torch.rand(32, 16) < 0.5, torch.randn(16, 24))
    assert found.kernel.left.dtype == "bfloat16"
    assert found.kernel.shape.prologue_bytes == 5, "fp32 and bool"


def test_halves_of_one_tensor_and_transposed_operands_are_read_in_place() -> None:
    def packed(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return (torch.sigmoid(gate) * up) @ weight

    def transposed(x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(x).t() @ y

    (found,) = computed(packed, *tensors((32, 64), (32, 24)))
    assert (32, 64) in input_shapes(found)
    (found,) = computed(transposed, *tensors((32, 16), (32, 24)))
    assert found.kernel.left.shape == (16, 32) and (32, 16) in input_shapes(found)


def _returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x)
    return y @ w, y


def _read_by_two_products(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x)
    return y @ w, y @ w.tanh()


def _both_operands(x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(x)
    return y @ y.t()


def _added(x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(x)
    return torch.addmm(y, y, w)


def _read_later(x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(x)
    return y + y @ w


def _part(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x)[:, :8] @ w[:8]


def _from_the_right(x: Tensor, w: Tensor) -> Tensor:
    return x @ torch.tanh(w)


def _vectors(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, :1] * x[:1]) @ w


def _summed(x: Tensor, w: Tensor) -> Tensor:
    return x.cumsum(0) @ w


@pytest.mark.parametrize(
    "program",
    [
        _returned,
        _read_by_two_products,
        _both_operands,
        _added,
        _read_later,
        _part,
        _from_the_right,
        _vectors,
        _summed,
    ],
)
def test_operands_that_something_else_needs_are_read(program: Callable[..., object]) -> None:
    assert not computed(program, *tensors((16, 16), (16, 16)))


def test_a_kernel_has_at_most_so_many_operators() -> None:
    """Each side alone has a kernel; both together have too many operators."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(40):
            x = torch.tanh(x)
        y = x @ w
        for _ in range(40):
            y = torch.tanh(y)
        return y

    inputs = tensors((32, 16), (16, 24), dtype=torch.float16)
    (alone,) = computed(program, *inputs)
    assert len(alone.kernel.prologue) > 40 and len(alone.kernel.epilogue) == 1
    assert any(len(each.kernel.epilogue) > 40 for each in found_forward(program, *inputs).found)


def test_random_numbers_are_not_drawn_again_for_each_tile() -> None:
    """Dropout whose mask is drawn, not read, stays outside of the prologue."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, training=True) @ w

    module = AsModule(program)
    traced = replace_random_ops(inference_graph(module, *tensors((32, 16), (16, 24))))
    captured = capture(traced)
    assert any(node.op == "random" for node in captured.graph)
    assert not any(each.kernel.prologue for each in find_products(captured).found)


def test_the_gradient_of_an_activation_is_read_if_the_weight_needs_it_too() -> None:
    """Two products read it: of the weight's gradient, and of the input's."""
    products = found_backward(feed_forward, *tensors((32, 16), (16, 24), (24, 16)))
    assert not any(each.kernel.prologue for each in products.found)


def test_the_derivative_of_an_activation_is_computed_if_weights_are_frozen() -> None:
    x, first, second = tensors((32, 16), (16, 24), (24, 16))
    graphs = training_graphs(AsModule(feed_forward), x.requires_grad_(), first, second)
    (found,) = [each for each in find_products(capture(graphs[1])).found if each.kernel.prologue]
    assert {"exp", "erf"} <= prologue(found)
    assert found.kernel.shape.depth == 24 and found.kernel.shape.prologue_bytes == 4


def test_the_report_counts_computed_operands_and_does_not_refuse_their_products() -> None:
    products = found_forward(down_projection, *tensors(*DOWN))
    assert "1 whose left operand the kernel can compute" in products.lines()[0]
    without_readers = found_forward(swiglu, *tensors((32, 16), (16, 24), (16, 24), (24, 16)))
    assert not without_readers.refused


def test_operators_before_the_norm_are_measured_with_it() -> None:
    def program(x: Tensor, kept: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + kept
        return hand_written_norm(total, scale) @ weight, total

    inputs = tensors((32, 16), (32, 16), (16,), (16, 24))
    captured = captured_forward(program, *inputs)
    (found,) = computed(program, *inputs)
    ops = {captured.graph[i].op for i in prologue_sources(captured.graph, found)}
    assert ops == {"add", "square", "sum", "mul"}
    inputs = tensors((32, 16), (16, 24), (24, 16))
    with_readers = found_forward(feed_forward, *inputs).found[0]
    assert not prologue_sources(captured_forward(feed_forward, *inputs).graph, with_readers)


def test_a_vector_that_is_needed_on_both_sides_is_computed_on_both() -> None:
    def program(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        factor = torch.sigmoid(scale)
        return ((x * factor) @ weight) * factor

    both, _ = computed(program, *tensors((32, 24), (24,), (24, 24)))
    assert "sigmoid" in prologue(both) & epilogue(both)
    assert not set(both.kernel.prologue) & set(both.kernel.epilogue)
    assert both.repeated == frozenset(), "no other kernel computes it"


# -- source ----------------------------------------------------------------------------------------


def gated_product(rows: int, columns: int, depth: int, dtype: str = "bfloat16") -> ProductGraph:
    """A gate and a scale of each row and column as prologue, and a residual as epilogue."""
    build = Builder()
    gate, up = build.input((rows, depth), dtype), build.input((rows, depth), dtype)
    scale = build("rsqrt", build.input((rows, 1)))
    value = build("mul", build("mul", gate, build("sigmoid", gate)), up)
    value = build("mul", build("mul", value, scale), build.input((depth,), dtype))
    left = build("copy", build("cast", value, dtype=dtype))
    right = build.input((depth, columns), dtype, (1, depth))
    product = build("cast", build("dot", left, right, dtype="float32"), dtype=dtype)
    return ProductGraph(build.graph(build("add", product, build.input((rows, columns), dtype))))


def test_values_of_a_row_are_computed_before_the_loop_over_the_depth() -> None:
    source = emit_products(gated_product(64, 64, 64), ProductConfig(32, 32, 32, 4, 3)).source
    head, _, loop = source.partition("for k in")
    assert "tl.rsqrt" in head and "tl.rsqrt" not in loop
    assert "_sigmoid(" in loop and "mask" not in loop


def test_the_operand_is_rounded_to_its_dtype_before_the_product() -> None:
    source = emit_products(gated_product(64, 64, 64), ProductConfig(32, 32, 32, 4, 3)).source
    assert "left = computed.to(tl.bfloat16)" in source
    assert "tl.dot(left, right_0" in source


def test_what_lies_behind_the_depth_is_zero() -> None:
    source = emit_products(gated_product(64, 64, 40), ProductConfig(32, 32, 32, 4, 3)).source
    assert "computed = tl.where(deep, " in source


def test_an_operand_of_vectors_alone_has_no_kernel() -> None:
    build = Builder()
    left = build("copy", build("mul", build.input((32, 1)), build.input((16,))))
    dot = build("copy", build("dot", left, build.input((16, 24))))
    with pytest.raises(BadFusion, match="no tensor"):
        emit_products(ProductGraph(build.graph(dot)), ProductConfig(16, 16, 16, 4, 2))


@pytest.mark.parametrize("rows", [16, 64, 8192])
def test_few_configurations_are_measured_and_they_fit(rows: int) -> None:
    shape = gated_product(rows, 4096, 4096).shape
    found = [*configs(shape)]
    assert 2 <= len(found) <= len(PROLOGUE_CONFIGS) <= 12
    for config in found:
        assert config.shared_bytes(shape) <= 227 * 1024
        threads = 32 * config.warps
        registers = config.rows * (config.columns + PROLOGUE_REGISTERS * config.depth) / threads
        assert registers <= min(255, 65536 / threads) - RESERVED_REGISTERS


@pytest.mark.slow
@pytest.mark.parametrize("config", [c for c in PROLOGUE_CONFIGS if c.rows >= 64], ids=str)
def test_large_tiles_use_tensor_cores_and_no_local_memory(
    config: ProductConfig, tmp_path: Path
) -> None:
    found = opcodes(emit_products(gated_product(4096, 4096, 4096), config), tmp_path)
    names = {name.partition(".")[0] for name in found}
    assert "HGMMA" in names and not names & {"STL", "LDL"}
    assert "LDGSTS" in names, "operands are copied while the product is computed"
    assert ("UTMALDG" in names) is config.descriptors
