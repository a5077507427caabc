"""Compile the two versions of a graph: the baseline by Inductor, and the candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._dynamo.convert_frame import compile_lock
from torch.fx import GraphModule

from nostall.attach.torch_compile.graph_copies import DynamicInputs, clone_graph, fake_inputs
from nostall.attach.torch_compile.graph_key import device_name, dynamic_symbols, input_device
from nostall.attach.torch_compile.options import Options
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.rewrite.attention import keep_attention
from nostall.attach.torch_compile.rewrite.compilers import (
    CompiledGraph,
    EagerCompiler,
    GraphCompiler,
    InductorCompiler,
    InductorUnavailable,
)
from nostall.attach.torch_compile.rewrite.inductor_pass import GraphObserver
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.rewrite.loss import chunk_losses
from nostall.attach.torch_compile.runtime.chunked_loss import CHUNKS, FEWER_CHUNKS
from nostall.attach.torch_compile.selection.sized_versions import (
    Compared,
    SizedContext,
    SizePlaces,
)
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.rank_sync import RankSync, Selection
from nostall.attach.warning import warn_once

if TYPE_CHECKING:
    from nostall.attach.torch_compile.measure.call import Call
    from nostall.attach.torch_compile.measure.graph_comparison import GraphClocks

T = TypeVar("T")

SMALL_GRAPH = 200
"""Calls of a graph for which the option ``nostall.blocks`` compiles one more version by default:
compiling a larger one takes processor time that its other kernels seldom gain back."""
SIZED_SHARE = 0.5
"""Duration of the comparison at further sizes, as a share of the first one's."""


@dataclass(frozen=True)
class Candidate:
    """A compiled candidate, and the selection that it was compiled for."""

    run: CompiledGraph
    result: RewriteResult
    selection: Selection = field(default_factory=lambda: Selection("stitched"))


