"""Example regions, and a GPU target, for tests of code generation in worker processes."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget

from nostall.attach.torch_compile.measure.plan_tuning import PlanCandidates, PlanTuning
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from nostall.fusion.recompute.kernels import default_kernels

HOPPER = GPUTarget("cuda", 90, 32)


def normalized_rows(rows: int) -> Graph:
    """Rows of 768 numbers, each divided by its sum."""
    build = Builder()
    x = build.input((rows, 768))
    return build.graph(build("div", x, build("sum", x, dims=(1,), keepdim=True)))


def tuning() -> PlanTuning:
    return PlanTuning(2, 1.0, "reductions")


def no_candidates(graph: Graph) -> PlanCandidates:
    """A region none of whose kernels is to be tuned."""
    return PlanCandidates(graph, default_kernels(graph), {})


def opaque_region() -> Graph:
    """A graph with an opaque node, for which no kernels can be generated."""
    build = Builder()
    x = build.input((8, 768))
    return build.graph(build.opaque("a border", x, shape=(8,), dtype="float32"))
