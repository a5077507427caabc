"""Sources of a candidate's kernels: the regions of its graphs, and their matrix products.

A source keeps Inductor's graphs, has kernels generated for them in the background, and chooses by
measurement which of them a candidate has.  The sources choose one after the other: each of them
gets what those before it have chosen.  Kernels over lists of tensors are not measured alone: the
rewrite inserts all of them, and the comparison of the whole graph decides.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule

from nostall.attach.torch_compile.measure.kernel_comparison import (
    AllKernelsSlower,
    KernelComparisons,
)
from nostall.attach.torch_compile.measure.plan_tuning import PlanTuning, ProductTuning
from nostall.attach.torch_compile.measure.product_comparison import ProductComparisons
from nostall.attach.torch_compile.measure.product_replacement import (
    Measured,
    Replacement,
    replace_kernels,
)
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter
from nostall.attach.torch_compile.rewrite.matching import find_region_graphs, region_record
from nostall.attach.torch_compile.selection.precompile import Precompiler
from nostall.attach.torch_compile.selection.versions import GraphVersions, compile_kernel
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.rank_sync import RankSync, Selection
from nostall.attach.torch_compile.store.records import RegionRecord
from nostall.attach.torch_compile.store.regions import region_key
from nostall.attach.torch_compile.workers.tasks import Task, log_errors
from nostall.fusion.graph.graph import Graph
from nostall.fusion.hardware import hardware_of
from nostall.gpu.clock import Clock


@dataclass(frozen=True)
class Choice:
    """The kernels that sources have chosen."""

    selection: Selection
    measured: Measured = field(default_factory=dict)
    """Measurements of stitched kernels against Inductor's code for the same operators."""
    slower: AllKernelsSlower | None = None
    """Why no candidate is compiled if the next sources have no kernel, either."""


class RegionSource:
    """Stitched kernels of the regions of a graph's forward and backward pass."""

    is_enabled = True

    def __init__(
        self,
        versions: GraphVersions,
        precompiler: Precompiler,
        clock: Clock | None,
        patches: Mapping[str, Any],
    ) -> None:
        """``clock`` times plans and kernels; None disables tuning and comparisons.

        ``patches``: the user's changes of Inductor's configuration.
        """
        options = versions.options
        self.versions, self.precompiler, self.clock = versions, precompiler, clock
        max_plans = options.tuned_plans if clock is not None else 0
        self.tuning = PlanTuning(max_plans, options.seconds, options.fuse)
        self.comparisons = KernelComparisons(clock, options, dict(patches))
        # The regions' graphs, and those whose kernels are not generated yet.
        self.graphs: list[Graph] = []
        self.pending = deque[Graph]()

    def add(self, module: GraphModule, known: Collection[str] = ()) -> bool:
        """Add one of Inductor's graphs; False if all of its regions have keys in ``known``."""
        regions = find_region_graphs(module)
        if regions and all(region.key in known for region in regions):
            return False
        self.graphs += regions
        self.pending += regions
        if not self.versions.is_dynamic:
            self.comparisons.add(module)
        return True

    def compared_regions(self, regions: int) -> int:
        """The number of regions if this process compares their kernels with baselines, else 0."""
        return regions if self.comparisons.graphs and RankSync.current().is_leader else 0

    def generate(self) -> Iterator[Task]:
        """Generate and compile the kernels of all pending regions, by a worker or here.

        Yields the tasks that are left to do.
        """
        graphs = list[Graph]()
        while self.pending:  # another thread may add to it meanwhile
            graphs.append(self.pending.popleft())
        if not graphs:
            return
        if not self.versions.local_only_reason:
            self.precompiler.attach_workers(self.compared_regions(len(graphs)))
        device = self.versions.device
        candidates = self.precompiler.generate_kernels(graphs, self.tuning, device)
        if candidates is not None:
            self.tuning.candidates += candidates
            # Loading the binaries later takes milliseconds.
            yield self.precompiler.wait_for_kernels
            return
        known = set[str]()
        for graph in graphs:
            with log_errors():
                for kernel in self.tuning.prepare(graph):
                    if kernel not in known:
                        known.add(kernel)
                        yield partial(compile_kernel, kernel, device)

    def choose(self, choice: Choice) -> Choice:
        """Measure which plans run, and which kernels stay with Inductor."""
        clock = self.clock
        if self.tuning.candidates and clock is not None:
            self.versions.timed("plan_tuning", lambda: self.tuning.run(self.versions.device, clock))
        try:
            kept, slower = self._kept_in_inductor(), None
        except AllKernelsSlower as error:
            kept, slower = error.kernels, error
        selection = Selection("stitched", kept, self._records())
        return Choice(selection, self.comparisons.records, slower)

    def _kept_in_inductor(self) -> frozenset[str]:
        if not self.comparisons.graphs:
            return frozenset()
        # Not much longer than Inductor's own compilation took.
        limit = max(self.versions.report.seconds["baseline"], self.versions.options.seconds)
        compiler = self.versions.compiler.without_cuda_graphs
        return self.versions.timed(
            "kernel_comparison", lambda: self.comparisons.kept_in_inductor(compiler, limit)
        )

    def _records(self) -> dict[str, RegionRecord]:
        """Kernels of the regions, by the tuned plans.

        They are part of the selection, because tuning for other graphs may change the stored ones.
        """
        store, records = KernelStore(), dict[str, RegionRecord]()
        for graph in self.graphs:
            # Errors were logged when the region was prepared, and will be by the pass.
            with contextlib.suppress(Exception):
                records[region_key(graph)] = region_record(graph, store)
        return records


