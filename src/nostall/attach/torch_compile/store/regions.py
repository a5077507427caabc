"""A region as stitched kernels: from the store where it was stitched before, else explored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import triton

from nostall.attach.torch_compile.store.records import Kept, RegionRecord, StepRecord, code_version
from nostall.fusion.codegen.runtime.stitched_graph import Choice, StitchedGraph, stitch
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE

NOTHING: Mapping[str, RegionRecord] = MappingProxyType({})


def region_key(graph: Graph) -> str:
    """The name of a region: its operators, shapes, strides and dtypes, and who generates code."""
    text = f"{graph.key} {code_version()} {triton.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


def stitched_region(
    graph: Graph, kept: Kept, known: Mapping[str, RegionRecord] = NOTHING
) -> RegionRecord:
    """The kernels of a region, in the order in which they run; the same ones in every process.
    What is ``known`` (by name) is no question for the store."""
    key = region_key(graph)
    found = known.get(key) or kept.answer(RegionRecord, key)
    if found is None:
        found = _explored(graph, kept)
        kept.keep(key, found)
    return found


def raced_region(graph: Graph, kept: Kept, choice: Choice) -> RegionRecord:
    """The same kernels, of equal operators, by the plans that ``choice`` takes; kept in place of
    what was."""
    groups = [step.operators for step in stitched_region(graph, kept).steps]
    found = _record(graph, stitch(graph, groups, choice=choice, folder=kept.folder), kept)
    kept.keep(region_key(graph), found)
    return found


def _explored(graph: Graph, kept: Kept) -> RegionRecord:
    return _record(graph, stitch(graph, default_partition(graph), folder=kept.folder), kept)


def _record(graph: Graph, stitched: StitchedGraph, kept: Kept) -> RegionRecord:
    steps = []
    for step in stitched.steps:
        if isinstance(step, int):
            continue
        program = step.program
        operators = _between(graph, program.inputs, program.outputs)
        steps.append(
            StepRecord(
                kernel=kept.put(program),
                reads=program.inputs,
                gives=program.outputs,
                operators=operators,
                reduces=_reduces(graph, operators),
            )
        )
    return RegionRecord(steps=tuple(steps), refused=dict(stitched.refused))


def _reduces(graph: Graph, operators: tuple[int, ...]) -> bool:
    """Whether a kernel does what Inductor's chains of elementwise operators do not: reductions, or
    dots with something beside them (one alone is what cuBLAS does well)."""
    kinds = [graph[index].kind for index in operators]
    return "reduce" in kinds or ("dot" in kinds and len(kinds) > 1)


def _between(graph: Graph, reads: tuple[int, ...], gives: tuple[int, ...]) -> tuple[int, ...]:
    """The operators that a kernel computes: what leads from what it reads to what it gives."""
    found: set[int] = set()
    waiting = list(gives)
    while waiting:
        index = waiting.pop()
        if index not in found and graph[index].kind in COMPUTE:
            found.add(index)
            waiting.extend(i for i in graph.sources[index] if i not in reads)
    return tuple(sorted(found))
