"""``torch.compile(model, backend="nostall")``: what Dynamo calls with each graph that it traced."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from nostall.attach.compile import operator as kernels
from nostall.attach.compile.ahead import Ahead
from nostall.attach.compile.background import Preparation, Task, quietly
from nostall.attach.compile.duel import Duels
from nostall.attach.compile.hosts import (
    Compiled,
    EagerHost,
    Host,
    InductorHost,
    Observer,
    Unavailable,
    inductor_patches,
)
from nostall.attach.compile.module import Traced, apart, as_traced
from nostall.attach.compile.naming import device_name, graph_key, symbols, unfit
from nostall.attach.compile.parts import Selection, Stitching, regions_of
from nostall.attach.compile.race import Race
from nostall.attach.compile.ranks import Chosen, Ranks
from nostall.attach.compile.records import ChoiceRecord, Kept, RegionRecord
from nostall.attach.compile.region import region_key, stitched_region
from nostall.attach.compile.report import GraphReport
from nostall.attach.compile.settings import Settings, settings_of
from nostall.attach.compile.switch import FOLLOWS, Candidate, Rules, Switch
from nostall.attach.delivery import say_once
from nostall.fusion.graph import Graph
from nostall.gpu.clock import Clock, EventClock, ReplayClock, WallClock

T = TypeVar("T")


class Backend:
    """A backend of ``torch.compile``; ``reports`` grows with every graph that it is given.

    ``clock`` times versions of graphs; without one CUDA events do, or the wall clock on a
    processor.  ``race_clock`` times plans of kernels; without one replayed CUDA graphs do, and
    there is no race on a processor.
    """

    def __init__(self, clock: Clock | None = None, race_clock: Clock | None = None) -> None:
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
        clocks = self._clock or _clock(inputs), self._race_clock or _race_clock(inputs)
        one = _Graph(module, inputs, settings, patches, *clocks)
        self.reports.append(one.report)
        return one.compiled()

    def reset(self) -> None:
        """``torch._dynamo.reset()``: Inductor's CUDA graphs go, too."""
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        if torch.cuda.is_available():
            reset_cudagraph_trees()


nostall = Backend()
"""The backend that ``backend="nostall"`` names."""


