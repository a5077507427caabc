"""Kernels inserted into FX graphs: order of nodes, and random numbers."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx import Graph as FxGraph  # noqa: E402
from torch.fx import GraphModule  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

from nostall.attach.torch_compile.rewrite import matching, nodes, rewrite  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import (  # noqa: E402
    KernelFilter,
    RewriteResult,
)
from nostall.attach.torch_compile.rewrite.nodes import OrderingConflict, random_edges  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from tests.unit.fusion.capture.tracing import inductor_dropout  # noqa: E402


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))


def test_nodes_are_sorted_topologically_but_never_moved_past_a_mutation() -> None:
    aten = torch.ops.aten
    graph = FxGraph()
    x = graph.placeholder("x")
    late = graph.call_function(aten.exp.default, (x,))
    read = graph.call_function(aten.neg.default, (x,))
    mutation = graph.call_function(aten.copy_.default, (x, late))
    output = graph.output((read, mutation))
    with graph.inserting_before(output):
        call = graph.call_function(aten.sin.default, (late,))
    read.args = (call,)
    position = {x: 0, late: 1, call: 1, read: 2, mutation: 3, output: 4}
    nodes.sort_by_position(graph, position)
    graph.lint()
    order = [node.name for node in (x, late, call, read, mutation)]
    assert [node.name for node in graph.nodes] == [*order, "output"]
    call.args = (mutation,)
    with pytest.raises(OrderingConflict):
        nodes.sort_by_position(graph, position)


def test_a_call_that_checkpointing_repeats_is_no_mutation() -> None:
    """Checkpointing wraps attention, whether it draws random numbers or not."""
    from torch._prims.rng_prims import run_with_rng_state

    aten = torch.ops.aten
    graph = FxGraph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    late = graph.call_function(aten.exp.default, (x,))
    repeated = graph.call_function(run_with_rng_state, (state, aten.dropout.default, late, 0.0))
    output = graph.output((repeated,))
    position = {x: 0, state: 1, repeated: 2, late: 3, output: 4}
    nodes.sort_by_position(graph, position)
    graph.lint()
    assert random_edges([repeated, repeated]) == [(repeated, repeated)]


def test_arithmetic_of_sizes_is_no_mutation() -> None:
    """A value before it may be computed by a kernel behind it."""
    aten = torch.ops.aten
    graph = FxGraph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    size = graph.call_function(operator.mul, (rows, 2))
    size.meta["val"] = ShapeEnv().create_unbacked_symint()
    kernel = graph.call_function(aten.expand.default, (x, [size, 4]))
    value = graph.call_function(aten.neg.default, (kernel,))
    output = graph.output((value,))
    position = {x: 0, rows: 1, value: 2, size: 3, kernel: 4, output: 5}
    nodes.sort_by_position(graph, position)
    graph.lint()
    del size.meta["val"]
    with pytest.raises(OrderingConflict):
        nodes.sort_by_position(graph, position)


def test_random_numbers_are_drawn_in_their_original_order() -> None:
    aten = torch.ops.aten
    graph = FxGraph()
    x = graph.placeholder("x")
    late = graph.call_function(aten.exp.default, (x,))
    first = graph.call_function(aten.rand_like.default, (late,))
    second = graph.call_function(aten.rand_like.default, (x,))
    output = graph.output((first, second))
    # A kernel whose result the first draw reads comes after the second draw.
    position = {x: 0, first: 1, second: 2, late: 3, output: 5}
    nodes.sort_by_position(graph, position)
    graph.lint()
    draws = [node for node in graph.nodes if node in (first, second)]
    assert draws == [first, second]


@pytest.mark.parametrize("depends", [True, False])
def test_a_graph_whose_random_numbers_depend_on_its_kernels_is_not_changed(
    depends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward pass may draw the same numbers again, in a kernel of another form."""
    monkeypatch.setattr(matching, "numbers_depend_on_kernels", lambda: depends)
    module, result = inductor_dropout("cuda"), RewriteResult()
    before = str(module.graph)
    rewrite.insert_kernels(module, KernelStore(), KernelFilter("all"), result)
    assert (str(module.graph) == before) == depends
    assert (result.kernels == []) == depends
    reason = ("random numbers that depend on the kernel they are in", "whole graph")
    assert (reason in result.not_fused) == depends


