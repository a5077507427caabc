"""Build the candidate of a graph without a stored selection, while Inductor's version runs.

Processes with a stored selection do not import this module: it imports the region explorer and the
code generator, which takes as long as everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakMethod

from torch.fx import GraphModule

from nostall.attach.torch_compile.graph_copies import DynamicInputs, clone_graph
from nostall.attach.torch_compile.measure.graph_comparison import GraphClocks
from nostall.attach.torch_compile.measure.kernel_accuracy import Region
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.rewrite.attention import calls_attention
from nostall.attach.torch_compile.rewrite.inductor_pass import GraphObserver
from nostall.attach.torch_compile.rewrite.kernel_selection import RewriteResult
from nostall.attach.torch_compile.rewrite.loss import has_losses
from nostall.attach.torch_compile.rewrite.matching import region_record
from nostall.attach.torch_compile.selection.accuracy_repair import AccuracyRepair
from nostall.attach.torch_compile.selection.dispatcher import GraphDispatcher, SelectionContext
from nostall.attach.torch_compile.selection.graph_state import GraphState
from nostall.attach.torch_compile.selection.precompile import REGIONS_PER_WORKER, Precompiler
from nostall.attach.torch_compile.selection.sized_versions import SizedContext
from nostall.attach.torch_compile.selection.sources import (
    Choice,
    ProductSource,
    RegionSource,
    Source,
)
from nostall.attach.torch_compile.selection.versions import (
    Candidate,
    GraphVersions,
    circumstances,
)
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.rank_sync import Selection
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks, Task, log_errors
from nostall.attach.torch_compile.workers.worker import INDUCTOR_WORKERS
from nostall.attach.warning import warn_once
from nostall.gpu.clock import Clock

TUNED = Selection("tuned", tuned=True)
"""The selection of Inductor's version with measured block sizes."""
LEAST_RATIO = 0.93
"""A candidate whose losses make it slower than this is not tried with fewer chunks."""


