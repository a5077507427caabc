"""``torch.compile(model, backend="nostall")``: the function that Dynamo calls with each graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import RestartAnalysis
from torch.fx import GraphModule

from nostall.attach.torch_compile.graph_copies import DynamicInputs, clone_graph
from nostall.attach.torch_compile.graph_key import graph_key, input_device, unsupported_reason
from nostall.attach.torch_compile.options import Options, parse_options
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.rewrite.compilers import (
    CompiledGraph,
    has_searched_blocks,
    inductor_patches,
)
from nostall.attach.torch_compile.selection.sized_versions import SizedVersions, load_choice
from nostall.attach.torch_compile.selection.versions import GraphVersions
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.rank_sync import FOLLOWS_RANK_0, RankSync, Selection
from nostall.attach.torch_compile.store.records import SelectionRecord
from nostall.attach.warning import warn_once
from nostall.core import garbage_collector

if TYPE_CHECKING:
    from nostall.attach.torch_compile.measure.graph_comparison import GraphClocks
    from nostall.attach.torch_compile.selection.candidate_builder import CandidateBuilder
    from nostall.gpu.clock import Clock


class Backend:
    """A backend of ``torch.compile``, with a report for each graph that it has compiled."""

    def __init__(self, clock: Clock | None = None, kernel_clock: Clock | None = None) -> None:
        """``clock`` times whole graphs: by default CUDA events and replayed CUDA graphs, or wall
        time on a CPU.

        ``kernel_clock`` times plans and kernels: by default replayed CUDA graphs; on a CPU there is
        none, which disables tuning and comparisons of kernels.
        """
        _import_inductor()
        self._clock, self._kernel_clock = clock, kernel_clock
        self.reports: list[GraphReport] = []
        self.__name__ = "nostall"

    def __call__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> CompiledGraph:
        """Compile a graph.

        Raises :class:`BadInput` for invalid options, and whatever Inductor raises.
        """
        own_options, inductor_options = parse_options(options)
        patches = inductor_patches(mode, inductor_options)
        graph = _Graph(module, inputs, own_options, patches, self._clock, self._kernel_clock)
        self.reports.append(graph.report)
        return graph.compile()

    def reset(self) -> None:
        """Called by ``torch._dynamo.reset()``: drop Inductor's CUDA graphs."""
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        if torch.cuda.is_available():
            reset_cudagraph_trees()


