"""The partition that regions are stitched with: FusionStitching's, with three corrections.

Epilogue fusion: operators after a sum over rows join the kernel that computes the sum.

In the explorer's model a reduction across rows ends a kernel, because its blocks have only partial
results. The generated kernel has a second stage that has the whole result and can compute more. For
example, the cast of a weight's gradient to the weight's dtype then needs no launch of its own.

Merging of kernels if one kernel takes less modelled time than two that exchange a tensor.

The explorer's model knows the bytes and launches that a kernel saves, but not the schemes of the
code generator.  For example, it puts the reductions of one long row and the operators that use them
into two kernels.  The scheme ``split`` computes both in two launches instead of three.  So adjacent
kernels are compared by the cost model of schedules, the pair that exchanges the most bytes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nostall.fusion.codegen.generate import no_kernel_reason
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.evaluate.work import GraphWork
from nostall.fusion.explore.explorer import explore
from nostall.fusion.explore.kernel_splitting import (
    SMALL_FACTOR,
    Group,
    KernelTimes,
    split_kernels,
    unpack_kernels,
    unpacked_seconds,
)
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import ELEMENTWISE
from nostall.fusion.graph.partition import members


def fuse_epilogues(graph: Graph, groups: Iterable[Group]) -> list[Group]:
    """The same operators, with the epilogue of each kernel's reductions moved into that kernel.

    An operator is moved if the code generator supports the larger kernel, and if it loops over less
    than 1/:data:`SMALL_FACTOR` of the elements of the kernel's largest operator.
    """
    iterations = GraphWork(graph).iterations
    kernels = [set(group) for group in groups]
    kernel_of = {index: at for at, kernel in enumerate(kernels) for index in kernel}
    for at, kernel in enumerate(kernels):
        if not any(graph[index].kind == "reduce" for index in kernel):
            continue
        widest = max(iterations[index] for index in kernel)
        small = {i for i in graph.operators if SMALL_FACTOR * iterations[i] < widest}
        epilogue = _epilogue(graph, kernel, small)
        if epilogue and no_kernel_reason(graph, sorted(kernel | epilogue)) is None:
            for index in epilogue:
                kernels[kernel_of[index]].discard(index)
                kernel_of[index] = at
            kernel |= epilogue
    return [tuple(sorted(kernel)) for kernel in kernels if kernel]


def _epilogue(graph: Graph, kernel: set[int], small: set[int]) -> set[int]:
    """Small elementwise operators that depend only on reductions of the kernel and on graph inputs.

    What they depend on is small, too; otherwise the kernel would wait for another that waits for
    its reductions.  All that depends on them must be elementwise, and in other kernels.
    """
    epilogue: set[int] = set()
    for index in reversed(graph.operators):
        is_candidate = graph[index].kind in ELEMENTWISE and index not in kernel
        if is_candidate and epilogue.issuperset(graph.consumers[index]):
            epilogue.add(index)
    for index in graph.operators:
        computed = [i for i in graph.sources[index] if graph[i].kind != "input"]
        is_after_reductions = all(
            i in epilogue or (i in kernel and graph[i].kind == "reduce") for i in computed
        )
        if not (computed and is_after_reductions and index in small):
            epilogue.discard(index)
    return epilogue


MAX_TRIALS = 32
"""Pairs of kernels of one graph that are compared; planning a kernel takes some 50 ms."""


def merge_kernels(graph: Graph, groups: Iterable[Group]) -> list[Group]:
    """The same operators, with adjacent kernels merged where that takes less modelled time."""
    kernels = [tuple(sorted(group)) for group in groups]
    # A packed kernel has no common loops with another one, so it is not merged.
    times = KernelTimes(graph, unpacked_seconds)
    refused: set[frozenset[Group]] = set()
    trials = 0
    while trials < MAX_TRIALS:
        pair = next((p for p in _adjacent(graph, kernels) if frozenset(p) not in refused), None)
        if pair is None:
            break
        trials += 1
        rest = [kernel for kernel in kernels if kernel not in pair]
        merged = tuple(sorted({*pair[0], *pair[1]}))
        before = times.total(pair) if graph.is_acyclic([*rest, merged]) else None
        after = times.total([merged]) if before is not None else None
        if before is not None and after is not None and after < before:
            kernels = [*rest, merged]
        else:
            refused.add(frozenset(pair))
    return kernels


def _adjacent(graph: Graph, kernels: list[Group]) -> Iterator[tuple[Group, Group]]:
    """Pairs of kernels of which one reads what the other writes, the most bytes first."""
    owner = {index: kernel for kernel in kernels for index in kernel}
    exchanged: dict[tuple[Group, Group], int] = {}
    for index, kernel in owner.items():
        for reader in {owner[i] for i in graph.consumers[index] if i in owner} - {kernel}:
            pair = (kernel, reader)
            exchanged[pair] = exchanged.get(pair, 0) + graph[index].bytes
    yield from sorted(exchanged, key=lambda pair: (-exchanged[pair], pair))


def default_partition(graph: Graph) -> list[tuple[int, ...]]:
    """The kernels of a region's graph, each as a tuple of operators.

    Starts with the explorer's partition, splits kernels that several kernels would beat (modelled),
    merges kernels that one kernel would beat, and fuses the epilogues of sums over rows into the
    kernels that compute the sums.
    """
    groups = [members(group) for group in explore(DeltaEvaluator(graph)).partition.groups]
    split = unpack_kernels(graph, split_kernels(graph, groups))
    return fuse_epilogues(graph, merge_kernels(graph, split))
