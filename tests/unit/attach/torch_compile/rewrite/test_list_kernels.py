"""Kernels over lists: results beside fp64, what is changed in place, and what stays."""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.fx.experimental.symbolic_shapes import (  # noqa: E402
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from nostall.attach.torch_compile.measure.baselines import copy_graph  # noqa: E402
from nostall.attach.torch_compile.rewrite import list_kernels  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import (  # noqa: E402
    PRODUCTS_ONLY,
    KernelFilter,
    RewriteResult,
)
from nostall.attach.torch_compile.rewrite.list_kernels import (  # noqa: E402
    MUTATION_INSIDE,
    insert_list_kernels,
)
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.fusion.hardware import H200  # noqa: E402
from tests.unit.fusion.codegen.interpreter_process import run_interpreted  # noqa: E402

MODULE = "tests.unit.attach.torch_compile.rewrite.list_programs"
ROUNDING_ERRORS = 4.0
"""Errors allowed beside fp64 in units of the dtype's, unless eager PyTorch's are larger."""
EXPECTED = {
    # Program: kernels, launches, tensors changed in place, copies that stay.
    "adam in launches": (2, 4, 32, 0),
    "norm in launches": (2, 7, 8, 0),
    "norm inf of NaN": (2, 3, 3, 0),
    "clipped update": (2, 3, 16, 0),
    "master copy": (1, 1, 24, 0),
    "old values": (4, 5, 16, 0),
    "twice": (1, 1, 0, 3),
    "own element": (1, 1, 0, 3),
    "halves": (1, 1, 3, 0),
    "crossed": (2, 2, 4, 4),
    "moved behind": (1, 1, 0, 6),
    "loop": (1, 1, 15, 3),
    "odd addresses": (1, 1, 8, 0),
}
SLOW = {
    "adam": (2, 2, 32, 0),
    "norm 1": (2, 3, 8, 0),
    "norm 2": (2, 3, 8, 0),
    "norm 2 of infinity": (2, 3, 3, 0),
    "numbers": (1, 1, 0, 0),
    "norm inf": (2, 3, 3, 0),
    "norm 2 of NaN": (2, 3, 3, 0),
    "norm inf of infinity": (2, 3, 3, 0),
    "bf16 norm": (2, 3, 8, 0),
}


@pytest.fixture(scope="module")
def ran() -> Any:
    return run_interpreted(MODULE, *EXPECTED)


def check(row: Any) -> None:
    """The results are as exact as eager PyTorch's, and all kernels are called."""
    assert 0 <= row["error"] <= max(ROUNDING_ERRORS, 2 * row["eager error"])
    assert row["called"] == row["kernels"] > 0


@pytest.mark.parametrize("name", EXPECTED)
def test_results_are_exact_and_written_in_place_where_that_is_legal(ran: Any, name: str) -> None:
    row = ran[name]
    check(row)
    counts = row["kernels"], row["launches"], row["changed"], row["copies"]
    assert counts == EXPECTED[name]
    assert not row["stay"]


@pytest.mark.slow
def test_random_expressions_and_all_norms_agree_with_fp64() -> None:
    randoms = [f"random {seed}" for seed in range(12)]
    rows = run_interpreted(MODULE, *SLOW, *randoms)
    for name, row in rows.items():
        check(row)
        counts = row["kernels"], row["launches"], row["changed"], row["copies"]
        assert counts == SLOW.get(name, counts), name


def inserted(function: Any, *arguments: Any) -> tuple[Any, RewriteResult, list[str]]:
    module = make_fx(function, tracing_mode="fake")(*arguments)
    result = RewriteResult()
    lines = insert_list_kernels(module, KernelStore(), KernelFilter(), result)
    module.graph.lint()
    return module, result, lines


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))