class GraphVersions:
    """Compiles both versions of one graph, and reports what that took."""

    def __init__(
        self,
        options: Options,
        patches: Mapping[str, Any],
        inputs: Sequence[Any],
        report: GraphReport,
    ) -> None:
        """``patches``: the user's changes of Inductor's configuration."""
        self.compiler: GraphCompiler = (
            InductorCompiler(patches) if options.fallback == "inductor" else EagerCompiler()
        )
        self.options, self.report = options, report
        self.device = input_device(inputs)
        self.is_dynamic = len(dynamic_symbols(inputs)) > 0
        # Where a call shows the dynamic sizes; None if there are none.
        self.places = SizePlaces(inputs) if self.is_dynamic else None

    @property
    def local_only_reason(self) -> str:
        """Why no worker compiles for this graph; empty if one does."""
        if not self.options.background:
            return "background preparation is off"
        if self.is_dynamic:
            return "a size is dynamic"
        return self.compiler.local_only_reason

    @property
    def needs_observation(self) -> bool:
        """Whether Inductor's graphs are observed while it compiles the baseline.

        PyTorch's cache keys contain the passes.  So a run with a stored selection has to add the
        same pass as the run that made the selection.
        """
        return self.options.background or self.is_dynamic

    def compile_baseline(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        observe: GraphObserver | None = None,
        copy: GraphModule | None = None,
    ) -> CompiledGraph:
        """Compile by Inductor, or run operators one by one if Inductor is not available.

        ``copy``: the graph to use in the second case, because Inductor modifies ``module``; it may
        be ``module`` itself.  By default the graph is copied beforehand.
        """
        module_copy = clone_graph(module) if copy is None else copy
        try:
            return self.timed(
                "baseline", lambda: self.compiler.compile_baseline(module, inputs, observe)
            )
        except InductorUnavailable as error:
            warn_once(f"Inductor is not available, PyTorch's operators run one by one: {error}")
            self.compiler = EagerCompiler()
            return self.timed(
                "baseline", lambda: self.compiler.compile_baseline(clone_graph(module_copy), inputs)
            )

    def compile_candidate(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        selection: Selection,
        worker_result: RewriteResult | None = None,
    ) -> Candidate:
        """Compile a graph that :meth:`rewritten` returned with the kernels of a selection.

        ``worker_result``: what a worker inserted when it compiled the same; the caches then have
        the graphs, and no pass runs here.
        """
        kernel_filter = self.kernel_filter(selection)

        def compile_graph() -> tuple[CompiledGraph, RewriteResult]:
            result, compiler = RewriteResult(), self.compiler_of(selection)
            with fake_inputs(inputs) as fakes:
                run = compiler.compile_candidate(module, fakes, kernel_filter, result)
            if worker_result is not None and not result.kernels:
                result = worker_result  # the graphs came from the cache
            for kernel in dict.fromkeys(result.kernels):
                compile_kernel(kernel, self.device)
            return run, result

        run, result = self.timed("candidate", compile_graph)
        if kernel_filter.nothing:
            return Candidate(run, result, selection)
        self.report.not_fused = result.not_fused
        self.report.explanations = result.explanations
        self.report.kernels = len(result.kernels) or self.report.kernels
        self.report.kept_in_inductor = len(kernel_filter.kept_in_inductor)
        return Candidate(run, result, selection)

    def sized(
        self, copy: GraphModule, inputs: DynamicInputs, store: KernelStore, clocks: GraphClocks
    ) -> SizedContext:
        """What choices for other sizes are made with.  ``copy``: the graph as it came."""
        assert self.places is not None

        def compile_version(selection: Selection) -> CompiledGraph:
            module = clone_graph(copy)
            with inputs.tracing():
                if selection.version == "inductor":
                    # With a pass, as at first: PyTorch's cache keys contain it.
                    return self.compile_baseline(module, inputs.inputs, lambda graph: None, module)
                module = self.rewritten(module, selection)
                return self.compile_candidate(module, inputs.inputs, selection).run

        def compare(baseline: CompiledGraph, candidate: CompiledGraph, call: Call) -> Compared:
            from nostall.attach.torch_compile.measure.graph_comparison import compare_graphs

            shorter = replace(clocks, seconds=SIZED_SHARE * clocks.seconds)
            needs_kernels = not self.report.is_rewritten
            return compare_graphs(
                self.report.graph, baseline, candidate, call, shorter, copy, needs_kernels, False
            )

        about = circumstances(self.device, getattr(self.compiler, "patches", {}))
        return SizedContext(
            self.report.graph, store, self.places, compile_version, compare, about, self.report
        )

    def rewritten(self, module: GraphModule, selection: Selection) -> GraphModule:
        """The graph of a selection's candidate: ``module``, changed in place before AOTAutograd."""
        if selection.version == "tuned":
            return module
        if self.options.attention == "measure":
            left: list[str] = []
            self.report.attention = keep_attention(module, left)
            self.report.left = [line for line in self.report.left if " attention: " not in line]
            self.report.left += left
        if self.options.loss == "measure":
            if selection.whole_logits:
                self.report.loss = []
            else:
                self.chunk_losses(module, chunks=FEWER_CHUNKS if selection.fewer_chunks else CHUNKS)
        return module

    def chunk_losses(
        self, module: GraphModule, *, forced: bool = False, chunks: int = CHUNKS
    ) -> None:
        """Change the losses of a graph in place; ``forced``: in all versions, also small ones."""
        changes = chunk_losses(module, forced=forced, chunks=chunks)
        changed = changes.lines(changes.changed)
        if forced:
            self.report.chunked = changed
        else:
            self.report.loss = changed
        self.report.left = [line for line in self.report.left if " loss: " not in line]
        self.report.left += changes.lines(changes.left)

    def kernel_filter(self, selection: Selection) -> KernelFilter:
        """The filter for the kernels of a selection."""
        inductor_matches = selection.kept_in_inductor
        products = self.options.products != "off"
        return KernelFilter(
            self.options.fuse,
            inductor_matches,
            selection.regions,
            products,
            selection.products_only,
            nothing=selection.version == "tuned",
        )

    def compiler_of(self, selection: Selection) -> GraphCompiler:
        """The compiler of a selection's candidate."""
        if selection.tuned and isinstance(self.compiler, InductorCompiler):
            return self.compiler.tuned
        return self.compiler

    def untuned_reason(self, module: GraphModule) -> str:
        """Why Inductor's version with measured block sizes is not tried; empty if it is."""
        if self.device.type != "cuda":
            return "they are searched on a GPU only"
        if self.options.blocks == "off":
            return "asked for"
        if reason := self._untunable_reason or self.local_only_reason:
            return reason
        calls = sum(node.op.startswith("call_") for node in module.graph.nodes)
        if self.options.blocks == "small" and calls > SMALL_GRAPH:
            return (
                f"the graph has {calls} calls, more than {SMALL_GRAPH}; the option "
                '"nostall.blocks": "all" tries them, too'
            )
        return ""

    @property
    def _untunable_reason(self) -> str:
        """Why no graph of this process has measured block sizes; empty if one may have them."""
        if not isinstance(self.compiler, InductorCompiler):
            return "PyTorch's operators run one by one"
        if reason := self.compiler.local_only_reason or self.compiler.untuned_reason:
            return reason
        return "" if RankSync.current().is_alone else "each rank would find others"

    @property
    def key_options(self) -> Options:
        """The options that a stored selection belongs to.

        Where measured block sizes are not allowed, none that another process found may run.
        """
        return replace(self.options, blocks="off") if self._untunable_reason else self.options

    def timed(self, activity: str, work: Callable[[], T]) -> T:
        """Compile or measure, and add the wall time to the report.

        Dynamo compiles nothing in other threads meanwhile: tracing changes global state of PyTorch.
        """
        with compile_lock:
            began = time.perf_counter()
            try:
                return work()
            finally:
                self.report.add_seconds(activity, time.perf_counter() - began)


def compile_kernel(kernel: str, device: torch.device) -> None:
    """Compile a kernel for a device without launching it."""
    from nostall.attach.torch_compile.runtime.custom_op import load_op

    load_op(kernel).compile(device)


def circumstances(device: torch.device, patches: Mapping[str, Any]) -> dict[str, str]:
    """Description of what a selection was made on, for the stored record."""
    changes = ", ".join(f"{key}={value}" for key, value in sorted(patches.items()))
    return {"gpu": device_name(device), "torch": torch.__version__, "mode": changes or "default"}
