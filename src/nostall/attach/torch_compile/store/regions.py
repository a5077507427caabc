"""Kernels of a region: loaded from the store, or explored and generated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import triton

from nostall.attach.torch_compile.store.kernel_store import KernelStore, code_version
from nostall.attach.torch_compile.store.records import RegionRecord, StepRecord
from nostall.fusion.codegen.runtime.stitched_graph import PlanChooser, StitchedGraph, stitch
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE

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
        record = _explore(graph, store)
        store.save(key, record)
    return record


def retuned_region(graph: Graph, store: KernelStore, choice: PlanChooser) -> RegionRecord:
    """The region with the same kernels by the plans of ``choice``; replaces the stored record."""
    groups = [step.operators for step in stitched_region(graph, store).steps]
    record = _record(graph, stitch(graph, groups, choice=choice, folder=store.folder), store)
    store.save(region_key(graph), record)
    return record


def _explore(graph: Graph, store: KernelStore) -> RegionRecord:
    return _record(graph, stitch(graph, default_partition(graph), folder=store.folder), store)


def _record(graph: Graph, stitched: StitchedGraph, store: KernelStore) -> RegionRecord:
    steps = []
    for step in stitched.steps:
        if isinstance(step, int):
            continue
        program = step.program
        operators = _operators_between(graph, program.inputs, program.outputs)
        steps.append(
            StepRecord(
                kernel=store.put(program),
                inputs=program.inputs,
                outputs=program.outputs,
                operators=operators,
                reduces=_reduces(graph, operators),
            )
        )
    return RegionRecord(steps=tuple(steps), not_fused=dict(stitched.illegal_reasons))


def _reduces(graph: Graph, operators: tuple[int, ...]) -> bool:
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
