"""Explorers: what they give are plans, and nothing beats the proven optimum."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings

from nostall.core import BadInput, IllegalMove
from nostall.fusion import Builder, Graph
from nostall.fusion.evaluate import DeltaEvaluator
from nostall.fusion.explore import PartitionSpace, explore, greedy_partition, refine
from nostall.fusion.explore.contraction import ContractedGraph
from nostall.fusion.explore.integer_program import enumerate_columns, find_optimum
from nostall.fusion.explore.packing import pack_kernels
from nostall.fusion.explore.relaxation import incidence, solve_relaxation
from nostall.fusion.explore.space import Move
from nostall.fusion.graph.partition import Mask, Partition, members, to_mask
from nostall.testing import check_space
from tests.unit.fusion.codegen.operator_graphs import layer_norm, norm_gradient, operator_graphs


def partitions(items: tuple[int, ...]) -> Iterator[list[Mask]]:
    """All ways to put the items into groups."""
    if not items:
        yield []
        return
    first, rest = 1 << items[0], items[1:]
    for groups in partitions(rest):
        yield [first, *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], group | first, *groups[at + 1 :]]


def best_by_trying(delta: DeltaEvaluator) -> float:
    """The least cost of all plans of connected patterns."""
    least = delta.cost(Partition.unfused(delta.graph))
    for groups in partitions(delta.graph.operators):
        if all(delta.is_connected(g) and delta.can_fuse(g) for g in groups):
            plan = Partition.from_groups(groups)
            if delta.cost(plan) < least and delta.graph.is_acyclic(plan.kernels):
                least = delta.cost(plan)
    return least


@settings(max_examples=25, deadline=None)
@given(operator_graphs(most=7))
def test_the_programme_finds_what_trying_all_plans_finds(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    least = pytest.approx(best_by_trying(delta), rel=1e-9)
    for known in (None, greedy_partition(delta)):
        found = find_optimum(delta, known=known)
        found.partition.check(graph)
        assert found.proven and delta.cost(found.partition) == least


class Choosy(DeltaEvaluator):
    """Every third pattern cannot be written."""

    def can_fuse(self, mask: Mask) -> bool:
        return super().can_fuse(mask) and (not mask & (mask - 1) or mask % 3 > 0)


@settings(max_examples=15, deadline=None)
@given(operator_graphs(most=7))
def test_what_cannot_be_written_is_in_no_optimum(graph: Graph) -> None:
    delta = Choosy(graph)
    found = find_optimum(delta)
    assert found.proven and all(delta.can_fuse(mask) for mask in found.partition.groups)
    assert delta.cost(found.partition) == pytest.approx(best_by_trying(delta), rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(operator_graphs())
def test_no_plan_gains_more_than_the_relaxation_allows(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    found = enumerate_columns(delta)
    if not found.patterns:
        return
    gains = np.array(found.gains) * 1e6
    bounds = solve_relaxation(incidence(found.patterns, graph.operators), gains)
    assert bounds is not None
    for mask, loss in zip(found.patterns, bounds.losses, strict=True):
        others = [i for i, other in enumerate(found.patterns) if not other & mask]
        most = max((gains[i] for i in others), default=0.0)
        own = gains[found.patterns.index(mask)]
        assert own + most <= (bounds.bound - loss) * (1 + 1e-6)


@settings(max_examples=15, deadline=None)
@given(operator_graphs())
def test_explorers_give_plans_and_none_beats_the_optimum(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    least = delta.cost(find_optimum(delta).partition)
    explored = explore(delta)
    annealed = refine(delta, explored.connected, evaluations=30)
    for plan in (
        explored.from_beam,
        explored.connected,
        annealed.connected,
        greedy_partition(delta),
    ):
        plan.check(graph)
        assert all(delta.is_connected(mask) for mask in plan.groups)
        assert delta.cost(plan) >= least * (1 - 1e-9)
    assert delta.cost(explored.connected) <= delta.cost(explored.from_beam) * (1 + 1e-9)
    assert delta.cost(annealed.connected) <= delta.cost(explored.connected) * (1 + 1e-9)
    explored.partition.check(graph)
    assert delta.cost(explored.partition) <= delta.cost(explored.connected) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(operator_graphs(most=7))
def test_all_connected_convex_sets_are_columns(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    found = enumerate_columns(delta)
    wanted = 0
    for size in range(1, len(graph.operators) + 1):
        for chosen in combinations(graph.operators, size):
            mask = to_mask(chosen)
            wanted += delta.kernel_time(mask) is not None and delta.is_connected(mask)
    assert found.is_complete and found.legal_count == wanted


def test_too_many_patterns_prove_nothing() -> None:
    found = find_optimum(DeltaEvaluator(layer_norm()), max_columns=5)
    assert not found.proven and found.stopped == "too many patterns"


def test_circles_are_cut() -> None:
    """The two best columns would wait for each other."""
    build = Builder()
    x, y = build.input((2048, 512)), build.input((2048, 512))
    a, b = build("exp", x), build("exp", y)
    wall, other = (
        build.opaque("matmul", one, shape=(2048, 512), dtype="float32") for one in (b, a)
    )
    c, d = build("add", a, wall), build("add", b, other)
    graph = build.graph(c, d)
    delta = DeltaEvaluator(graph)
    found = find_optimum(delta)
    found.partition.check(graph)
    assert delta.cost(found.partition) == pytest.approx(best_by_trying(delta))
    explore(delta).partition.check(graph)


def test_circles_of_two_kernels_are_cut() -> None:
    build = Builder()
    x, y = build.input((2048, 512)), build.input((2048, 512))
    a, b = build("exp", x), build("exp", y)
    far = [build.opaque("matmul", one, shape=(2048, 512), dtype="float32") for one in (a, b)]
    c, d = build("mul", far[0], b), build("mul", far[1], a)
    graph = build.graph(c, d, a, b)
    delta = DeltaEvaluator(graph)
    found = find_optimum(delta)
    assert found.rounds == 2 and found.proven
    found.partition.check(graph)
    assert delta.cost(found.partition) == pytest.approx(best_by_trying(delta))


def test_what_belongs_to_no_kernel_closes_no_circle() -> None:
    """Node 8 is opaque and kernel {3} has the mask 8: once taken for each other."""
    build = Builder()
    wall = build.opaque("matmul", build.input((2048, 512)), shape=(2048, 512), dtype="float32")
    other = build("exp", build.input((2048, 512)))
    for _ in range(5):
        wall = build.opaque("matmul", other, wall, shape=(2048, 512), dtype="float32")
    graph = build.graph(build("exp", wall))
    delta = DeltaEvaluator(graph)
    assert graph[3].kind != "opaque" == graph[8].kind
    found = find_optimum(delta)
    assert (found.proven, found.rounds) == (True, 1)
    assert delta.cost(found.partition) == pytest.approx(best_by_trying(delta))


@settings(max_examples=40, deadline=None)
@given(operator_graphs())
def test_the_quick_circle_check_agrees_with_sorting(graph: Graph) -> None:
    delta = DeltaEvaluator(graph)
    rng = np.random.default_rng(len(graph))
    kernels = ContractedGraph(graph)
    chosen: list[Mask] = []
    patterns = enumerate_columns(delta).patterns
    for at in rng.permutation(len(patterns))[:30]:
        mask = patterns[int(at)]
        if any(mask & other for other in chosen):
            continue
        sorted_ = graph.is_acyclic([members(group) for group in (*chosen, mask)])
        assert kernels.admits(mask) == sorted_
        if sorted_:
            kernels.add(mask)
            chosen.append(mask)


def test_a_norm_becomes_one_kernel() -> None:
    for graph in (layer_norm(), norm_gradient()):
        delta = DeltaEvaluator(graph)
        assert explore(delta).partition == Partition.from_groups([to_mask(graph.operators)])


def test_independent_kernels_are_packed_without_circles() -> None:
    build = Builder()
    ends = []
    for _ in range(10):
        x = build("exp", build.input((64, 64)))
        wall = build.opaque("matmul", x, shape=(64, 64), dtype="float32")
        ends.append(build("tanh", wall))
    graph = build.graph(*ends)
    delta = DeltaEvaluator(graph)
    plan = pack_kernels(delta, Partition.unfused(graph))
    plan.check(graph)
    assert sorted(mask.bit_count() for mask in plan.groups) == [2, 2, 8, 8]


def test_the_space_keeps_its_contract() -> None:
    graph = norm_gradient(256, 64)
    space = PartitionSpace(DeltaEvaluator(graph), Partition.unfused(graph))
    check_space(space, steps=8)


def test_the_space_refuses_what_is_no_plan() -> None:
    graph = layer_norm()
    space = PartitionSpace(DeltaEvaluator(graph), Partition.unfused(graph))
    for text in ("x", "1 2", ""):
        with pytest.raises(BadInput):
            space.load(text)
    with pytest.raises(IllegalMove):
        space.apply(space.start(), Move("split", graph.operators[0]))
