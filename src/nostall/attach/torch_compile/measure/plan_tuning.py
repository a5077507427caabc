"""The kernels to compile for a graph, with all plans to measure, and the tuning of plans.

Plans of stitched kernels are tuned before the versions of the graph are compared. The kernels of
matrix products have no tuning of their own: a comparison measures all their configurations.

Everything that needs a compiler happens in the background.  Kernels run on the user's thread, while
no CUDA graph is being captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch

from nostall.attach.torch_compile.options import FuseScope
from nostall.attach.torch_compile.rewrite.matching import region_record
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.rank_sync import RankSync
from nostall.attach.torch_compile.store.records import RegionRecord, StepRecord
from nostall.attach.torch_compile.store.regions import save_region
from nostall.attach.warning import warn_once
from nostall.core.errors import BadInput
from nostall.fusion.codegen.autotune.autotuner import Autotuner
from nostall.fusion.codegen.autotune.candidates import candidates
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators, supported_groups
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.codegen.tiling.product_config import ProductConfig, configs
from nostall.fusion.graph.graph import Graph
from nostall.fusion.hardware import H200, Hardware
from nostall.fusion.products.emit import emit_products
from nostall.fusion.products.product_graph import ProductGraph
from nostall.fusion.recompute.copies import Kernels
from nostall.fusion.region_plans import plan_region, reduces, region_kernels
from nostall.gpu.clock import Clock

MAX_COMPARISON_S = 0.05
"""Longest measurement of one comparison, in seconds.  It may be coarse, because the user's process
waits for it, and because the whole graphs are compared afterwards."""
MIN_TUNED_S = 8e-6
"""Kernels with a shorter modelled time (seconds) are not tuned: tuning gains a few hundredths of
that, and compiling a kernel's plans takes as long as for any other kernel."""
MAX_REDUCING_CONFIGS = 5
"""Configurations of a product's kernel with reductions: the first ones are the fastest of most
products with a derivative of an activation, which a gradient of a bias reduces."""


@dataclass(frozen=True)
class PlanCandidates:
    """Kernels of one region whose plans are to be measured."""

    graph: Graph
    # What the kernels compute, and in which graph.
    partition: Kernels
    # The candidates by the kernel's operators.  The first one has the modelled best plan.
    kernels: dict[tuple[int, ...], tuple[PlannedKernel, ...]]


@dataclass
class PlanTuning:
    """Tunes the plans of all fused kernels of a graph."""

    # Modelled best plans of each kernel that are measured, beside the best one of every scheme; 0
    # disables tuning.
    max_plans: int
    # Approximate total budget of the measurements, in seconds.
    seconds: float
    fuse: FuseScope
    # Filled by :meth:`prepare`, here or in a worker process.
    candidates: list[PlanCandidates] = field(default_factory=list)

    def prepare(self, graph: Graph) -> Iterator[str]:
        """Stitch a region and yield the names of all kernels that have to be compiled for it.

        These are the kernels that will be inserted, and those of all plans to be measured.  Needs
        the store, but no GPU.
        """
        store = KernelStore()
        steps = self._fused_steps(region_record(graph, store))
        for step in steps:
            yield step.kernel
        if not self.max_plans or graph.varying is not None:
            return
        region = PlanCandidates(graph, region_kernels(graph), {})
        for operators in self._fused_groups(region.partition):
            try:
                schedule = schedule_operators(region.partition.graph, operators)
                planned = candidates(schedule, self.max_plans)
            except BadInput:
                continue  # a packed kernel, whose parts have no common loops
            if modelled_seconds(planned[0]) >= MIN_TUNED_S:
                region.kernels[schedule.mapping.operators] = planned
                for kernel in planned:
                    yield store.put(emit(kernel))
        if region.kernels:
            self.candidates.append(region)

    def run(self, device: torch.device, clock: Clock) -> None:
        """Measure the candidates that have no stored result, and store regions with faster plans.

        Does nothing on ranks other than 0.  If something fails, the modelled plans stay.
        """
        if not self.candidates or not RankSync.current().is_leader:
            return
        try:
            self._run(device, clock, KernelStore())
        except Exception as error:  # tuning is optional: the modelled plans are valid
            warn_once(f"plans were not tuned: {type(error).__name__}: {error}")

    def _run(self, device: torch.device, clock: Clock, store: KernelStore) -> None:
        count = sum(len(region.kernels) for region in self.candidates)
        seconds = min(MAX_COMPARISON_S, self.seconds / count)
        tuner = Autotuner(clock, self.max_plans, seconds, store.folder)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for region in self.candidates:
                _tune_region(region, tuner, store)
        for failure in {record.failure for record in tuner.records if record.failure}:
            warn_once(f"a kernel keeps its modelled plan: {failure}")

    def _fused_steps(self, record: RegionRecord) -> list[StepRecord]:
        return [step for step in record.steps if self.fuse == "all" or step.reduces]

    def _fused_groups(self, kernels: Kernels) -> list[tuple[int, ...]]:
        groups = supported_groups(kernels.graph, kernels.groups)
        return [g for g in groups if self.fuse == "all" or reduces(kernels.graph, g)]


def _tune_region(region: PlanCandidates, tuner: Autotuner, store: KernelStore) -> None:
    """Tune a region's kernels, and store the region anew if a modelled best plan is not fastest."""
    fastest = {
        operators: tuner.fastest_of(planned) for operators, planned in region.kernels.items()
    }
    if all(fastest[operators] == planned[0] for operators, planned in region.kernels.items()):
        return

    def choice(schedule: Schedule) -> PlannedKernel:
        kernel = fastest.get(schedule.mapping.operators)
        return plan_kernel(schedule, kernel.plan) if kernel else default_plan(schedule)

    save_region(region.graph, plan_region(region.graph, region.partition, choice), store)


@dataclass
class ProductTuning:
    """Lists the product kernels to measure, with the interface of :class:`PlanTuning`."""

    # The GPU of the user's process; a worker has none.
    hardware: Hardware = H200
    # Plans of other kernels: none.
    candidates: list[PlanCandidates] = field(default_factory=list)

    def prepare(self, graph: Graph) -> Iterator[str]:
        """Write the kernels of a product's graph to the store and yield their names."""
        for _, kernel, _ in product_kernels(ProductGraph(graph), KernelStore(), self.hardware):
            yield kernel


def product_kernels(
    product: ProductGraph, store: KernelStore, hardware: Hardware
) -> Iterator[tuple[ProductConfig, str, tuple[int, ...]]]:
    """Each configuration with the name of its kernel and the nodes that the kernel reads."""
    # The same product is measured without reductions, too.
    most = MAX_REDUCING_CONFIGS if product.reductions else None
    for config in islice(configs(product.shape, hardware), most):
        program = emit_products(product, config, hardware)
        yield config, store.put(program), program.inputs