class ProductSource:
    """Kernels of matrix products with the elementwise operators around them."""

    def __init__(
        self,
        versions: GraphVersions,
        precompiler: Precompiler,
        clock: Clock | None,
        patches: Mapping[str, Any],
    ) -> None:
        """As :class:`RegionSource`."""
        self.versions, self.precompiler = versions, precompiler
        self.comparisons = ProductComparisons(clock, versions.options, dict(patches))
        # Keys of the chosen kernels among those of regions.
        self.keys = set[str]()

    @property
    def is_enabled(self) -> bool:
        return self.comparisons.is_enabled

    def add(self, module: GraphModule) -> None:
        """Add one of Inductor's graphs."""
        self.comparisons.add(module)

    def generate(self) -> Iterator[Task]:
        """Have a worker compile the kernels of matrix products; yields the task that waits.

        Those beside stitched kernels come first, then those of which stitched kernels compute the
        readers.  Rank 0 measures them for all ranks, so the others do not need them.
        """
        if not RankSync.current().is_leader:
            return
        found: dict[str, Graph] = {}
        for products_only in (False, True):
            kernel_filter = self._filter(Selection("stitched", products_only=products_only))
            found |= {graph.key: graph for graph in self.comparisons.product_graphs(kernel_filter)}
            with log_errors():  # they are compiled when they are measured
                self.comparisons.add_baselines(kernel_filter)
        graphs = [*found.values()]
        if graphs and not self.versions.local_only_reason:
            device = self.versions.device
            tuning = ProductTuning(hardware_of(device))
            if self.precompiler.generate_kernels(graphs, tuning, device) is not None:
                yield self.precompiler.wait_for_kernels

    def choose(self, choice: Choice) -> Choice:
        """Add the kernels measured faster, also in the place of stitched ones that save less."""
        selection = choice.selection
        with_products = self._extended(selection)
        is_unchanged = with_products is selection
        if choice.slower is not None and is_unchanged and not self.versions.report.is_rewritten:
            return choice
        replacement = self._replacement(choice, with_products.regions)
        if not replacement.kernels:
            return Choice(with_products)
        kept = selection.kept_in_inductor | replacement.kernels
        without = replace(selection, kept_in_inductor=kept)
        replaced = self._extended(without, replacement.regions)
        # After a failure no product takes the place of the kernels that would be left out.
        return Choice(with_products if replaced is without else replaced)

    def alone(self, tried: Selection, kernels: Collection[str]) -> Selection | None:
        """The products alone, if a candidate that was tried calls other kernels, too.

        Products are measured beside Inductor's kernels then; what is known of them is not measured
        again.  None if no product is faster so.
        """
        records = [tried.regions[key] for key in self.keys if key in tried.regions]
        products = {step.kernel for record in records for step in record.steps}
        if tried.products_only or products.issuperset(kernels):
            return None
        regions = {k: v for k, v in tried.regions.items() if k not in self.keys}
        selection = replace(tried, regions=regions, products_only=True)
        with_products = self._extended(selection)
        return None if with_products is selection else with_products

    def _replacement(self, choice: Choice, regions: Mapping[str, RegionRecord]) -> Replacement:
        """Measure which products save more with the readers that stitched kernels compute.

        ``choice``: without products.  ``regions``: with the chosen ones.
        """
        if not RankSync.current().is_leader:
            return Replacement()
        compiler = self.versions.compiler.without_cuda_graphs
        kernel_filter = self._filter(choice.selection)
        chosen = {key: regions[key] for key in self.keys if key in regions}
        replacement = self.versions.timed(
            "products",
            lambda: replace_kernels(
                self.comparisons, choice.measured, compiler, kernel_filter, chosen
            ),
        )
        self.versions.report.products = self.comparisons.lines
        return replacement

    def _extended(
        self, selection: Selection, known: Mapping[str, RegionRecord] = MappingProxyType({})
    ) -> Selection:
        """The selection with the product kernels that are measured faster; itself if none is.

        ``known``: kernels that are chosen already, by the key of their graph.
        """
        if not (self.is_enabled and RankSync.current().is_leader):
            return selection
        compiler = self.versions.compiler.without_cuda_graphs
        kernel_filter = self._filter(selection)
        chosen = self.versions.timed(
            "products", lambda: self.comparisons.chosen(compiler, kernel_filter, known)
        )
        self.versions.report.products = self.comparisons.lines
        self.keys |= chosen.keys()
        return replace(selection, regions={**selection.regions, **chosen}) if chosen else selection

    def _filter(self, selection: Selection) -> KernelFilter:
        """The filter of a selection, without products."""
        return replace(self.versions.kernel_filter(selection), products=False)


Source = RegionSource | ProductSource