def tensors(*shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    return [torch.ones(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("function", "lists", "reason"),
    [
        (lambda x: torch._foreach_norm(x, 3), tensors((5,)), "a norm of order 3; "),
        (lambda x: torch._foreach_max(x), tensors((5,)), "a list operator without a rule"),
        (lambda x: torch._foreach_exp(x), tensors((5,), dtype=torch.float64), "dtype float64"),
        (
            lambda x: torch._foreach_mul(x, [x[0].sum(), x[0].sum()]),
            tensors((5,), (6,)),
            "",
        ),
        (
            lambda x: torch._foreach_add(x, [x[0][:1].expand(5), x[0]]),
            tensors((5,), (5,)),
            "gaps or overlaps",
        ),
        (
            lambda x: torch._foreach_addcdiv(x, x, x, [0.5, 2.0]),
            tensors((5,), (6,)),
            "operands that the operator of one tensor does not take",
        ),
        (
            lambda x: torch._foreach_mul(x, [1j, 2j]),
            tensors((5,), (6,), dtype=torch.complex64),
            "a list of complex or dynamic numbers",
        ),
        (lambda x: torch._foreach_add(x, x[::-1]), tensors((5, 1), (1, 5)), "are broadcast"),
        (
            lambda x: torch._foreach_neg([x[0], x[1].half()]),
            tensors((5,), (6,)),
            "a list of several dtypes",
        ),
    ],
)
def test_what_no_kernel_computes_stays_with_its_reason(
    function: Any, lists: list[Any], reason: str
) -> None:
    _, result, lines = inserted(function, lists)
    stay = list(result.not_fused)
    if not reason:
        assert not stay
        return
    ((found, name),) = stay
    assert reason in found
    assert not result.kernels
    assert any(name in line and found in line for line in lines)


def test_a_graph_that_changes_tensors_between_its_calls_is_left_alone() -> None:
    def function(x: list[Any]) -> Any:
        y = torch._foreach_mul(x, 2)
        y[0].add_(1)
        return torch._foreach_exp(y)

    _, result, lines = inserted(function, tensors((5,), (6,)))
    assert list(result.not_fused) == [(MUTATION_INSIDE, "whole graph")]
    assert MUTATION_INSIDE in lines[0]


def test_a_tensor_of_the_cpu_is_no_operand_of_a_kernel() -> None:
    with FakeTensorMode():
        lists = [torch.ones(5, device="cuda"), torch.ones(6, device="cuda")]
        rate = torch.ones(())
    module = make_fx(lambda x, y: torch._foreach_mul(x, y))(lists, rate)
    result = RewriteResult()
    insert_list_kernels(module, KernelStore(), KernelFilter(), result)
    assert not result.kernels
    assert "tensors on several devices" in str(result.not_fused)


def test_updates_by_a_dynamic_number_stay_with_inductor() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    batch = mode.from_tensor(torch.ones(7), symbolic_context=sizes)
    weights = [mode.from_tensor(torch.ones(5), static_shapes=True) for _ in range(4)]
    module = make_fx(lambda x, y: [each * x.shape[0] for each in y])(batch, weights)
    assert not insert_list_kernels(module, KernelStore(), KernelFilter(), RewriteResult())


def test_a_graph_without_lists_is_not_touched() -> None:
    module, result, lines = inserted(lambda x: x.exp(), torch.ones(3))
    assert not result.kernels
    assert not lines
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.exp.default
    ]


def test_kernels_that_stay_with_inductor_are_not_inserted() -> None:
    def function(x: list[Any]) -> Any:
        return torch._foreach_exp(x)

    lists = tensors((5,), (6,))
    _, result, _ = inserted(function, lists)
    module = make_fx(function, tracing_mode="fake")(lists)
    again = RewriteResult()
    excluded = KernelFilter(kept_in_inductor=frozenset(result.kernels))
    insert_list_kernels(module, KernelStore(), excluded, again)
    assert not again.kernels
    assert any("not faster" in reason for reason, _ in again.not_fused)


DTYPES = [torch.float32] * 5 + [torch.bfloat16] * 6


def loop(lists: list[list[Any]]) -> Any:
    """Moving averages, written as a loop, that exchange two tensors; one result is read, too."""
    results = []
    for mean, value in zip(*lists, strict=True):
        new, other = mean * 0.9 + value, torch.sqrt(mean) - value * 0.5
        value.copy_(other)
        mean.copy_(new)
        results.append(new)
    return results


def targets(module: Any) -> list[str]:
    return sorted(str(n.target) for n in module.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_updates_whose_list_stays_with_inductor_are_written_as_a_loop_again(kept: int) -> None:
    """Two updates of five tensors in fp32 are one kernel, those of six in bf16 another one."""

    def lists() -> list[list[Any]]:
        torch.manual_seed(0)
        return [[torch.rand(7).to(dtype) for dtype in DTYPES] for _ in range(2)]

    module, store = make_fx(loop, tracing_mode="fake")(lists()), KernelStore()
    before, all_kernels, result = targets(module), RewriteResult(), RewriteResult()
    insert_list_kernels(copy_graph(module), store, KernelFilter(), all_kernels)
    assert len(all_kernels.kernels) == 2
    kernel_filter = KernelFilter(kept_in_inductor=frozenset(all_kernels.kernels[:kept]))
    head, *_ = insert_list_kernels(module, store, kernel_filter, result)
    module.graph.lint()
    assert result.kernels == all_kernels.kernels[kept:]
    grouped = [22, 12, 0][kept]
    assert f"equal updates of {grouped} tensors, written as a loop" in head or not grouped
    assert not any("_foreach" in name for name in targets(module))
    assert targets(module).count("aten.sqrt.default") == [0, 5, 11][kept]
    if grouped:
        return  # kernels run on a GPU or in an interpreter
    assert "written as a loop" not in head and targets(module) == before
    changed, expected = lists(), lists()
    assert all(map(torch.equal, module(changed), loop(expected)))
    for found, wanted in zip(changed, expected, strict=True):
        assert all(map(torch.equal, found, wanted))


def test_with_products_only_lists_and_loops_are_not_touched() -> None:
    def function(x: list[Any]) -> Any:
        return torch._foreach_exp(x)

    def doubled(x: list[Any]) -> Any:
        return [each * 2 for each in x]

    module = make_fx(function, tracing_mode="fake")(tensors((5,), (6,)))
    result, only = RewriteResult(), KernelFilter(products_only=True)
    lines = insert_list_kernels(module, KernelStore(), only, result)
    assert not result.kernels
    assert lines == [f"lists of tensors stay with Inductor: {PRODUCTS_ONLY}"]
    module = make_fx(doubled, tracing_mode="fake")(tensors(*[(5,)] * 6))
    before = str(module.graph)
    assert insert_list_kernels(module, KernelStore(), only, result) == []
    assert str(module.graph) == before


def test_the_plan_is_that_of_the_gpu_of_the_first_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: list[Any]) -> Any:
        return torch._foreach_norm(x)

    asked: list[Any] = []
    large, names = tensors((1 << 24,)), set()
    for sms in (132, 16):
        small = replace(H200, sms=sms)
        monkeypatch.setattr(list_kernels, "hardware_of", lambda x, y=small: asked.append(x) or y)
        _, result, _ = inserted(function, large)
        names.update(result.kernels)
    assert len(names) == 2
    assert asked == [torch.device("cpu")] * 2


def test_equal_lists_share_a_kernel_and_norms_are_one_vector() -> None:
    def function(x: list[Any], y: list[Any]) -> Any:
        first, second = torch._foreach_norm(x), torch._foreach_norm(y)
        return torch.cat([norm.unsqueeze(0) for norm in (*first, *second)])

    module, result, _ = inserted(function, tensors((5,), (6,)), tensors((5,), (6,)))
    assert len(result.kernels) == 2
    assert len(set(result.kernels)) == 1
    (joined,) = (n for n in module.graph.nodes if n.target is torch.ops.aten.cat.default)
    assert [node.target for node in joined.args[0]] == [operator.getitem] * 2


def test_nodes_that_a_pass_adds_without_metadata_are_read() -> None:
    def function(x: list[Any]) -> Any:
        return torch._foreach_exp(torch._foreach_neg(x))

    module = make_fx(function, tracing_mode="fake")(tensors((5,), (6,)))
    (negation,) = (node for node in module.graph.nodes if "_foreach_neg" in str(node.target))
    del negation.meta["val"]
    result = RewriteResult()
    insert_list_kernels(module, KernelStore(), KernelFilter(), result)
    assert len(result.kernels) == 1
