"""Epilogue fusion: operators after a sum over rows join the kernel that computes the sum.

In the explorer's model a reduction across rows ends a kernel, because its blocks have only partial
results. The generated kernel has a second stage that has the whole result and can compute more. For
example, the cast of a weight's gradient to the weight's dtype then needs no launch of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from nostall.fusion.codegen.generate import no_kernel_reason
from nostall.fusion.evaluate.work import GraphWork
from nostall.fusion.explore.kernel_splitting import SMALL_FACTOR, Group
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import ELEMENTWISE


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