class _Graph:
    """Compiles one graph of Dynamo."""

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        options: Options,
        patches: Mapping[str, Any],
        clock: Clock | None,
        kernel_clock: Clock | None,
    ) -> None:
        self.module, self.inputs, self.options = module, inputs, options
        self.patches, self.clock, self.kernel_clock = patches, clock, kernel_clock
        self.report = GraphReport()
        self.versions = GraphVersions(options, patches, inputs, self.report)

    def compile(self) -> CompiledGraph:
        """Inductor's version, a stored selection, or a dispatcher that will select a version."""
        if self.options.loss == "chunked":
            self.versions.chunk_losses(self.module, forced=True)
        is_disabled = self.options.choose == "inductor"
        reason = "asked for" if is_disabled else unsupported_reason(self.module, self.inputs)
        if reason is not None:
            self.report.reason = reason
            if not is_disabled:
                self.report.not_fused[reason, "whole graph"] += 1
            return self.versions.compile_baseline(self.module, self.inputs)
        try:
            return self._compile_selected()
        except _Failed as failed:
            text = f"{type(failed.__cause__).__name__}: {failed.__cause__}"
            warn_once(f"a graph is kept in Inductor: {text}")
            self.report.reason = text
            return self.versions.compile_baseline(self.module, self.inputs)

    def _compile_selected(self) -> CompiledGraph:
        """Compile by an earlier selection, or return a dispatcher if there is none.

        Raises :class:`_Failed` if the backend fails before it calls Inductor for the baseline.
        """
        try:
            store, ranks = KernelStore(), RankSync.current()
            options = self.versions.key_options
            self.report.graph = graph_key(self.module, self.inputs, options, self.patches)
            selection = self._known_selection(store, ranks)
            is_sized = self.versions.is_dynamic and self.options.choose == "measure"
            if selection is not None and is_sized and ranks.is_alone:
                return self._compile_known_sizes(selection, store)
            if selection is not None and selection.version != "inductor":
                return self._compile_known_candidate(selection)
            pending = None
            if selection is None:
                pending = self._candidate_builder(), clone_graph(self.module)
        except RestartAnalysis:  # Dynamo traces the frame again, with other numbers as constants
            raise
        except Exception as error:  # must not end the user's process: Inductor compiles the graph
            raise _Failed from error
        if pending is not None:
            builder, copy = pending
            return builder.dispatcher(self.module, copy, self.inputs, store)
        return self._compile_known_baseline()

    def _compile_known_baseline(self) -> CompiledGraph:
        # Inductor was available when this was selected, so no spare copy is made: that would take
        # longer than everything else here.
        observe = _resume_collector if self.versions.needs_observation else None
        with garbage_collector.paused_then_promoted():
            return self.versions.compile_baseline(self.module, self.inputs, observe, self.module)

    def _compile_known_candidate(self, selection: Selection) -> CompiledGraph:
        # Objects that come from PyTorch's caches stay, so garbage collections, which would visit
        # all of PyTorch's objects, are pointless meanwhile.
        with garbage_collector.paused_then_promoted():
            module = self.versions.rewritten(clone_graph(self.module), selection)
            candidate = self.versions.compile_candidate(module, self.inputs, selection)
        self.report.state = selection.version
        return candidate.run

    def _compile_known_sizes(self, selection: Selection, store: KernelStore) -> CompiledGraph:
        """The version that was selected for the traced sizes; others are chosen when they come."""
        copy, inputs = clone_graph(self.module), DynamicInputs(self.inputs)
        sized = self.versions.sized(copy, inputs, store, self._clocks())
        if selection.version == "inductor":
            run, candidate = self._compile_known_baseline(), Selection("stitched")
        else:
            run, candidate = self._compile_known_candidate(selection), selection
        versions = {selection.version: run}
        return SizedVersions(sized, candidate, versions, sized.places.traced, selection.version)

    def _clocks(self) -> GraphClocks:
        from nostall.attach.torch_compile.measure.graph_comparison import GraphClocks
        from nostall.gpu.clock import EventClock, StepReplayClock, WallClock

        on_gpu = input_device(self.inputs).type == "cuda"
        clock = self.clock or (EventClock() if on_gpu else WallClock())
        replays = StepReplayClock() if on_gpu and self.clock is None else None
        return GraphClocks(clock, self.options.seconds, replays)

    def _candidate_builder(self) -> CandidateBuilder:
        from nostall.attach.torch_compile.selection.candidate_builder import CandidateBuilder
        from nostall.gpu.clock import ReplayClock

        on_gpu = input_device(self.inputs).type == "cuda"
        clocks = self._clocks()
        kernel_clock = self.kernel_clock or (ReplayClock() if on_gpu else None)
        dynamic_inputs = DynamicInputs(self.inputs) if self.versions.is_dynamic else None
        return CandidateBuilder(self.versions, self.patches, clocks, kernel_clock, dynamic_inputs)

    def _known_selection(self, store: KernelStore, ranks: RankSync) -> Selection | None:
        """The selection by options, of an earlier run, or of rank 0; None if there is none."""
        report = self.report
        if self.options.choose == "stitched":
            report.reason = "asked for"
            return Selection("stitched")
        if not ranks.is_leader:
            selection = ranks.fetch(report.graph, store)
            report.reason = FOLLOWS_RANK_0 if selection is not None else ""
            return selection
        places = self.versions.places
        if places is not None and ranks.is_alone:
            record = load_choice(store, report.graph, places.traced)
        else:
            record = store.load(SelectionRecord, report.graph)
        if record is None or (record.tuned and not has_searched_blocks()):
            return None
        if record.version == "stitched":
            from nostall.attach.torch_compile.runtime.custom_op import load_op

            for kernel in record.kernels:  # raises BadStore if one is missing
                load_op(kernel)
        report.reason, report.from_store = record.reason, True
        report.comparison, report.kernels = record.comparison, len(record.kernels)
        report.state, report.earlier = record.version, list(record.earlier)
        report.blocks, report.is_tuned = record.blocks, record.tuned
        selection = Selection.stored(record)
        ranks.publish(report.graph, selection, store)
        return selection


def _import_inductor() -> None:
    """Import what the first graph needs, because torch.compile imports Inductor when it is called.

    The imported objects stay, and there are enough of them to cause another full garbage
    collection in the first step.
    """
    with garbage_collector.paused_then_promoted():
        import torch._inductor.compile_fx  # noqa: F401


def _resume_collector(module: GraphModule) -> None:
    """Observer of graphs that are not in PyTorch's caches: compiling them creates garbage."""
    garbage_collector.resume()


class _Failed(Exception):
    """The backend failed before it had compiled anything; the cause says why."""


nostall = Backend()
"""The backend that ``backend="nostall"`` names."""
