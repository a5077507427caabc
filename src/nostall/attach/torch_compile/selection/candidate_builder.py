"""A graph without a choice: Inductor's version runs while a stitched one is prepared and compared.

Nothing of this is imported where an earlier run has chosen: to import what explores regions and
writes kernels takes as long as all the rest.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from nostall.attach.torch_compile.graph_copies import Traced
from nostall.attach.torch_compile.graph_key import device_name
from nostall.attach.torch_compile.measure.kernel_comparison import Duels
from nostall.attach.torch_compile.measure.plan_tuning import Race
from nostall.attach.torch_compile.rewrite.matching import regions_of
from nostall.attach.torch_compile.selection.dispatcher import Rules, Switch
from nostall.attach.torch_compile.selection.precompile import Ahead
from nostall.attach.torch_compile.selection.versions import Candidate, Versions, warm
from nostall.attach.torch_compile.store.kernel_store import Kept
from nostall.attach.torch_compile.store.rank_sync import Chosen, Ranks
from nostall.attach.torch_compile.store.records import RegionRecord
from nostall.attach.torch_compile.store.regions import region_key, stitched_region
from nostall.attach.torch_compile.workers.tasks import Preparation, Task, quietly
from nostall.attach.torch_compile.workers.worker import HELPERS
from nostall.attach.warning import say_once
from nostall.fusion.graph.graph import Graph
from nostall.gpu.clock import Clock


class Died(Exception):
    """Whatever ended a process that did the same, or kept it, might end or keep the program."""


class Undecided:
    """One graph; ``traced``: its inputs, where a size varies."""

    def __init__(
        self,
        versions: Versions,
        patches: Mapping[str, Any],
        clock: Clock,
        race_clock: Clock | None,
        traced: Traced | None,
    ) -> None:
        settings, self.report = versions.settings, versions.report
        self.versions, self.patches = versions, patches
        self.clock, self.race_clock = clock, race_clock
        self.traced = traced
        self.chosen: Chosen | None = None
        self.preparation = Preparation()
        self.ahead = Ahead(self.preparation, self.report)
        raced = settings.race if race_clock is not None else 0
        self.race = Race(raced, settings.seconds, settings.extent)
        self.duels = Duels(race_clock, settings, dict(patches))
        self.observed: list[Graph] = []
        self.unwritten = deque[Graph]()

    @property
    def unsent(self) -> str:
        """Why no other process compiles for this graph, or nothing."""
        if not self.versions.settings.background:
            return "nothing is done in the background"
        return "a size varies" if self.versions.varies else self.versions.host.unsent

    def switch(
        self, module: GraphModule, spare: GraphModule, inputs: Sequence[Any], kept: Kept
    ) -> Switch:
        """Inductor's version of the module, and the way to a stitched one, of ``spare``."""
        rules = Rules(
            graph=self.report.graph,
            kept=kept,
            clock=self.clock,
            seconds=self.versions.settings.seconds,
            preparation=self.preparation,
            about=self._about(),
        )
        observe = self._observe if self.versions.observed else None
        # Asked for before the pass that observes is among Inductor's.
        self.report.not_ahead = self.unsent
        plain = self.versions.plain(module, inputs, observe, spare)
        if not self.report.not_ahead:
            host = self.versions.host.uncaptured
            for process in HELPERS:
                self.preparation.add_last(partial(self.ahead.duels, self.duels, host, process))
        return Switch(plain, partial(self._make, spare), rules, self.report)

    def _make(
        self, spare: GraphModule, args: Sequence[Any], chosen: Chosen | None
    ) -> Candidate | None:
        """The stitched version, as chosen by another rank or as is found best here; None where
        another process has been asked to compile it first.

        Raises :class:`AllSlower`.
        """
        if self.ahead.died:
            raise Died("kernels could not be compiled by another process")
        if self.chosen is None:
            self.chosen = chosen or self._found()
            selection = self.versions.selection(self.chosen)
            if not self.unsent and self.ahead.stitched(spare, args, self.patches, selection):
                return None
        if self.traced is None:
            return self.versions.stitched(spare, args, self.chosen, self.ahead.done)
        with self.traced.again():
            return self.versions.stitched(spare, self.traced.inputs, self.chosen, self.ahead.done)

    def _found(self) -> Chosen:
        """Which kernels stay with Inductor, and by which plans the others run.

        Raises :class:`AllSlower`.
        """
        clock = self.race_clock
        if self.race.regions and clock is not None:
            self.versions.timed("raced", lambda: self.race.run(self.versions.device, clock))
        return Chosen("stitched", self._losers(), self._regions())

    def _losers(self) -> frozenset[str]:
        if not self.duels.modules:
            return frozenset()
        # Not much longer than Inductor's own compilation took.
        limit = max(self.report.seconds["plain"], self.versions.settings.seconds)
        host = self.versions.host.uncaptured
        return self.versions.timed("duels", lambda: self.duels.losers(host, limit))

    def _regions(self) -> dict[str, RegionRecord]:
        """By the plans that have won; a later race of other graphs may change those kept."""
        kept, found = Kept(), dict[str, RegionRecord]()
        for graph in self.observed:
            with contextlib.suppress(Exception):  # said where it was prepared, and in the pass
                found[region_key(graph)] = stitched_region(graph, kept)
        return found

    def _observe(self, module: GraphModule) -> None:
        """Stitch the regions of a graph in the background, for when it is compiled again."""
        try:
            graphs = regions_of(module)
            self.observed += graphs
            self.unwritten += graphs
            if not self.versions.varies:
                self.duels.add(module)
        except Exception as error:  # inside of Inductor's compilation, which must go on
            say_once(f"a graph is not prepared: {type(error).__name__}: {error}")
            return
        if self.versions.settings.background:
            self.preparation.add(self._write)
        if self.observed and not self.report.not_ahead:
            with quietly():  # likewise
                self.ahead.start(self.versions.device, self._compared(len(self.observed)))

    def _write(self) -> Iterator[Task]:
        """Have regions stitched, by another process or here."""
        graphs = list[Graph]()
        while self.unwritten:  # others may add to it meanwhile
            graphs.append(self.unwritten.popleft())
        if not graphs:
            return
        if not self.unsent:
            self.ahead.begin(self._compared(len(graphs)))
        racing = self.ahead.written(graphs, self.race, self.versions.device)
        if racing is not None:
            self.race.regions += racing
            # Who needs a kernel loads its binary, which takes milliseconds.
            yield self.ahead.wait
            return
        known = set[str]()
        for graph in graphs:
            with quietly():
                for kernel in self.race.prepare(graph):
                    if kernel not in known:
                        known.add(kernel)
                        yield partial(warm, kernel, self.versions.device)

    def _compared(self, regions: int) -> int:
        """How many of so many are compared here with what Inductor makes of them."""
        return regions if self.duels.modules and Ranks.here().leads else 0

    def _about(self) -> dict[str, str]:
        patches = sorted(self.patches.items())
        return {
            "gpu": device_name(self.versions.device),
            "torch": torch.__version__,
            "mode": ", ".join(f"{key}={value}" for key, value in patches) or "default",
        }