class _Graph:
    """One graph on its way to a compiled function."""

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        settings: Settings,
        patches: Mapping[str, Any],
        clock: Clock,
        race_clock: Clock | None,
    ) -> None:
        self.module, self.inputs, self.settings = module, inputs, settings
        self.varies = len(symbols(inputs)) > 0
        self.patches, self.clock = patches, clock
        self.host: Host = InductorHost(patches) if settings.rest == "inductor" else EagerHost()
        self.chosen: Chosen | None = None
        self.report = GraphReport()
        self.preparation = Preparation()
        self.ahead = Ahead(self.preparation, self.report)
        self.race_clock = race_clock
        raced = settings.race if race_clock is not None else 0
        self.race = Race(raced, settings.seconds, settings.extent)
        self.duels = Duels(race_clock, settings, dict(patches))
        self.observed: list[Graph] = []
        self.unwritten = deque[Graph]()

    @property
    def unsent(self) -> str:
        """Why no other process compiles for this graph, or nothing."""
        if not self.settings.background:
            return "nothing is done in the background"
        return "a size varies" if self.varies else self.host.unsent

    def compiled(self) -> Compiled:
        settings = self.settings
        why = "asked for" if settings.choose == "inductor" else unfit(self.module, self.inputs)
        if why is not None:
            self.report.reason = why
            if settings.choose != "inductor":
                self.report.refused[why, "whole graph"] += 1
            return self._plain(self.module)
        self.device = next(x.device for x in self.inputs if isinstance(x, torch.Tensor))
        try:
            return self._chosen()
        except _Failed as failed:
            error = failed.__cause__
            say_once(f"a graph is left to Inductor: {type(error).__name__}: {error}")
            self.report.reason = f"{type(error).__name__}: {error}"
            return self._plain(self.module)

    def _chosen(self) -> Compiled:
        """By an earlier choice, or by one to come.  Raises :class:`_Failed` where we cannot."""
        report = self.report
        try:
            kept, ranks = Kept(), Ranks.here()
            report.graph = graph_key(self.module, self.inputs, self.settings, self.patches)
            chosen = self._earlier(kept, ranks)
            spare = apart(self.module)
            traced = Traced(self.inputs) if self.varies else None
        except Exception as error:  # the user's program is worth more than any gain
            raise _Failed from error
        if chosen is not None and chosen.version == "stitched":
            try:
                candidate = self._stitched(spare, self.inputs, chosen)
            except Exception as error:  # a stored choice that no longer works costs nothing else
                raise _Failed from error
            report.state = "stitched"
            return candidate.run
        # PyTorch's caches know graphs by the passes that they went through: a run that knows its
        # choice must have the same ones as the run that had to look.
        observe = self._observe if self.settings.background or self.varies else None
        if chosen is not None:
            return self._plain(self.module, observe and _look_away)
        rules = Rules(
            graph=report.graph,
            kept=kept,
            clock=self.clock,
            seconds=self.settings.seconds,
            preparation=self.preparation,
            about=self._about(),
        )
        plain = self._plain(self.module, observe)
        self.inputs = ()  # the program may want the memory

        report.not_ahead = self.unsent
        if not self.unsent:
            self.preparation.add_last(partial(self.ahead.duels, self.duels, self.host.uncaptured))

        def make(args: Sequence[Any], chosen: Chosen | None) -> Candidate | None:
            if self.ahead.died:
                raise Died("kernels could not be compiled by another process")
            if self.chosen is None:
                self.chosen = chosen or self._found()
                selection = self._selection(self.chosen)
                if not self.unsent and self.ahead.stitched(spare, args, self.patches, selection):
                    return None
            if traced is None:
                return self._stitched(spare, args, self.chosen)
            with traced.again():
                return self._stitched(spare, traced.inputs, self.chosen)

        return Switch(plain, make, rules, report)

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
        for kernel in choice.kernels if choice.version == "stitched" else ():
            kernels.resolve(kernel)
        report.reason, report.from_store = choice.reason, True
        report.compared, report.kernels = choice.compared, len(choice.kernels)
        report.state = choice.version
        chosen = Chosen(choice.version, frozenset(choice.left), choice.regions)
        ranks.publish(report.graph, chosen, kept)
        return chosen

    def _found(self) -> Chosen:
        """Which kernels stay with Inductor, and by which plans the others run.

        Raises :class:`AllSlower`.
        """
        clock = self.race_clock
        if self.race.regions and clock is not None:
            self._timed("raced", lambda: self.race.run(self.device, clock))
        return Chosen("stitched", self._losers(), self._regions())

    def _stitched(self, module: GraphModule, inputs: Sequence[Any], chosen: Chosen) -> Candidate:
        """The stitched version as chosen."""
        selection = self._selection(chosen)
        run, done = self._timed("stitched", lambda: self._put_in(module, inputs, selection))
        return Candidate(run, done, chosen)

    def _selection(self, chosen: Chosen) -> Selection:
        return Selection(self.settings.extent, chosen.left, chosen.regions)

    def _losers(self) -> frozenset[str]:
        if not self.duels.modules:
            return frozenset()
        # Not much longer than Inductor's own compilation took.
        limit = max(self.report.seconds["plain"], self.settings.seconds)
        host = self.host.uncaptured
        return self._timed("duels", lambda: self.duels.losers(host, limit))

    def _regions(self) -> dict[str, RegionRecord]:
        """By the plans that have won; a later race of other graphs may change those kept."""
        kept, found = Kept(), dict[str, RegionRecord]()
        for graph in self.observed:
            with contextlib.suppress(Exception):  # said where it was prepared, and in the pass
                found[region_key(graph)] = stitched_region(graph, kept)
        return found

    def _put_in(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        selection: Selection,
    ) -> tuple[Compiled, Stitching]:
        done = Stitching()
        with as_traced(inputs) as traced:
            run = self.host.stitched(module, traced, selection, done)
        if self.ahead.done is not None and not done.kernels:
            done = self.ahead.done  # the graphs came from the cache
        for kernel in dict.fromkeys(done.kernels):
            _warm(kernel, self.device)
        self.report.refused = done.refused
        self.report.kernels = len(done.kernels) or self.report.kernels
        self.report.left = len(selection.left)
        return run, done

    def _observe(self, module: GraphModule) -> None:
        """Stitch the regions of a graph in the background, for when it is compiled again."""
        try:
            graphs = regions_of(module)
            self.observed += graphs
            self.unwritten += graphs
            if not self.varies:
                self.duels.add(module)
        except Exception as error:  # inside of Inductor's compilation, which must go on
            say_once(f"a graph is not prepared: {type(error).__name__}: {error}")
            return
        if self.settings.background:
            self.preparation.add(self._write)

    def _write(self) -> Iterator[Task]:
        """Have regions stitched, by another process or here."""
        graphs = list[Graph]()
        while self.unwritten:  # others may add to it meanwhile
            graphs.append(self.unwritten.popleft())
        if not graphs:
            return
        if not self.unsent:
            self.ahead.begin()
        racing = self.ahead.written(graphs, self.race, self.device)
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
                        yield partial(_warm, kernel, self.device)

    def _plain(self, module: GraphModule, observe: Observer | None = None) -> Compiled:
        spare = apart(module)
        try:
            return self._timed("plain", lambda: self.host.plain(module, self.inputs, observe))
        except Unavailable as error:
            say_once(f"Inductor is not available, PyTorch's operators run one by one: {error}")
            self.host = EagerHost()
            return self._timed("plain", lambda: self.host.plain(spare, self.inputs))

    def _timed(self, what: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.report.seconds[what] = time.perf_counter() - began

    def _about(self) -> dict[str, str]:
        return {
            "gpu": device_name(self.inputs),
            "torch": torch.__version__,
            "mode": ", ".join(f"{k}={v}" for k, v in sorted(self.patches.items())) or "default",
        }


def _warm(kernel: str, device: torch.device) -> None:
    kernels.resolve(kernel).warm(device)


def _look_away(module: GraphModule) -> None:
    """There is nothing to prepare."""


class Died(Exception):
    """Whatever ended a process that did the same, or kept it, might end or keep the program."""


class _Failed(Exception):
    """Something of ours failed before there was anything to run."""


def _clock(inputs: Sequence[Any]) -> Clock:
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
    return EventClock() if on_gpu else WallClock()


def _race_clock(inputs: Sequence[Any]) -> Clock | None:
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
    return ReplayClock() if on_gpu else None
