"""Kernels of a region: loaded from the store, or explored and generated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import triton

from nostall.attach.torch_compile.store.kernel_store import KernelStore, code_version
from nostall.attach.torch_compile.store.records import RegionRecord, StepRecord
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.runtime.stitched_graph import PlanChooser, StitchedGraph, stitch
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.recompute.copies import Kernels
from nostall.fusion.recompute.kernels import default_kernels

NO_REGIONS: Mapping[str, RegionRecord] = MappingProxyType({})


def region_key(graph: Graph) -> str:
    """Hash of a region's operators, shapes, strides and dtypes, and of the code generators."""
    text = f"{graph.key} {code_version()} {triton.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


def stitched_region(
    graph: Graph, store: KernelStore, known: Mapping[str, RegionRecord] = NO_REGIONS
) -> RegionRecord:
    """The kernels of a region, in the order of their launches; the same ones in every process.

    Regions in ``known`` (by key) are not looked up in the store.
    """
    key = region_key(graph)
    record = known.get(key) or store.load(RegionRecord, key)
    if record is None:
        record = _record(graph, region_kernels(graph, store.folder), store)
        store.save(key, record)
    return record


@lru_cache(maxsize=8)
def region_kernels(graph: Graph, folder: Path) -> Kernels:
    """The kernels of a region, whose generated programs exchange values of its graph only.

    A kernel that computes parts of values may have no program.  The programs of its operators would
    then exchange parts, which the region's graph does not have; such a region has no copies.
    ``folder``: where sources are written.
    """
    kernels = default_kernels(graph)
    if kernels.are_in_region(range(len(kernels.graph))):
        return kernels
    stitched = stitch(kernels.graph, kernels.groups, folder=folder)
    return kernels if _is_in_region(kernels, stitched) else _without_copies(graph)


def _without_copies(graph: Graph) -> Kernels:
    return Kernels.of(graph, default_partition(graph))


def _is_in_region(kernels: Kernels, stitched: StitchedGraph) -> bool:
    """Whether the region's graph has all values that the programs read and write."""
    programs = [step.program for step in stitched.steps if not isinstance(step, int)]
    return all(kernels.are_in_region((*p.inputs, *p.outputs)) for p in programs)


def retuned_region(
    graph: Graph, kernels: Kernels, store: KernelStore, choice: PlanChooser
) -> RegionRecord:
    """The region with the same kernels by the plans of ``choice``; replaces the stored record."""
    record = _record(graph, kernels, store, choice)
    store.save(region_key(graph), record)
    return record


def _record(
    graph: Graph, kernels: Kernels, store: KernelStore, choice: PlanChooser = default_plan
) -> RegionRecord:
    """The kernels by what they read, write and compute of the region's graph."""
    stitched = stitch(kernels.graph, kernels.groups, choice=choice, folder=store.folder)
    steps = []
    for step in stitched.steps:
        if isinstance(step, int):
            continue
        program = step.program
        inputs, outputs = map(kernels.in_region, (program.inputs, program.outputs))
        operators = _operators_between(graph, inputs, outputs)
        steps.append(
            StepRecord(
                kernel=store.put(program),
                inputs=inputs,
                outputs=outputs,
                operators=operators,
                reduces=reduces(graph, operators),
            )
        )
    return RegionRecord(steps=tuple(steps), not_fused=dict(stitched.illegal_reasons))


def reduces(graph: Graph, operators: Sequence[int]) -> bool:
    """Whether a kernel fuses more than Inductor does: a reduction, or a dot with other operators.

    A dot alone is what cuBLAS does well.
    """
    kinds = [graph[index].kind for index in operators]
    return "reduce" in kinds or ("dot" in kinds and len(kinds) > 1)


def _operators_between(
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
