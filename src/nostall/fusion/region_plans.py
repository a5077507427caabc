"""Regions of a captured graph, and the plan of a region: its kernels, generated from its graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nostall.fusion.capture import CapturedGraph
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import PlanChooser, generate_partition
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.dynamic_size import SizeReader, used_sizes
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.regions import Region, find_regions
from nostall.fusion.recompute.copies import Kernels
from nostall.fusion.recompute.kernels import default_kernels
from nostall.fusion.recompute.partial_reads import views_of_parts


def captured_regions(
    captured: CapturedGraph,
    calls: Mapping[int, object] | None = None,
    input_views: Collection[int] = (),
) -> tuple[Region, ...]:
    """The regions of a graph; ``calls`` and ``input_views`` as of :func:`find_regions`.

    Views that have a node in the FX graph are inputs, too, if a kernel can read their parts only so
    (:func:`.views_of_parts`), or the dynamic sizes of its results.
    """
    graph = captured.graph
    views = (views_of_parts(graph) | _views_that_show_sizes(graph)) & captured.origins.keys()
    return find_regions(graph, calls, views.union(input_views))


def _views_that_show_sizes(graph: Graph) -> frozenset[int]:
    """Views of values in memory whose shape shows dynamic sizes that the value's shape hides.

    The result of a linear layer has one axis for the product of batch and length.
    """

    def hides_sizes(index: int) -> bool:
        shape = graph[index].shape
        return not SizeReader(used_sizes(shape, graph.varying), [shape]).is_complete

    return frozenset(
        node.index
        for node in graph
        if node.op == "view"
        and graph[node.inputs[0]].kind in ("input", "opaque")
        and hides_sizes(node.inputs[0])
        and not hides_sizes(node.index)
    )


@dataclass(frozen=True)
class PlannedStep:
    """One kernel of a region.  Integers are nodes of the region's graph."""

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[int, ...]
    """The operators that the kernel computes."""
    reduces: bool
    """Whether it fuses more than Inductor does (:func:`reduces`)."""


@dataclass(frozen=True)
class RegionPlan:
    """The kernels of a region in the order of their launches, and why operators have none."""

    steps: tuple[PlannedStep, ...]
    not_fused: Mapping[str, int]


def plan_region(
    graph: Graph, kernels: Kernels | None = None, choice: PlanChooser = default_plan
) -> RegionPlan:
    """The kernels of a region's graph, generated.

    ``kernels``: what each kernel computes (default: :func:`region_kernels`).  ``choice`` chooses
    the plan of each kernel.
    """
    kernels = kernels or region_kernels(graph)
    programs, not_fused = _programs(kernels, choice)
    steps = []
    for program in programs:
        inputs, outputs = map(kernels.in_region, (program.inputs, program.outputs))
        operators = operators_between(graph, inputs, outputs)
        step = PlannedStep(program, inputs, outputs, operators, reduces(graph, operators))
        steps.append(step)
    return RegionPlan(tuple(steps), not_fused)


@lru_cache(maxsize=8)
def region_kernels(graph: Graph) -> Kernels:
    """What the kernels of a region compute; their programs exchange values of its graph only."""
    kernels = default_kernels(graph)
    if kernels.are_in_region(range(len(kernels.graph))):
        return kernels
    programs, _ = _programs(kernels, default_plan)
    is_in_region = all(kernels.are_in_region((*p.inputs, *p.outputs)) for p in programs)
    return kernels if is_in_region else _without_copies(graph)


def _without_copies(graph: Graph) -> Kernels:
    """The kernels of a partition of the region's own operators.

    It is for regions in which a kernel that computes a part of a value has no program, so that the
    smaller kernels which take its place would exchange that part::

        region:   x -> exp -> e -> e[:, :n] -> sum
        copies:   x -> x[:, :n] -> exp -> sum         the exp is a part of e: no node of the region

    Steps are described by nodes of the region's graph, the only values that the FX graph has, too.
    A part that stays inside of one kernel needs no description; one between two kernels does.
    """
    return Kernels.of(graph, default_partition(graph))


def _programs(kernels: Kernels, choice: PlanChooser) -> tuple[list[Program], Mapping[str, int]]:
    steps, reasons = generate_partition(
        kernels.graph, kernels.groups, choice, finish=lambda program: program
    )
    return [step for step in steps if not isinstance(step, int)], reasons


def reduces(graph: Graph, operators: Sequence[int]) -> bool:
    """Whether a kernel fuses more than Inductor does: a reduction, or a dot with other operators.

    A dot alone is what cuBLAS does well.
    """
    kinds = [graph[index].kind for index in operators]
    return "reduce" in kinds or ("dot" in kinds and len(kinds) > 1)


def operators_between(
    graph: Graph, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[int, ...]:
    """The operators that a kernel computes: all on paths from its inputs to its outputs."""
    operators: set[int] = set()
    waiting = list(outputs)
    while waiting:
        index = waiting.pop()
        if index not in operators and graph[index].kind in COMPUTE:
            operators.add(index)
            waiting.extend(i for i in graph.sources[index] if i not in inputs)
    return tuple(sorted(operators))
