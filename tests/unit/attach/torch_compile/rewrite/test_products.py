"""Kernels of matrix products inserted into FX graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.fx import GraphModule  # noqa: E402

from nostall.attach.torch_compile.measure.baselines import copy_graph  # noqa: E402
from nostall.attach.torch_compile.measure.plan_tuning import product_kernels  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import (  # noqa: E402
    PRODUCTS_ONLY,
    KernelFilter,
    RewriteResult,
    match_key,
)
from nostall.attach.torch_compile.rewrite.products import product_record, products_of  # noqa: E402
from nostall.attach.torch_compile.rewrite.rewrite import insert_all, insert_products  # noqa: E402
from nostall.attach.torch_compile.runtime.custom_op import STITCHED_OP  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.records import RegionRecord  # noqa: E402
from nostall.attach.torch_compile.store.regions import region_key  # noqa: E402
from nostall.fusion.capture import inference_graph  # noqa: E402
from nostall.fusion.hardware import H200  # noqa: E402
from tests.unit.fusion.products.programs import (  # noqa: E402
    AsModule,
    down_projection,
    feed_forward,
    hand_written_norm,
    residual,
    swiglu,
    tensors,
)

SWIGLU = ((32, 16), (16, 32), (16, 32), (32, 16))
RESIDUAL = ((32, 16), (16, 32), (32,), (32, 32), (32, 32))


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))


def traced(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> GraphModule:
    return inference_graph(AsModule(function), *tensors(*shapes))


def records(
    module: GraphModule, *, pairs: bool = True, prologues: bool = False
) -> dict[str, RegionRecord]:
    """Records of the first configuration for all products, as if each was measured faster.

    ``prologues``: only of kernels that compute their left operand, otherwise only of others.
    """
    found_and_captured = products_of(module)
    assert found_and_captured is not None
    made = {}
    for found in found_and_captured[1].found:
        if (pairs or len(found.calls) == 1) and bool(found.kernel.prologue) is prologues:
            _, kernel, inputs = next(product_kernels(found.kernel, KernelStore(), H200))
            made[region_key(found.kernel.graph)] = product_record(found, kernel, inputs)
    return made


def calls(module: GraphModule) -> list[str]:
    """The products and the inserted kernels of a graph."""
    names = {STITCHED_OP: "kernel", torch.ops.aten.mm.default: "mm"}
    names[torch.ops.aten.addmm.default] = "addmm"
    found = [names.get(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return [name for name in found if name]


def test_a_product_and_its_readers_become_one_call() -> None:
    module, result = traced(feed_forward, (32, 16), (16, 32), (32, 16)), RewriteResult()
    found = records(module)
    assert insert_products(module, KernelFilter(regions=found, products=True), result) == 1
    module.graph.lint()
    assert calls(module) == ["kernel", "mm"]
    assert not any("erf" in str(node.target) for node in module.graph.nodes)
    assert len(result.kernels) == len(result.regions) == 1


def test_a_reduction_of_a_products_readers_is_a_result_of_its_kernel() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.addmm(bias, x, weight).float()
        return y - y.mean(0)

    module = traced(function, (32, 16), (16, 32), (32,))
    kernel_filter = KernelFilter(regions=records(module), products=True)
    assert insert_products(module, kernel_filter, RewriteResult()) == 1
    module.graph.lint()
    assert calls(module) == ["kernel"]
    assert not any("mean" in str(node.target) for node in module.graph.nodes)


def test_without_a_record_a_product_stays_with_cublas() -> None:
    module, result = traced(feed_forward, (32, 16), (16, 32), (32, 16)), RewriteResult()
    before = str(module.graph)
    assert insert_products(module, KernelFilter(products=True), result) == 0
    assert str(module.graph) == before
    assert "1 matrix products with elementwise readers" in result.explanations[0][0]


def test_a_kernel_that_was_inaccurate_is_not_inserted() -> None:
    module = traced(feed_forward, (32, 16), (16, 32), (32, 16))
    (key, record), *_ = records(module).items()
    (step,) = record.steps
    found_and_captured = products_of(module)
    assert found_and_captured is not None
    graph = found_and_captured[1].found[0].kernel.graph
    refused = frozenset({match_key(graph.key, step.operators)})
    kernel_filter = KernelFilter(kept_in_inductor=refused, regions={key: record}, products=True)
    assert insert_products(module, kernel_filter, RewriteResult()) == 0


def test_a_pair_takes_precedence_over_its_products() -> None:
    module = traced(swiglu, *SWIGLU)
    kernel_filter = KernelFilter(regions=records(module), products=True)
    assert insert_products(module, kernel_filter, RewriteResult()) == 1
    assert calls(module) == ["kernel", "mm"]


def test_one_product_of_a_pair_reads_the_other_from_memory() -> None:
    module = traced(swiglu, *SWIGLU)
    kernel_filter = KernelFilter(regions=records(module, pairs=False), products=True)
    assert insert_products(module, kernel_filter, RewriteResult()) == 1
    module.graph.lint()
    assert sorted(calls(module)) == ["kernel", "mm", "mm"]


def test_residuals_are_read_and_written_by_the_kernels() -> None:
    module = traced(residual, *RESIDUAL)
    kernel_filter = KernelFilter(regions=records(module), products=True)
    assert insert_products(module, kernel_filter, RewriteResult()) == 2
    module.graph.lint()
    assert calls(module) == ["kernel", "kernel"]


def test_a_left_operand_that_the_kernel_computes_is_not_written() -> None:
    module = traced(down_projection, (2, 16, 32), (2, 16, 32), (16, 32), (2, 16, 16))
    kernel_filter = KernelFilter(regions=records(module, prologues=True), products=True)
    assert insert_products(module, kernel_filter, RewriteResult()) == 1
    module.graph.lint()
    assert calls(module) == ["kernel"]
    names = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert not any(name in text for name in ("sigmoid", "mul", "add") for text in names)


def test_a_norm_whose_scale_is_applied_in_the_kernel_keeps_its_reduction() -> None:
    """The cast that both read is computed twice, so no path leaves the kernel and returns."""

    def program(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return hand_written_norm(x, scale) @ weight

    module = traced(program, (32, 16), (16,), (16, 32))
    kernel_filter = KernelFilter(regions=records(module, prologues=True), products=True)
    assert insert_products(module, kernel_filter, RewriteResult()) == 1
    module.graph.lint()
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert sum("mean" in name for name in names) == 1
    assert not any("rsqrt" in name for name in names)


def test_an_operator_between_two_products_belongs_to_one_of_their_kernels() -> None:
    module = traced(swiglu, *SWIGLU)
    regions = {**records(module), **records(module, prologues=True)}
    kernel_filter = KernelFilter(regions=regions, products=True)
    assert insert_products(module, kernel_filter, RewriteResult()) == 1
    module.graph.lint()
    assert calls(module) == ["kernel", "mm"]


def test_results_keep_their_layouts() -> None:
    module = traced(residual, *RESIDUAL)
    (output,) = module.graph.output_node().args[0]
    before = output.meta["val"]
    kernel_filter = KernelFilter(regions=records(module), products=True)
    insert_products(module, kernel_filter, RewriteResult())
    (output,) = module.graph.output_node().args[0]
    after = output.meta["val"]
    assert (after.shape, after.stride(), after.dtype) == (
        before.shape,
        before.stride(),
        before.dtype,
    )


def test_products_only_leaves_all_other_kernels_to_inductor() -> None:
    def function(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return feed_forward(x, first, second).softmax(-1)

    module = traced(function, (32, 16), (16, 32), (32, 16))
    found = records(module)
    for products_only, expected in ((False, ["kernel", "mm", "kernel"]), (True, ["kernel", "mm"])):
        rewritten, result = copy_graph(module), RewriteResult()
        kernel_filter = KernelFilter(regions=found, products=True, products_only=products_only)
        insert_all(rewritten, KernelStore(), kernel_filter, result)
        rewritten.graph.lint()
        assert calls(rewritten) == expected
        assert ((PRODUCTS_ONLY, "a kernel") in result.not_fused) == products_only
        assert len(result.explanations) == 1


def test_a_graph_has_one_explanation() -> None:
    module, result = traced(swiglu, *SWIGLU), RewriteResult()
    insert_all(module, KernelStore(), KernelFilter(products=True), result)
    (lines,) = result.explanations
    assert "regions" in lines[0]
    assert any("2 matrix products with elementwise readers" in line for line in lines[1:])
