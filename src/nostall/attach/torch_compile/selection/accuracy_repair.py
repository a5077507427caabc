"""Leave inaccurate kernels to Inductor: only they, and not the graph, lose their fusion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from nostall.attach.torch_compile.measure.accuracy import (
    GraphFunction,
    max_error,
    run_graph,
)
from nostall.attach.torch_compile.measure.call import AccuracyError, Call
from nostall.attach.torch_compile.measure.graph_comparison import call_state
from nostall.attach.torch_compile.measure.kernel_accuracy import (
    Region,
    culprits,
    inaccurate_kernels,
)
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.rewrite.kernel_selection import match_key
from nostall.attach.torch_compile.runtime.custom_op import record_inputs
from nostall.attach.torch_compile.selection.versions import Candidate
from nostall.attach.torch_compile.store.rank_sync import Selection

MAX_COMPILATIONS = 8
"""Candidates that are compiled at most in the search of an inaccurate kernel."""


@dataclass(frozen=True)
class AccuracyRepair:
    """Compiles a candidate again without its inaccurate kernels."""

    compile: Callable[[Sequence[object], Selection], Candidate]
    """Compiles the candidate of a selection for arguments like these."""
    regions: Callable[[Candidate], list[Region]]
    """The regions of the graph with the kernels of a candidate."""
    program: GraphFunction | None
    """The graph as PyTorch runs it, operator by operator."""
    report: GraphReport

    def repaired(
        self, baseline: GraphFunction, candidate: Candidate, call: Call, error: AccuracyError
    ) -> Candidate | None:
        """The candidate without its inaccurate kernels; None if none is found.

        Kernels are judged one by one on the inputs that they have in this call. If each of them is
        accurate on its own, bisection finds those without which the graph is accurate.
        """
        with call_state(call):
            seeds = run_graph(baseline, call.fresh_args()).seeds
            with record_inputs() as inputs:
                run_graph(candidate.run, call.fresh_args(), seeds or None)
            regions = self.regions(candidate)
            with torch.no_grad():
                wrong = list(inaccurate_kernels(regions, inputs))
        found = {each.key: f"{each.kernel[:12]}: {each.reason}" for each in wrong}
        if not found:
            called = [
                match_key(graph.key, step.operators)
                for graph, record in regions
                for step in record.steps
                if step.kernel in inputs
            ]
            in_regions = {step.kernel for _, record in regions for step in record.steps}
            called += inputs.keys() - in_regions  # kernels over lists, whose keys are their names
            known = candidate.selection.kept_in_inductor

            def is_accurate_without(keys: Collection[str]) -> bool:
                return self._is_accurate(baseline, self._without(candidate, keys, call), call)

            keys = culprits(sorted(set(called) - known), is_accurate_without, MAX_COMPILATIONS)
            found = {key: f"{self._describe(regions, key)}: {error}" for key in keys}
        if not found.keys() - candidate.selection.kept_in_inductor:
            return None
        self.report.inaccurate += found.values()
        return self._without(candidate, found, call)

    def _without(self, candidate: Candidate, keys: Collection[str], call: Call) -> Candidate:
        excluded = candidate.selection.kept_in_inductor | frozenset(keys)
        return self.compile(call.args, replace(candidate.selection, kept_in_inductor=excluded))

    def _is_accurate(self, baseline: GraphFunction, candidate: Candidate, call: Call) -> bool:
        with call_state(call):
            seeds = run_graph(baseline, call.fresh_args()).seeds
            try:
                max_error(baseline, candidate.run, call, seeds, self.program)
            except AccuracyError:
                return False
            return True

    def _describe(self, regions: Sequence[Region], key: str) -> str:
        """The kernel of a key and its results, as text."""
        for graph, record in regions:
            for step in record.steps:
                if match_key(graph.key, step.operators) == key:
                    results = ", ".join(graph.describe(index) for index in step.outputs)
                    return f"{step.kernel[:12]}: {results}"
        return f"{key[:12]}: a kernel over lists"
