"""``torch.compile(model, backend="nostall")``: what Dynamo calls with each graph that it traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from nostall.attach.torch_compile.graph_copies import Traced, apart
from nostall.attach.torch_compile.graph_key import device_of, graph_key, unfit
from nostall.attach.torch_compile.options import Settings, settings_of
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.rewrite.compilers import Compiled, inductor_patches
from nostall.attach.torch_compile.selection.versions import Versions
from nostall.attach.torch_compile.store.kernel_store import Kept
from nostall.attach.torch_compile.store.rank_sync import FOLLOWS, Chosen, Ranks
from nostall.attach.torch_compile.store.records import ChoiceRecord
from nostall.attach.warning import say_once
from nostall.core import collector

if TYPE_CHECKING:
    from nostall.attach.torch_compile.selection.candidate_builder import Undecided
    from nostall.gpu.clock import Clock


class Backend:
    """A backend of ``torch.compile``; ``reports`` grows with every graph that it is given.

    ``clock`` times versions of graphs; without one CUDA events do, or the wall clock on a
    processor.  ``race_clock`` times plans of kernels; without one replayed CUDA graphs do, and
    there is no race on a processor.
    """

    def __init__(self, clock: Clock | None = None, race_clock: Clock | None = None) -> None:
        _prepare()
        self._clock, self._race_clock = clock, race_clock
        self.reports: list[GraphReport] = []
        self.__name__ = "nostall"

    def __call__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:
        """A graph, compiled.  Raises what Inductor raises, and :class:`BadInput` for options."""
        settings, others = settings_of(options)
        patches = inductor_patches(mode, others)
        one = _Graph(module, inputs, settings, patches, self._clock, self._race_clock)
        self.reports.append(one.report)
        return one.compiled()

    def reset(self) -> None:
        """``torch._dynamo.reset()``: Inductor's CUDA graphs go, too."""
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        if torch.cuda.is_available():
            reset_cudagraph_trees()


class _Graph:
    """One graph on its way to a compiled function."""

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        settings: Settings,
        patches: Mapping[str, Any],
        clock: Clock | None,
        race_clock: Clock | None,
    ) -> None:
        self.module, self.inputs, self.settings = module, inputs, settings
        self.patches, self.clock, self.race_clock = patches, clock, race_clock
        self.report = GraphReport()
        self.versions = Versions(settings, patches, inputs, self.report)

    def compiled(self) -> Compiled:
        settings = self.settings
        why = "asked for" if settings.choose == "inductor" else unfit(self.module, self.inputs)
        if why is not None:
            self.report.reason = why
            if settings.choose != "inductor":
                self.report.refused[why, "whole graph"] += 1
            return self.versions.plain(self.module, self.inputs)
        try:
            return self._chosen()
        except _Failed as failed:
            error = failed.__cause__
            say_once(f"a graph is left to Inductor: {type(error).__name__}: {error}")
            self.report.reason = f"{type(error).__name__}: {error}"
            return self.versions.plain(self.module, self.inputs)

    def _chosen(self) -> Compiled:
        """By an earlier choice, or by one to come.  Raises :class:`_Failed` where we cannot."""
        try:
            kept, ranks = Kept(), Ranks.here()
            self.report.graph = graph_key(self.module, self.inputs, self.settings, self.patches)
            chosen = self._earlier(kept, ranks)
            if chosen is not None and chosen.version == "stitched":
                # A stored choice that no longer works costs nothing else.  What comes from caches
                # stays; the collector would go through all of PyTorch for it, perhaps twice.
                with collector.settled():
                    run = self.versions.stitched(apart(self.module), self.inputs, chosen).run
                self.report.state = "stitched"
                return run
            open_choice = (self._undecided(), apart(self.module)) if chosen is None else None
        except Exception as error:  # the user's program is worth more than any gain
            raise _Failed from error
        if open_choice is not None:
            undecided, spare = open_choice
            return undecided.switch(self.module, spare, self.inputs, kept)
        # Inductor was there when this was chosen: a copy would be the longest of what we do here.
        observe = _compiles if self.versions.observed else None
        with collector.settled():
            return self.versions.plain(self.module, self.inputs, observe, self.module)

    def _undecided(self) -> Undecided:
        from nostall.attach.torch_compile.selection.candidate_builder import Undecided
        from nostall.gpu.clock import EventClock, ReplayClock, WallClock

        on_gpu = device_of(self.inputs).type == "cuda"
        clock = self.clock or (EventClock() if on_gpu else WallClock())
        race_clock = self.race_clock or (ReplayClock() if on_gpu else None)
        traced = Traced(self.inputs) if self.versions.varies else None
        return Undecided(self.versions, self.patches, clock, race_clock, traced)

    def _earlier(self, kept: Kept, ranks: Ranks) -> Chosen | None:
        """The choice of an earlier run, or of rank 0; None where there is none to go by."""
        report = self.report
        if self.settings.choose == "stitched":
            report.reason = "asked for"
            return Chosen("stitched")
        if not ranks.leads:
            told = ranks.chosen(report.graph, kept)
            report.reason = FOLLOWS if told is not None else ""
            return told
        choice = kept.answer(ChoiceRecord, report.graph)
        if choice is None:
            return None
        if choice.version == "stitched":
            from nostall.attach.torch_compile.runtime.custom_op import resolve

            for kernel in choice.kernels:
                resolve(kernel)
        report.reason, report.from_store = choice.reason, True
        report.compared, report.kernels = choice.compared, len(choice.kernels)
        report.state = choice.version
        chosen = Chosen(choice.version, frozenset(choice.left), choice.regions)
        ranks.publish(report.graph, chosen, kept)
        return chosen


def _prepare() -> None:
    """Import what the first graph needs, as torch.compile does for Inductor when it is called."""
    # All of it stays, and is most of what fills the collector up to another round in a first step.
    with collector.settled():
        import torch._inductor.compile_fx  # noqa: F401


def _compiles(module: GraphModule) -> None:
    """There is nothing to prepare, but PyTorch's caches do not have the graph."""
    collector.resume()


class _Failed(Exception):
    """Something of ours failed before there was anything to run."""


nostall = Backend()
"""The backend that ``backend="nostall"`` names."""
