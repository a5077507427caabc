"""Copies that may be rounded otherwise are refused if a comparison depends on them."""

from __future__ import annotations

import pytest

from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.regions import find_regions
from nostall.fusion.recompute.partial_reads import read_parts, views_of_parts
from nostall.fusion.recompute.rounding import may_change_decisions

pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.fusion.recompute import kernels as shared_values
from nostall.fusion.recompute.copies import Kernels

COMPUTATIONS = ["sum of a product", "product", "sum", "fp16 product", "cast of an fp16 product"]
ROUNDED = {"sum of a product", "fp16 product", "cast of an fp16 product"}
"""Those whose value depends on the kernel that computes it."""


def computed(build: Builder, what: str) -> int:
    dtype = "float16" if "fp16" in what else "float32"
    x, w = build.input((64, 4096), dtype), build.input((4096,), dtype)
    value = build("add" if what == "sum" else "mul", x, w)
    if what == "sum of a product":
        value = build("add", build("neg", value), build.input((4096,)))
    return build("cast", value, dtype="float32") if what.startswith("cast") else value


def decision(build: Builder, value: int, op: str) -> int:
    """A smooth or a discontinuous function of a value and its maximum over rows."""
    largest = build("amax", value, dims=(1,), keepdim=True)
    if op == "div":
        return build("div", value, largest)
    if op in ("floor", "cast"):
        ratio = build("div", value, largest)
        return build(op, ratio, dtype="int32") if op == "cast" else build(op, ratio)
    return build(op, value, largest)


@pytest.mark.parametrize("op", ["div", "eq", "lt", "floor", "cast"])
@pytest.mark.parametrize("what", COMPUTATIONS)
def test_a_value_whose_copy_may_round_otherwise_is_stored_for_comparisons(
    what: str, op: str
) -> None:
    build = Builder()
    value = computed(build, what)
    graph = build.graph(decision(build, value, op))
    # One kernel computes the value and its maximum, another one reads both.
    at = next(node.index for node in graph if node.op == "amax")
    groups = [tuple(i for i in graph.operators if (i <= at) == first) for first in (True, False)]
    changes = shared_values._changes(Kernels.of(graph, groups), set())
    changed = value in {change.key[0] for change in changes}
    assert changed == (op == "div" or what not in ROUNDED)


def test_a_value_that_is_only_computed_elsewhere_may_be_compared() -> None:
    build = Builder()
    value = computed(build, "fp16 product")
    graph = build.graph(build("floor", value))
    assert list(shared_values._changes(Kernels.of(graph, [(i,) for i in graph.operators]), set()))


def part_graph(what: str, op: str) -> Graph:
    """Half of a value, and the whole value, both read after one opaque operator."""
    build = Builder()
    x = build.opaque("mm", shape=(64, 4096), dtype="float32")
    heads = build("view", x, shape=(64, 2, 2048))
    value = build("mul", heads, build.input((2048,)))
    if what == "sum of a product":
        value = build("add", value, build.input((2048,)))
    elif what == "heavy":
        value = build("exp", value)
    half = build("slice", value, dim=2, start=0, step=1, shape=(64, 2, 1024))
    return build.graph(decision(build, build("view", half, shape=(64, 2048)), op), value)


@pytest.mark.parametrize("op", ["div", "eq", "floor"])
@pytest.mark.parametrize("what", ["sum of a product", "product", "heavy"])
def test_a_part_that_may_round_otherwise_stays_for_comparisons(what: str, op: str) -> None:
    graph = part_graph(what, op)
    changes = op == "div" or what == "product"
    assert (read_parts(graph) is not None) == changes
    assert bool(views_of_parts(graph)) == changes


def test_comparisons_of_the_whole_value_do_not_keep_a_part() -> None:
    build = Builder()
    x = build.input((4, 8))
    value = build("add", build("mul", x, x), build.input((8,)))
    half = build("slice", value, dim=1, start=0, step=1, shape=(4, 4))
    graph = build.graph(build("neg", half), build("floor", value))
    assert read_parts(graph) is not None


def test_a_comparison_of_other_values_is_no_obstacle() -> None:
    build = Builder()
    x = build.input((4, 8))
    value = build("add", build("mul", x, x), x)
    is_large = build("gt", x, build.constant(1.0))
    graph = build.graph(build("where", is_large, value, x), build("neg", value))
    assert not may_change_decisions(graph, [value], [value])
    graph = build.graph(build("where", build("gt", value, x), value, x))
    assert may_change_decisions(graph, [value], [value])


def two_regions(what: str, op: str, through_product: bool = False) -> Graph:
    """A value and its maximum over rows, compared in a region behind an opaque operator.

    The value itself is no result: half of it and its maximum are, which two kernels compute.
    """
    build = Builder()
    value = computed(build, what)
    largest = build("amax", value, dims=(1,), keepdim=True)
    shown = build("relu", value)
    other = build.opaque("mm", largest, shape=(64, 4096), dtype="float32")
    left = build("cast", shown, dtype="float32")
    if through_product:
        left = build.opaque("mm", shown, shape=(64, 4096), dtype="float32")
    late = build("add", left, other)
    decided = build(op, build("add", late, build("neg", other)), largest)
    return build.graph(decided, shown, largest)


@pytest.mark.parametrize("op", ["div", "eq", "lt"])
@pytest.mark.parametrize("what", COMPUTATIONS)
def test_results_that_a_later_region_compares_are_not_computed_from_two_copies(
    what: str, op: str
) -> None:
    first, second = find_regions(two_regions(what, op))
    assert bool(first.graph.compared) == (op != "div")
    assert not second.graph.compared
    graph = first.graph
    value = next(node.inputs[0] for node in graph if node.op == "amax")
    # One kernel computes the value and its maximum, another one what the result shows of it.
    shown = {node.index for node in graph if node.op == "relu"}
    groups = [tuple(i for i in graph.operators if (i in shown) == late) for late in (False, True)]
    changes = shared_values._changes(Kernels.of(graph, groups), set())
    changed = value in {change.key[0] for change in changes}
    assert changed == (op == "div" or what not in ROUNDED)


@pytest.mark.parametrize("op", ["eq", "lt"])
def test_results_that_meet_behind_a_matrix_product_are_not_compared(op: str) -> None:
    regions = find_regions(two_regions("fp16 product", op, through_product=True))
    assert not any(region.graph.compared for region in regions)


def test_regions_with_and_without_a_later_comparison_have_different_keys() -> None:
    compared, other = (find_regions(two_regions("sum", op))[0].graph for op in ("eq", "div"))
    assert compared.nodes == other.nodes
    assert compared.key != other.key