def is_slightly_slower(report: GraphReport) -> bool:
    """Whether the last candidate was slower by no more than fewer chunks may gain."""
    compared = report.comparison
    if compared is None or compared.verdict != "slower":
        return False
    ratios = [compared.ratio, compared.replayed.ratio if compared.replayed else compared.ratio]
    return min(ratios) >= LEAST_RATIO


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
        clocks: GraphClocks,
        kernel_clock: Clock | None,
        dynamic_inputs: DynamicInputs | None,
    ) -> None:
        """``patches``: the user's changes of Inductor's configuration.

        ``clocks`` time whole graphs.  ``kernel_clock`` times plans and kernels; None disables
        tuning and comparisons of kernels.  ``dynamic_inputs``: traced ones if a size is dynamic.
        """
        self.versions, self.report, self.patches = versions, versions.report, patches
        self.clocks, self.dynamic_inputs = clocks, dynamic_inputs
        # How the candidate is compiled; None until that is decided.
        self.selection: Selection | None = None
        # Whether the version with measured block sizes is still to be tried.
        self.tries_blocks = False
        self.state = GraphState(self.report)
        self.tasks = BackgroundTasks()
        self.precompiler = Precompiler(self.tasks, self.state)
        self.regions = RegionSource(versions, self.precompiler, kernel_clock, patches)
        self.products = ProductSource(versions, self.precompiler, kernel_clock, patches)
        # In the order in which they choose.
        self.sources: tuple[Source, ...] = (self.regions, self.products)
        # Whether Inductor ran its passes; it does not if PyTorch's caches have the code.
        self.is_observed = False
        # Graphs that candidates are compiled from, by whether losses keep their logits, and by
        # whether they have fewer chunks.
        self._graphs: dict[tuple[bool, bool], GraphModule] = {}

    def dispatcher(
        self, module: GraphModule, copy: GraphModule, inputs: Sequence[Any], store: KernelStore
    ) -> GraphDispatcher:
        """Compile the baseline; the returned dispatcher will build the candidate from ``copy``."""
        source = self._rewritten(copy, Selection("stitched"))
        context = SelectionContext(
            graph=self.report.graph,
            store=store,
            clocks=self.clocks,
            tasks=self.tasks,
            about=circumstances(self.versions.device, self.patches),
            sized=self._sized(copy, store),
            repair=self._repair(copy),
            next_selection=self._next_selection,
            block_seconds=self.versions.options.block_seconds,
        )
        observe = self._observer() if self.versions.needs_observation else None
        # Read before the observing pass becomes part of Inductor's configuration.
        self.report.local_only_reason = self.versions.local_only_reason
        if self.report.is_rewritten and not self.report.local_only_reason:
            # One worker finds the graphs; a second one compiles the version with measured blocks.
            workers = 1 if self.versions.untuned_reason(copy) else 2
            self.precompiler.start_workers(self.versions.device, workers * REGIONS_PER_WORKER)
        baseline = self.versions.compile_baseline(module, inputs, observe, copy)
        if not self.report.local_only_reason:
            if observe is not None and not (self.is_observed or self.versions.local_only_reason):
                self._observe_later(source, inputs)
            self._prepare_blocks(copy, inputs)
            compiler = self.versions.compiler.without_cuda_graphs
            compile_baselines = self.precompiler.compile_baselines
            comparisons, products = self.regions.comparisons, self.products.comparisons
            for worker in INDUCTOR_WORKERS:
                task = partial(compile_baselines, comparisons, compiler, worker, products)
                self.tasks.add_final(task)
        return GraphDispatcher(baseline, partial(self._build, copy), context, self.state)

    def _sized(self, copy: GraphModule, store: KernelStore) -> SizedContext | None:
        if self.dynamic_inputs is None:
            return None
        return self.versions.sized(copy, self.dynamic_inputs, store, self.clocks)

    def _prepare_blocks(self, copy: GraphModule, inputs: Sequence[Any]) -> None:
        """Have a worker compile Inductor's version with its block sizes to be measured."""
        self.report.blocks_note = self.versions.untuned_reason(copy)
        if self.report.blocks_note:
            return
        self.tries_blocks = True
        patches = self._patches(TUNED)
        kernel_filter = self.versions.kernel_filter(TUNED)
        self.precompiler.compile_tuned_version(copy, inputs, patches, kernel_filter)

    def _patches(self, selection: Selection) -> dict[str, Any]:
        """The changes of Inductor's configuration for a selection's candidate."""
        return dict(getattr(self.versions.compiler_of(selection), "patches", self.patches))

    def _rewritten(self, original: GraphModule, selection: Selection) -> GraphModule:
        """What a selection's candidate is compiled from, which no compiler may modify."""
        is_changed = calls_attention(original) or has_losses(original)
        if selection.version == "tuned" or not is_changed:
            return original
        key = selection.whole_logits, selection.fewer_chunks
        if key not in self._graphs:
            self._graphs[key] = self.versions.rewritten(clone_graph(original), selection)
        return self._graphs[key]

    def _build(
        self, copy: GraphModule, args: Sequence[Any], selection: Selection | None
    ) -> Candidate | None:
        """Compile the candidate of a selection, or of the best one measured here; before that one,
        Inductor's version with measured block sizes if a worker has compiled it.

        Returns None if a worker compiles it first; the method is then called once more.

        Raises :class:`AllKernelsSlower` and :class:`WorkerDied`.
        """
        if self.precompiler.worker_died:
            raise WorkerDied("kernels could not be compiled by another process")
        if self.tries_blocks:
            self.tries_blocks = False
            if self.precompiler.has_tuned_version:
                return self._compile(clone_graph(copy), args, TUNED)
            self.report.blocks_note = f"not tried: {self.precompiler.tuned_failure}"
        if self.selection is None or selection not in (None, self.selection):
            self.selection = selection or self._select_kernels()
            kernel_filter = self.versions.kernel_filter(self.selection)
            source = self._rewritten(copy, self.selection)
            if not self.versions.local_only_reason and self.precompiler.compile_candidate(
                source, args, self._patches(self.selection), kernel_filter
            ):
                return None
        # Compilers modify their graph.
        module = clone_graph(self._rewritten(copy, self.selection))
        return self._compile(module, args, self.selection, self.precompiler.rewrite_result)

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

    def _repair(self, original: GraphModule) -> AccuracyRepair:
        """``original``: the graph as it came."""

        def compile_again(args: Sequence[Any], selection: Selection) -> Candidate:
            return self._compile(clone_graph(self._rewritten(original, selection)), args, selection)

        def regions(candidate: Candidate) -> list[Region]:
            store, known = KernelStore(), candidate.selection.regions
            observed = [(g, region_record(g, store, known)) for g in self.regions.graphs]
            every = [*observed, *candidate.result.regions]
            return list({graph.key: (graph, record) for graph, record in every}.values())

        return AccuracyRepair(compile_again, regions, original, self.report)

    def _select_kernels(self) -> Selection:
        """Measure which plans run, and which kernels stay with Inductor.

        Raises :class:`AllKernelsSlower`.
        """
        choice = Choice(Selection("stitched"))
        for source in self.sources:
            choice = source.choose(choice)
        if choice.slower is not None:
            raise choice.slower
        return replace(choice.selection, tuned=self.report.is_tuned)

    def _next_selection(self, candidate: Candidate, kernels: Collection[str]) -> Selection | None:
        """The selection to try after a candidate that is not faster, and called ``kernels``."""
        tried = candidate.selection
        if self.report.loss:
            if not tried.fewer_chunks and is_slightly_slower(self.report):
                return replace(tried, fewer_chunks=True)
            tried = replace(tried, whole_logits=True, fewer_chunks=False)
            if kernels or self.report.attention:
                return tried
        return self.products.alone(tried, kernels)

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
        if self.report.is_rewritten:
            return  # The candidate has other operators: a worker finds its graphs later.
        self.is_observed = True
        if not self._add_graph(module):
            return
        if self.versions.options.background:
            for source in self.sources:
                if source.is_enabled:
                    self.tasks.add(source.generate)
        if self.regions.graphs and not self.report.local_only_reason:
            with log_errors():  # must not end Inductor's compilation, either
                regions_compared = self.regions.compared_regions(len(self.regions.graphs))
                self.precompiler.start_workers(self.versions.device, regions_compared)

    def _add_graph(self, module: GraphModule, known: Collection[str] = ()) -> bool:
        """Add one of Inductor's graphs to what is prepared; returns False if that fails.

        A graph of which all regions have keys in ``known`` was added before.
        """
        try:
            if self.regions.add(module, known) and not self.versions.is_dynamic:
                self.products.add(module)
        except Exception as error:  # must not end Inductor's compilation
            warn_once(f"a graph is not prepared: {type(error).__name__}: {error}")
            return False
        return True

    def _observe_later(self, copy: GraphModule, inputs: Sequence[Any]) -> None:
        """Have a worker find Inductor's graphs, and generate their kernels before final tasks."""
        find_graphs = self.precompiler.observation(copy, inputs, self.patches)

        def prepare(find: Callable[[], list[GraphModule]]) -> Iterator[Task]:
            graphs, known = find(), {region.key for region in self.regions.graphs}
            for module in graphs:
                self._add_graph(module, known)
            for source in self.sources:
                yield from source.generate()

        if find_graphs is not None:
            self.tasks.add(partial(prepare, find_graphs))
