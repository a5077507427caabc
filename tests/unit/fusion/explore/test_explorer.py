"""Tests of the explorers: they return valid partitions, and none beats the proven optimum."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings

from nostall.core import BadInput, IllegalMove
from nostall.fusion import Builder, Graph
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore import PartitionSpace, explore, greedy_partition, refine
from nostall.fusion.explore.explorer import pack_kernels
from nostall.fusion.explore.integer_program import (
    enumerate_columns,
    find_optimum,
    incidence,
    solve_relaxation,
)
from nostall.fusion.explore.joining import ContractedGraph
from nostall.fusion.explore.space import Move
from nostall.fusion.graph.partition import Mask, Partition, members, to_mask
from nostall.testing import check_space
from tests.unit.fusion.codegen.graphs.operator_graphs import (
    layer_norm,
    norm_gradient,
    operator_graphs,
)


def partitions(items: tuple[int, ...]) -> Iterator[list[Mask]]:
    """All partitions of the items into groups."""
    if not items:
        yield []
        return
    first, rest = 1 << items[0], items[1:]
    for groups in partitions(rest):
        yield [first, *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], group | first, *groups[at + 1 :]]


def best_by_enumeration(delta: DeltaEvaluator) -> float:
    """The lowest cost of all partitions into connected patterns."""
    lowest = delta.cost(Partition.unfused(delta.graph))
    for groups in partitions(delta.graph.operators):
        if all(delta.is_connected(g) and delta.can_fuse(g) for g in groups):
            partition = Partition.from_groups(groups)
            if delta.cost(partition) < lowest and delta.graph.is_acyclic(partition.kernels):
                lowest = delta.cost(partition)
    return lowest


@settings(max_examples=25, deadline=None)
@given(operator_graphs(most=7))
def test_integer_program_equals_enumeration(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    lowest = pytest.approx(best_by_enumeration(delta), rel=1e-9)
    for known in (None, greedy_partition(delta)):
        optimum = find_optimum(delta, known=known)
        optimum.partition.check(graph)
        assert optimum.proven and delta.cost(optimum.partition) == lowest


class LimitedEvaluator(DeltaEvaluator):
    """Evaluator that rejects one third of the patterns as not generatable."""

    def can_fuse(self, mask: Mask) -> bool:
        return super().can_fuse(mask) and (not mask & (mask - 1) or mask % 3 > 0)


@settings(max_examples=15, deadline=None)
@given(operator_graphs(most=7))
def test_optimum_has_no_pattern_that_cannot_be_generated(graph: Graph) -> None:
    delta = LimitedEvaluator(graph)
    optimum = find_optimum(delta)
    assert optimum.proven and all(delta.can_fuse(mask) for mask in optimum.partition.groups)
    assert delta.cost(optimum.partition) == pytest.approx(best_by_enumeration(delta), rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(operator_graphs())
def test_relaxation_bounds_the_gain(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    columns = enumerate_columns(delta)
    if not columns.patterns:
        return
    gains = np.array(columns.gains) * 1e6
    bounds = solve_relaxation(incidence(columns.patterns, graph.operators), gains)
    assert bounds is not None
    for mask, loss in zip(columns.patterns, bounds.losses, strict=True):
        disjoint = [i for i, pattern in enumerate(columns.patterns) if not pattern & mask]
        best_other = max((gains[i] for i in disjoint), default=0.0)
        own = gains[columns.patterns.index(mask)]
        assert own + best_other <= (bounds.bound - loss) * (1 + 1e-6)


@settings(max_examples=15, deadline=None)
@given(operator_graphs())
def test_explorers_return_partitions_that_do_not_beat_the_optimum(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    lowest = delta.cost(find_optimum(delta).partition)
    explored = explore(delta)
    annealed = refine(delta, explored.connected, evaluations=30)
    for partition in (
        explored.from_beam,
        explored.connected,
        annealed.connected,
        greedy_partition(delta),
    ):
        partition.check(graph)
        assert all(delta.is_connected(mask) for mask in partition.groups)
        assert delta.cost(partition) >= lowest * (1 - 1e-9)
    assert delta.cost(explored.connected) <= delta.cost(explored.from_beam) * (1 + 1e-9)
    assert delta.cost(annealed.connected) <= delta.cost(explored.connected) * (1 + 1e-9)
    explored.partition.check(graph)
    assert delta.cost(explored.partition) <= delta.cost(explored.connected) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(operator_graphs(most=7))
def test_all_connected_convex_sets_are_columns(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    columns = enumerate_columns(delta)
    expected = 0
    for size in range(1, len(graph.operators) + 1):
        for operators in combinations(graph.operators, size):
            mask = to_mask(operators)
            expected += delta.kernel_time(mask) is not None and delta.is_connected(mask)
    assert columns.is_complete and columns.legal_count == expected


def test_too_many_patterns_prove_nothing() -> None:
    optimum = find_optimum(DeltaEvaluator(layer_norm()), max_columns=5)
    assert not optimum.proven and optimum.stopped == "too many patterns"


def test_cycles_are_cut() -> None:
    """The two best columns would depend on each other."""
    build = Builder()
    x, y = build.input((2048, 512)), build.input((2048, 512))
    a, b = build("exp", x), build("exp", y)
    of_b, of_a = (
        build.opaque("matmul", operand, shape=(2048, 512), dtype="float32") for operand in (b, a)
    )
    c, d = build("add", a, of_b), build("add", b, of_a)
    graph = build.graph(c, d)
    delta = DeltaEvaluator(graph)
    optimum = find_optimum(delta)
    optimum.partition.check(graph)
    assert delta.cost(optimum.partition) == pytest.approx(best_by_enumeration(delta))
    explore(delta).partition.check(graph)


def test_cycles_of_two_kernels_are_cut() -> None:
    build = Builder()
    x, y = build.input((2048, 512)), build.input((2048, 512))
    a, b = build("exp", x), build("exp", y)
    products = [build.opaque("matmul", x, shape=(2048, 512), dtype="float32") for x in (a, b)]
    c, d = build("mul", products[0], b), build("mul", products[1], a)
    graph = build.graph(c, d, a, b)
    delta = DeltaEvaluator(graph)
    optimum = find_optimum(delta)
    assert optimum.rounds == 2 and optimum.proven
    optimum.partition.check(graph)
    assert delta.cost(optimum.partition) == pytest.approx(best_by_enumeration(delta))


def test_nodes_without_kernel_are_not_confused_with_kernels() -> None:
    """Node 8 is opaque and kernel {3} has the mask 8; confusing them would close a cycle."""
    build = Builder()
    product = build.opaque("matmul", build.input((2048, 512)), shape=(2048, 512), dtype="float32")
    exp = build("exp", build.input((2048, 512)))
    for _ in range(5):
        product = build.opaque("matmul", exp, product, shape=(2048, 512), dtype="float32")
    graph = build.graph(build("exp", product))
    delta = DeltaEvaluator(graph)
    assert graph[3].kind != "opaque" == graph[8].kind
    optimum = find_optimum(delta)
    assert (optimum.proven, optimum.rounds) == (True, 1)
    assert delta.cost(optimum.partition) == pytest.approx(best_by_enumeration(delta))


@settings(max_examples=40, deadline=None)
@given(operator_graphs())
def test_incremental_cycle_check_agrees_with_sorting(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    rng = np.random.default_rng(len(graph))
    kernels = ContractedGraph(graph)
    selected: list[Mask] = []
    patterns = enumerate_columns(delta).patterns
    for at in rng.permutation(len(patterns))[:30]:
        mask = patterns[int(at)]
        if any(mask & other for other in selected):
            continue
        is_acyclic = graph.is_acyclic([members(group) for group in (*selected, mask)])
        assert kernels.admits(mask) == is_acyclic
        if is_acyclic:
            kernels.add(mask)
            selected.append(mask)


def test_norm_becomes_one_kernel() -> None:
    for graph in (layer_norm(), norm_gradient()):
        delta = DeltaEvaluator(graph)
        assert explore(delta).partition == Partition.from_groups([to_mask(graph.operators)])


def test_independent_kernels_are_packed_without_cycles() -> None:
    build = Builder()
    outputs = []
    for _ in range(10):
        x = build("exp", build.input((64, 64)))
        product = build.opaque("matmul", x, shape=(64, 64), dtype="float32")
        outputs.append(build("tanh", product))
    graph = build.graph(*outputs)
    delta = DeltaEvaluator(graph)
    partition = pack_kernels(delta, Partition.unfused(graph))
    partition.check(graph)
    assert sorted(mask.bit_count() for mask in partition.groups) == [2, 2, 8, 8]


def test_space_follows_the_interface() -> None:
    graph = norm_gradient(256, 64)
    space = PartitionSpace(DeltaEvaluator(graph), Partition.unfused(graph))
    check_space(space, steps=8)


def test_space_rejects_invalid_partitions_and_moves() -> None:
    graph = layer_norm()
    space = PartitionSpace(DeltaEvaluator(graph), Partition.unfused(graph))
    for text in ("x", "1 2", ""):
        with pytest.raises(BadInput):
            space.load(text)
    with pytest.raises(IllegalMove):
        space.apply(space.start(), Move("split", graph.operators[0]))
