"""Build the candidate of a graph without a stored selection, while Inductor's version runs.

Processes with a stored selection do not import this module: it imports the region explorer and the
code generator, which takes as long as everything else.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakMethod

from torch.fx import GraphModule

from nostall.attach.torch_compile.graph_copies import DynamicInputs, clone_graph
from nostall.attach.torch_compile.measure.kernel_accuracy import Region
from nostall.attach.torch_compile.measure.kernel_comparison import (
    AllKernelsSlower,
    KernelComparisons,
)
from nostall.attach.torch_compile.measure.plan_tuning import PlanTuning, ProductTuning
from nostall.attach.torch_compile.measure.product_comparison import ProductComparisons
from nostall.attach.torch_compile.measure.product_competition import (
    Displacement,
    displace_kernels,
)
from nostall.attach.torch_compile.rewrite.attention import calls_attention, keep_attention
from nostall.attach.torch_compile.rewrite.inductor_pass import GraphObserver
from nostall.attach.torch_compile.rewrite.kernel_selection import RewriteResult
from nostall.attach.torch_compile.rewrite.matching import find_region_graphs, region_record
from nostall.attach.torch_compile.selection.accuracy_repair import AccuracyRepair
from nostall.attach.torch_compile.selection.dispatcher import GraphDispatcher, SelectionContext
from nostall.attach.torch_compile.selection.graph_state import GraphState
from nostall.attach.torch_compile.selection.precompile import Precompiler
from nostall.attach.torch_compile.selection.versions import (
    Candidate,
    GraphVersions,
    circumstances,
    compile_kernel,
)
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.rank_sync import RankSync, Selection
from nostall.attach.torch_compile.store.records import RegionRecord
from nostall.attach.torch_compile.store.regions import region_key
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks, Task, log_errors
from nostall.attach.torch_compile.workers.worker import INDUCTOR_WORKERS
from nostall.attach.warning import warn_once
from nostall.fusion.graph.graph import Graph
from nostall.fusion.hardware import hardware_of
from nostall.gpu.clock import Clock


class WorkerDied(Exception):
    """A worker crashed or hung while it compiled this graph.

    Compiling it in the user's process could crash or hang that, too.
    """


class CandidateBuilder:
    """Prepares and compiles the candidate of one graph."""

    def __init__(
        self,
        versions: GraphVersions,
        patches: Mapping[str, Any],
        clock: Clock,
        kernel_clock: Clock | None,
        dynamic_inputs: DynamicInputs | None,
    ) -> None:
        """``patches``: the user's changes of Inductor's configuration.

        ``clock`` times whole graphs.  ``kernel_clock`` times plans and kernels; None disables
        tuning and comparisons of kernels.  ``dynamic_inputs``: traced ones if a size is dynamic.
        """
        options, self.report = versions.options, versions.report
        self.versions, self.patches = versions, patches
        self.clock, self.kernel_clock = clock, kernel_clock
        self.dynamic_inputs = dynamic_inputs
        # How the candidate is compiled; None until that is decided.
        self.selection: Selection | None = None
        self.state = GraphState(self.report)
        self.tasks = BackgroundTasks()
        self.precompiler = Precompiler(self.tasks, self.state)
        max_plans = options.tuned_plans if kernel_clock is not None else 0
        self.tuning = PlanTuning(max_plans, options.seconds, options.fuse)
        self.comparisons = KernelComparisons(kernel_clock, options, dict(patches))
        self.products = ProductComparisons(kernel_clock, options, dict(patches))
        # Keys of regions that are matrix products with their readers.
        self.product_keys = set[str]()
        # Whether Inductor ran its passes; it does not if PyTorch's caches have the code.
        self.is_observed = False
        # Regions of Inductor's graphs, and those whose kernels are not generated yet.
        self.regions: list[Graph] = []
        self.pending_regions = deque[Graph]()

    @property
    def local_only_reason(self) -> str:
        """Why no worker compiles for this graph; empty if one does."""
        if not self.versions.options.background:
            return "background preparation is off"
        if self.versions.is_dynamic:
            return "a size is dynamic"
        return self.versions.compiler.local_only_reason

    def dispatcher(
        self, module: GraphModule, copy: GraphModule, inputs: Sequence[Any], store: KernelStore
    ) -> GraphDispatcher:
        """Compile the baseline; the returned dispatcher will build the candidate from ``copy``."""
        source = copy
        if self.versions.options.attention == "measure" and calls_attention(copy):
            self.report.attention = keep_attention(source := clone_graph(copy))
        context = SelectionContext(
            graph=self.report.graph,
            store=store,
            clock=self.clock,
            seconds=self.versions.options.seconds,
            tasks=self.tasks,
            about=circumstances(self.versions.device, self.patches),
            repair=self._repair(source, copy),
            next_selection=self._next_selection,
        )
        observe = self._observer() if self.versions.needs_observation else None
        # Read before the observing pass becomes part of Inductor's configuration.
        self.report.local_only_reason = self.local_only_reason
        baseline = self.versions.compile_baseline(module, inputs, observe, copy)
        if not self.report.local_only_reason:
            if observe is not None and not (self.is_observed or self.local_only_reason):
                self._observe_later(source, inputs)
            compiler = self.versions.compiler.without_cuda_graphs
            compile_baselines = self.precompiler.compile_baselines
            for worker in INDUCTOR_WORKERS:
                self.tasks.add_final(partial(compile_baselines, self.comparisons, compiler, worker))
        return GraphDispatcher(baseline, partial(self._build, source), context, self.state)

    def _build(
        self, copy: GraphModule, args: Sequence[Any], selection: Selection | None
    ) -> Candidate | None:
        """Compile the candidate of a selection, or of the best one measured here.

        Returns None if a worker compiles it first; the method is then called once more.

        Raises :class:`AllKernelsSlower` and :class:`WorkerDied`.
        """
        if self.precompiler.worker_died:
            raise WorkerDied("kernels could not be compiled by another process")
        if self.selection is None or selection not in (None, self.selection):
            self.selection = selection or self._select_kernels()
            kernel_filter = self.versions.kernel_filter(self.selection)
            if not self.local_only_reason and self.precompiler.compile_candidate(
                copy, args, self.patches, kernel_filter
            ):
                return None
        # Compilers modify their graph, and the accuracy check runs this one.
        known = self.precompiler.rewrite_result
        return self._compile(clone_graph(copy), args, self.selection, known)

    def _compile(
        self,
        module: GraphModule,
        args: Sequence[Any],
        selection: Selection,
        worker_result: RewriteResult | None = None,
    ) -> Candidate:
        if self.dynamic_inputs is None:
            return self.versions.compile_candidate(module, args, selection, worker_result)
        with self.dynamic_inputs.tracing():
            inputs = self.dynamic_inputs.inputs
            return self.versions.compile_candidate(module, inputs, selection, worker_result)

    def _repair(self, source: GraphModule, original: GraphModule) -> AccuracyRepair:
        """``source``: what candidates are compiled from. ``original``: the graph as it came."""

        def compile_again(args: Sequence[Any], selection: Selection) -> Candidate:
            return self._compile(clone_graph(source), args, selection)

        def regions(candidate: Candidate) -> list[Region]:
            store, known = KernelStore(), candidate.selection.regions
            observed = [(g, region_record(g, store, known)) for g in self.regions]
            every = [*observed, *candidate.result.regions]
            return list({graph.key: (graph, record) for graph, record in every}.values())

        return AccuracyRepair(compile_again, regions, original, self.report)

    def _select_kernels(self) -> Selection:
        """Measure which plans run, and which kernels stay with Inductor.

        Raises :class:`AllKernelsSlower`.
        """
        clock = self.kernel_clock
        if self.tuning.candidates and clock is not None:
            self.versions.timed("raced", lambda: self.tuning.run(self.versions.device, clock))
        try:
            kept, slower = self._kept_in_inductor(), None
        except AllKernelsSlower as error:
            kept, slower = error.kernels, error
        selection = Selection("stitched", kept, self._region_records())
        with_products = self._with_products(selection)
        if slower is not None and with_products is selection and not self.report.attention:
            raise slower
        displacement = self._displacement(selection, with_products.regions)
        if not displacement.kernels:
            return with_products
        without = replace(selection, kept_in_inductor=kept | displacement.kernels)
        displaced = self._with_products(without, displacement.regions)
        # After a failure no product takes the place of the kernels that would be left out.
        return with_products if displaced is without else displaced

    def _next_selection(self, candidate: Candidate, kernels: Collection[str]) -> Selection | None:
        """The matrix products alone, if the candidate has other kernels, too.

        Products are measured beside Inductor's kernels then; what is known of them is not measured
        again.  None if no product is faster so.
        """
        tried = candidate.selection
        records = [tried.regions[key] for key in self.product_keys if key in tried.regions]
        products = {step.kernel for record in records for step in record.steps}
        if tried.products_only or products.issuperset(kernels):
            return None
        regions = {k: v for k, v in tried.regions.items() if k not in self.product_keys}
        selection = replace(tried, regions=regions, products_only=True)
        with_products = self._with_products(selection)
        return None if with_products is selection else with_products

    def _displacement(
        self, selection: Selection, regions: Mapping[str, RegionRecord]
    ) -> Displacement:
        """Measure which products save more with the readers that stitched kernels compute.

        ``selection``: without products.  ``regions``: with the chosen ones.
        """
        if not RankSync.current().is_leader:
            return Displacement()
        compiler = self.versions.compiler.without_cuda_graphs
        kernel_filter = replace(self.versions.kernel_filter(selection), products=False)
        measured = self.comparisons.records
        chosen = {key: regions[key] for key in self.product_keys if key in regions}
        displacement = self.versions.timed(
            "products",
            lambda: displace_kernels(self.products, measured, compiler, kernel_filter, chosen),
        )
        self.report.products = self.products.lines
        return displacement

    def _with_products(
        self, selection: Selection, known: Mapping[str, RegionRecord] = MappingProxyType({})
    ) -> Selection:
        """The selection with the product kernels that are measured faster; itself if none is.

        ``known``: kernels that are chosen already, by the key of their graph.
        """
        if not (self.products.is_enabled and RankSync.current().is_leader):
            return selection
        compiler = self.versions.compiler.without_cuda_graphs
        kernel_filter = replace(self.versions.kernel_filter(selection), products=False)
        chosen = self.versions.timed(
            "products", lambda: self.products.chosen(compiler, kernel_filter, known)
        )
        self.report.products = self.products.lines
        self.product_keys |= chosen.keys()
        return replace(selection, regions={**selection.regions, **chosen}) if chosen else selection

    def _kept_in_inductor(self) -> frozenset[str]:
        if not self.comparisons.graphs:
            return frozenset()
        # Not much longer than Inductor's own compilation took.
        limit = max(self.report.seconds["plain"], self.versions.options.seconds)
        compiler = self.versions.compiler.without_cuda_graphs
        return self.versions.timed(
            "duels", lambda: self.comparisons.kept_in_inductor(compiler, limit)
        )

    def _region_records(self) -> dict[str, RegionRecord]:
        """Kernels of the regions, by the tuned plans.

        They are part of the selection, because tuning for other graphs may change the stored ones.
        """
        store, records = KernelStore(), dict[str, RegionRecord]()
        for graph in self.regions:
            # Errors were logged when the region was prepared, and will be by the pass.
            with contextlib.suppress(Exception):
                records[region_key(graph)] = region_record(graph, store)
        return records

    def _observer(self) -> GraphObserver:
        """The observer of Inductor's graphs; it does not keep this object alive.

        The compiled function keeps the observer, even behind the selection: it may have to compile
        its backward pass again.
        """
        reference = WeakMethod(self._observe)

        def observe(module: GraphModule) -> None:
            method = reference()
            if method is not None:
                method(module)

        return observe

    def _observe(self, module: GraphModule) -> None:
        """Plan the background work for one of Inductor's graphs, while Inductor compiles it."""
        if self.report.attention:
            return  # The candidate has other operators: a worker finds its graphs later.
        self.is_observed = True
        if not self._add_graph(module):
            return
        if self.versions.options.background:
            self.tasks.add(self._generate_kernels)
            if self.products.is_enabled:
                self.tasks.add(self._generate_products)
        if self.regions and not self.report.local_only_reason:
            with log_errors():  # must not end Inductor's compilation, either
                regions_compared = self._compared_regions(len(self.regions))
                self.precompiler.start_workers(self.versions.device, regions_compared)

    def _add_graph(self, module: GraphModule, known: Collection[str] = ()) -> bool:
        """Add one of Inductor's graphs to what is prepared; returns False if that fails.

        A graph of which all regions have keys in ``known`` was added before.
        """
        try:
            regions = find_region_graphs(module)
            if regions and all(region.key in known for region in regions):
                return True
            self.regions += regions
            self.pending_regions += regions
            if not self.versions.is_dynamic:
                self.comparisons.add(module)
                self.products.add(module)
        except Exception as error:  # must not end Inductor's compilation
            warn_once(f"a graph is not prepared: {type(error).__name__}: {error}")
            return False
        return True

    def _observe_later(self, copy: GraphModule, inputs: Sequence[Any]) -> None:
        """Have a worker find Inductor's graphs, and generate their kernels before final tasks."""
        find_graphs = self.precompiler.observation(copy, inputs, self.patches)

        def prepare(find: Callable[[], list[GraphModule]]) -> Iterator[Task]:
            graphs, known = find(), {region.key for region in self.regions}
            for module in graphs:
                self._add_graph(module, known)
            yield from self._generate_kernels()
            yield from self._generate_products()

        if find_graphs is not None:
            self.tasks.add(partial(prepare, find_graphs))

    def _generate_kernels(self) -> Iterator[Task]:
        """Generate the kernels of all pending regions, by a worker or here; yields tasks for it."""
        graphs = list[Graph]()
        while self.pending_regions:  # another thread may add to it meanwhile
            graphs.append(self.pending_regions.popleft())
        if not graphs:
            return
        if not self.local_only_reason:
            self.precompiler.attach_workers(self._compared_regions(len(graphs)))
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

    def _generate_products(self) -> Iterator[Task]:
        """Have a worker compile the kernels of matrix products; yields the task that waits.

        Those beside stitched kernels come first, then those of which stitched kernels compute the
        readers.  Rank 0 measures them for all ranks, so the others do not need them.
        """
        if not RankSync.current().is_leader:
            return
        found: dict[str, Graph] = {}
        for products_only in (False, True):
            selection = Selection("stitched", products_only=products_only)
            kernel_filter = replace(self.versions.kernel_filter(selection), products=False)
            found |= {graph.key: graph for graph in self.products.product_graphs(kernel_filter)}
        graphs = [*found.values()]
        if graphs and not self.local_only_reason:
            device = self.versions.device
            tuning = ProductTuning(hardware_of(device))
            if self.precompiler.generate_kernels(graphs, tuning, device) is not None:
                yield self.precompiler.wait_for_kernels

    def _compared_regions(self, regions: int) -> int:
        """The number of regions if this process compares their kernels with baselines, else 0."""
        return regions if self.comparisons.graphs and RankSync.current().is_leader else 0
