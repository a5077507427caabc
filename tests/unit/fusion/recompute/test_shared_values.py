"""Values that kernels compute again: which ones, that the values stay equal, and where it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.fusion.chains.generated import GENERATED
from benchmarks.fusion.chains.reported import REPORTED
from benchmarks.fusion.chains.stitched import chain_graph
from tools.interpreters.reference import interpret

from nostall.fusion.codegen.generate import grow_partition
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.explore.kernel_splitting import KernelTimes
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import kernel_outputs, to_mask
from nostall.fusion.recompute import kernels as shared_values
from nostall.fusion.recompute.copies import Kernels
from nostall.fusion.recompute.kernels import default_kernels, recompute_shared_values
from nostall.fusion.recompute.partial_reads import read_parts
from tests.unit.fusion.codegen.accuracy import random_inputs
from tests.unit.fusion.codegen.graphs.random_graphs import RandomGraph, operator_graphs


def stored_bytes(kernels: Kernels) -> int:
    """Bytes that the kernels write and that are no results of the graph."""
    graph = kernels.graph
    outputs = [i for group in kernels.groups for i in kernel_outputs(graph, to_mask(group))]
    return sum(graph[index].bytes for index in outputs if index not in graph.results)


@pytest.mark.parametrize(
    "name",
    [
        "rms norm backward 4096x50304",
        "rms norm backward 64x50304",
        "rms norm backward 2048x151936",
    ],
)
def test_no_wider_copy_of_a_tensor_is_stored_for_a_second_kernel(name: str) -> None:
    graph = chain_graph(GENERATED[name])
    plain, kernels = Kernels.of(graph, default_partition(graph)), default_kernels(graph)
    rows = graph[graph.inputs[0]].shape[0]
    assert stored_bytes(kernels) < 0.05 * stored_bytes(plain) + 1000 * rows
    assert len(kernels.groups) == len(plain.groups)
    after = KernelTimes(kernels.graph).total(kernels.groups)
    before = KernelTimes(graph).total(plain.groups)
    assert after is not None and before is not None and after < 0.95 * before


def test_the_rotary_embedding_of_a_normalised_query_is_one_kernel() -> None:
    kernels = default_kernels(chain_graph(REPORTED["query norm + rotary 8192x32x128"]))
    assert len(kernels.groups) == 1


def test_a_large_value_is_not_stored_if_its_operands_take_no_more_bytes() -> None:
    """Two tensors are read where their guided mixture was written and read."""
    build = Builder()
    long = (8, 1 << 20)
    first, second, other = (build.input(long, "bfloat16") for _ in range(3))
    mixed = build("add", build("sub", first, second), second)
    mean = build("sum", build("cast", mixed, dtype="float32"), dims=(1,), keepdim=True)
    scale = build("expand", build("cast", mean, dtype="bfloat16"), shape=long)
    graph = build.graph(build("sub", other, build("mul", mixed, scale)))
    plain = Kernels.of(graph, [group_of(graph, mean), rest_of(graph, mean)])
    kernels = recompute_shared_values(plain)
    assert (stored_bytes(plain), stored_bytes(kernels)) == (2 * 8 * (1 << 20) + 32, 32)


def group_of(graph: Graph, last: int) -> tuple[int, ...]:
    """The operators that a value depends on, and the value."""
    found, pending = set[int](), [last]
    while pending:
        index = pending.pop()
        found.add(index)
        pending += graph.sources[index]
    return tuple(index for index in graph.operators if index in found)


def rest_of(graph: Graph, last: int) -> tuple[int, ...]:
    return tuple(index for index in graph.operators if index not in group_of(graph, last))


def test_kernels_that_gain_nothing_by_copies_have_none() -> None:
    graph = chain_graph(GENERATED["swiglu 8192x4096"])
    kernels = default_kernels(graph)
    assert kernels.graph is graph and kernels == Kernels.of(graph, default_partition(graph))


def all_changes(kernels: Kernels) -> list[Kernels]:
    return [change.kernels for change in shared_values._changes(kernels, set())]


def normalised_half(build: Builder, value: int) -> int:
    """Half of the columns of a value, normalised with the other half, in blocks of one maximum."""
    *rows, columns = build.nodes[value].shape
    half = (*rows, columns // 2)
    first, second = (
        build("slice", value, dim=len(rows), start=start, step=1, shape=half)
        for start in (0, columns - half[-1])
    )
    wide, other = (build("cast", part, dtype="float32") for part in (first, second))
    total = build("sum", build("mul", wide, other), dims=(len(rows),), keepdim=True)
    normed = build("mul", wide, build("rsqrt", build("abs", total)))
    size = next(size for size in (128, 2, 1) if half[-1] % size == 0)
    blocks = build("view", normed, shape=(*rows, half[-1] // size, size))
    largest = build("amax", build("abs", blocks), dims=(len(rows) + 1,), keepdim=True)
    return build("div", blocks, largest)


def test_kernels_exchange_no_parts_of_values() -> None:
    build = Builder()
    value = build("exp", build.input((4096, 16384), "float16"))
    kernels = default_kernels(build.graph(normalised_half(build, value)))
    assert kernels.store_known_values


@settings(max_examples=20, deadline=None)
@given(operator_graphs(("float32", "float16"), 6))
def test_changes_of_kernels_of_parts_keep_the_results(made: RandomGraph) -> None:
    build = Builder()
    build.nodes = list(made.graph.nodes)
    fitting = [i for i in made.graph.outputs if made.graph[i].shape[-1:] > (1,)]
    values = [i for i in fitting if made.graph[i].dtype.startswith("float")]
    value = build("exp", values[0]) if values else build("exp", build.input((4, 6)))
    graph = build.graph(normalised_half(build, value), *made.graph.outputs)
    found = read_parts(graph)
    assume(found is not None)
    assert found is not None
    changed, origins = found
    start = Kernels(changed, tuple(grow_partition(changed)), origins)
    assume(start.store_known_values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_values, "MAX_TIME_RATIO", math.inf)
        check_equal(graph, made.seed, recompute_shared_values(start))


def check_equal(graph: Graph, seed: int, changed: Kernels) -> None:
    """The changed graph has the same results, and its kernels cover its operators once."""
    covered = sorted(index for group in changed.groups for index in group)
    assert covered == sorted(changed.graph.operators)
    assert changed.graph.is_acyclic(changed.groups)
    assert changed.store_known_values
    inputs = [np.asarray(x.double().numpy()) for x in random_inputs(graph, seed)]
    with np.errstate(all="ignore"):
        results = interpret(graph, inputs), interpret(changed.graph, inputs)
    for old, new in zip(*results, strict=True):
        np.testing.assert_array_equal(old, new)


@settings(max_examples=25, deadline=None)
@given(operator_graphs(("float32", "float16"), 10), st.booleans())
def test_every_change_of_random_graphs_keeps_the_results(made: RandomGraph, single: bool) -> None:
    graph = made.graph
    groups = [(i,) for i in graph.operators] if single else grow_partition(graph)
    for changed in all_changes(Kernels.of(graph, groups)):
        check_equal(graph, made.seed, changed)
        for twice in all_changes(changed)[:2]:
            check_equal(graph, made.seed, twice)


def test_single_operators_have_changes() -> None:
    graph = chain_graph(GENERATED["rms norm backward 8x151936"])
    assert len(all_changes(Kernels.of(graph, [(index,) for index in graph.operators]))) > 5


def test_a_refused_change_is_not_tried_again_after_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = chain_graph(GENERATED["rms norm backward 8x151936"])
    tried = list[tuple[int | None, ...]]()
    changes = shared_values._changes

    def recorded(kernels: Kernels, refused: set[shared_values._Key]) -> Iterator[object]:
        for change in changes(kernels, refused):
            value, group = change.key
            tried.append(tuple(kernels.origins[index] for index in (value, *group)))
            yield change

    class EverySecondGains(KernelTimes):
        def total(self, groups: Iterable[tuple[int, ...]]) -> float:
            is_changed = self._graph is not graph and len(tried) % 2 == 0
            return 0.1 ** len(tried) if is_changed else 0.1 ** (len(tried) - 1)

    monkeypatch.setattr(shared_values, "_changes", recorded)
    monkeypatch.setattr(shared_values, "KernelTimes", EverySecondGains)
    recompute_shared_values(Kernels.of(graph, [(index,) for index in graph.operators]))
    assert len(tried) == len(set(tried)) > 4
