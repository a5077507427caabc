"""Records of regions in the store: loaded, and saved from the plans that fusion makes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import triton

from nostall.attach.torch_compile.store.kernel_store import KernelStore, code_version
from nostall.attach.torch_compile.store.records import RegionRecord, StepRecord

if TYPE_CHECKING:
    from nostall.fusion.graph.graph import Graph
    from nostall.fusion.region_plans import RegionPlan

NO_REGIONS: Mapping[str, RegionRecord] = MappingProxyType({})


def region_key(graph: Graph) -> str:
    """Hash of a region's operators, shapes, strides and dtypes, and of the code generators."""
    text = f"{graph.key} {code_version()} {triton.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


def load_region(
    graph: Graph, store: KernelStore, known: Mapping[str, RegionRecord] = NO_REGIONS
) -> RegionRecord | None:
    """The record of a region in ``known`` (by key) or in the store; None if neither has one."""
    key = region_key(graph)
    return known.get(key) or store.load(RegionRecord, key)


def save_region(graph: Graph, plan: RegionPlan, store: KernelStore) -> RegionRecord:
    """Write the kernels of a planned region; its record replaces the stored one."""
    record = RegionRecord(
        steps=tuple(
            StepRecord(
                kernel=store.put(step.program),
                inputs=step.inputs,
                outputs=step.outputs,
                operators=step.operators,
                reduces=step.reduces,
            )
            for step in plan.steps
        ),
        not_fused=dict(plan.not_fused),
    )
    store.save(region_key(graph), record)
    return record
