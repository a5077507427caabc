"""Peephole rewrite of 1 + tanh(x) and 1 + erf(x): kernels with and without it."""

from __future__ import annotations

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph

FLAT = KernelPlan("thread", 1, (128,), 1)
SHAPE = (4, 96)


def source(graph: Graph, plan: KernelPlan = FLAT, operators: tuple[int, ...] = ()) -> str:
    return emit(plan_kernel(schedule_operators(graph, operators or graph.operators), plan)).source


@pytest.mark.parametrize("op", ["tanh", "erf"])
@pytest.mark.parametrize("one_first", [False, True])
def test_a_function_with_only_sums_with_one_as_users_is_not_computed(
    op: str, one_first: bool
) -> None:
    build = Builder()
    x, one = build.input(SHAPE), build.constant(1)
    inner = build(op, build("neg", x))
    terms = (one, inner) if one_first else (inner, one)
    text = source(build.graph(build("mul", x, build("add", *terms))))
    assert text.count(f"_{op}_plus_1(v") == 1
    assert f"_{op}(" not in text and "+ 1.0\n    #" not in text


def _graph_with_other_user(case: str) -> Graph:
    build = Builder()
    x = build.input(SHAPE)
    inner = build("tanh", x)
    if case == "another number":
        return build.graph(build("add", inner, build.constant(2.0)))
    if case == "a difference":
        return build.graph(build("sub", inner, build.constant(1.0)))
    if case == "itself":
        return build.graph(build("add", inner, inner))
    plus_one = build("add", inner, build.constant(1.0))
    if case == "a result":
        return build.graph(plus_one, inner)
    if case == "its derivative, too":
        return build.graph(build("mul", plus_one, build("square", inner)))
    assert case == "a view, too"
    return build.graph(build("mul", plus_one, build("view", inner, shape=SHAPE)))


@pytest.mark.parametrize(
    "case",
    ["another number", "a difference", "itself", "a result", "its derivative, too", "a view, too"],
)
def test_a_function_with_other_users_is_computed_once(case: str) -> None:
    text = source(_graph_with_other_user(case))
    assert "_plus_1" not in text
    assert text.count("_tanh(x") == 2  # definition and call


def test_an_addition_in_another_kernel_stays_an_addition() -> None:
    build = Builder()
    inner = build("tanh", build.input(SHAPE))
    total = build("add", inner, build.constant(1.0))
    graph = build.graph(build("neg", total))
    first, second = source(graph, operators=(inner,)), source(graph, operators=graph.operators[1:])
    assert "_tanh(" in first and "_plus_1" not in first
    assert "+ 1.0" in second and "tanh(" not in second.replace("= tanh(", "")


def test_a_value_in_shared_memory_has_the_same_form_in_all_passes() -> None:
    """Its maximum would not equal any element if the passes computed the sum in different forms."""
    build = Builder()
    x, one = build("cast", build.input((3, 300), "float16"), dtype="float32"), build.constant(1.0)
    inner = build("tanh", x)
    highest = build("amax", build("add", inner, one), dims=(1,), keepdim=True)
    graph = build.graph(build("sub", build("add", one, inner), highest))
    keep_all, keep_less = (
        source(graph, KernelPlan("shared", 1, (64,), 1, 1, option)) for option in (0, 1)
    )
    assert ".store(v" in keep_all and "_plus_1" not in keep_all
    # One in the full iterations of each pass and one after them; one definition.
    assert keep_all.count("+ 1.0\n") == keep_all.count("= 1.0 +") == 2
    assert keep_less.count("_tanh_plus_1(") == 1 + 2 * 2