def layers_with_dropout(seed_indices: tuple[int, ...], seeds: int) -> GraphModule:
    """Layers one after the other as in Inductor's graphs, each with the seed of its index.

    Each layer ends with a sum, so that it is fused.
    """
    from torch._inductor import inductor_prims

    aten, graph = torch.ops.aten, FxGraph()

    def set_value(node: Any, shape: tuple[int, ...], dtype: Any = torch.float32) -> Any:
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
        return node

    def call(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], dtype: Any) -> Any:
        return set_value(graph.call_function(target, args), shape, dtype)

    with FakeTensorMode():
        x = set_value(graph.placeholder("x"), (64, 64))
        vector = set_value(graph.placeholder("seeds"), (seeds,), torch.int64)
        for index in seed_indices:
            seed = call(inductor_prims.lookup_seed, (vector, index), (), torch.int64)
            drawn = call(inductor_prims.random, ([64, 64], seed, "rand"), (64, 64), torch.float32)
            narrow = call(
                torch.ops.prims.convert_element_type.default,
                (drawn, torch.bfloat16),
                (64, 64),
                torch.bfloat16,
            )
            kept = call(aten.gt.Scalar, (narrow, 0.1), (64, 64), torch.bool)
            y = call(aten.mul.Tensor, (x, kept), (64, 64), torch.float32)
            total = call(aten.sum.dim_IntList, (y, [1], True), (64, 1), torch.float32)
            z = call(aten.sub.Tensor, (y, total), (64, 64), torch.float32)
            x = call(aten.mm.default, (z, z), (64, 64), torch.float32)
        graph.output((x,))
    return GraphModule({}, graph)


def insert_kernels(module: GraphModule, monkeypatch: pytest.MonkeyPatch) -> RewriteResult:
    from nostall.fusion.capture import operator_rules as random_rules

    for capturing in (matching, random_rules):
        monkeypatch.setattr(capturing, "numbers_depend_on_kernels", lambda: False)
    result = RewriteResult()
    rewrite.insert_kernels(module, KernelStore(), KernelFilter(), result)
    module.graph.lint()
    return result


def test_layers_with_different_seeds_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads an aligned pair of seeds that contains its own."""
    module = layers_with_dropout((0, 2, 4), seeds=6)
    result = insert_kernels(module, monkeypatch)
    assert len(result.kernels) == 3 and len(set(result.kernels)) == 1
    pairs = module.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    assert [node.args[2:4] for node in pairs] == [(0, 2), (2, 4), (4, 6)]
    record, _ = KernelStore().load_kernel(result.kernels[0])
    assert [tensor.shape for tensor in record.inputs if tensor.dtype == "int64"] == [(2,)]
    targets = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert not [name for name in targets if "prims" in name]


def test_seeds_at_odd_indices_and_a_last_one_without_pair_have_own_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = insert_kernels(layers_with_dropout((0, 1, 2), seeds=3), monkeypatch)
    assert len(set(result.kernels)) == 3


def test_random_numbers_are_compared_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor does not round them either: otherwise one element of 7,000 would differ."""
    module = layers_with_dropout((0,), seeds=2)
    (kernel,) = insert_kernels(module, monkeypatch).kernels
    _, source = KernelStore().load_kernel(kernel)
    assert "tl.rand(" in source
    assert "bfloat16" not in source


def test_residual_norm_and_block_quantisation_become_one_call() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from tests.unit.fusion.quantised_norms import by_block, chain, hand_written_norm

    program = chain(hand_written_norm, by_block(torch.float8_e4m3fn))
    with FakeTensorMode():
        rows = [torch.empty(4, 512, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        weight = torch.empty(4096, dtype=torch.bfloat16, device="cuda")
        module = make_fx(program)(*rows, weight)
    result = RewriteResult()
    rewrite.insert_kernels(module, KernelStore(), KernelFilter(), result)
    module.graph.lint()
    target = torch.ops.nostall.stitched.default
    assert len(module.graph.find_nodes(op="call_function", target=target)) == 1
    assert not result.not_fused


def test_kernels_may_compute_the_same_call_again() -> None:
    """The cast of ``x`` is part of both kernels; neither writes it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def norm_in_blocks(x: Any) -> Any:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        blocks = normed.view(2048, 128, 96)  # no power of two: a kernel of their own
        return blocks / blocks.abs().amax(-1, keepdim=True)

    with FakeTensorMode():
        x = torch.empty(2048, 12288, dtype=torch.float16, device="cuda")
        module = make_fx(norm_in_blocks)(x)
    result = RewriteResult()
    rewrite.insert_kernels(module, KernelStore(), KernelFilter("all"), result)
    module.graph.lint()
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.nostall.stitched.default)
    assert len(calls) == 2
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    assert all(placeholder in call.args[0] for call in calls)
    records = [KernelStore().load_kernel(name)[0] for name in result.kernels]
    wide = [t for r in records for t in (*r.inputs, *r.outputs) if t.dtype == "float32"]
    assert (2048, 12288) not in [tensor.shape for tensor in wide]


def test_attention_draws_random_numbers_only_with_dropout() -> None:
    q = torch.ops.aten._scaled_dot_product_efficient_attention.default
    graph = FxGraph()
    x = graph.placeholder("x")
    calls = [
        graph.call_function(q, (x, x, x, None, True, 0.5)),
        graph.call_function(q, (x, x, x, None, True)),
        graph.call_function(q, (x, x, x, None, True), {"dropout_p": 0.1}),
        graph.call_function(torch.ops.aten.rand_like.default, (x,)),
    ]
    assert random_edges(calls) == [(calls[0], calls[2]), (calls[2], calls[3])]
