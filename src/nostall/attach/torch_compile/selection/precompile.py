"""What other processes do for one graph while the program runs, before the program does.

Whatever goes wrong here costs time only: what was not compiled ahead is compiled where it is
needed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from triton import knobs
from triton.runtime import driver

from nostall.attach.torch_compile.measure.kernel_comparison import (
    Duels,
    device_of_graph,
    placeholders,
)
from nostall.attach.torch_compile.measure.plan_tuning import Race, Racing
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.rewrite.compilers import Host, InductorHost
from nostall.attach.torch_compile.rewrite.kernel_selection import Selection, Stitching
from nostall.attach.torch_compile.store.kernel_store import Kept
from nostall.attach.torch_compile.store.rank_sync import Ranks
from nostall.attach.torch_compile.store.records import DuelRecord
from nostall.attach.torch_compile.workers.codegen_job import Compiling, Writing, Written
from nostall.attach.torch_compile.workers.compile_job import Errand, layouts
from nostall.attach.torch_compile.workers.cpu_time import COMPILERS
from nostall.attach.torch_compile.workers.tasks import Preparation, ending
from nostall.attach.torch_compile.workers.torch_state import Surroundings
from nostall.attach.torch_compile.workers.worker import (
    HELPER,
    HELPERS,
    PATIENCE_S,
    WRITER,
    Answer,
    Asked,
    Helper,
)
from nostall.attach.warning import say_once
from nostall.fusion.graph.graph import Graph

T = TypeVar("T")

REGIONS = 3
"""For each process, from which on a second and a third one take some of what their kernels are
compared with; for fewer they would hardly be ready in time.  Chosen, not measured."""
PROCESSORS = 2
"""For each process, of those for compilers: where there are fewer it would take the others'."""


class Ahead:
    """``done``: what became of the stitched version's graphs, once they have been compiled;
    ``died``: whether a process did that compiled kernels, or would not end: the program might do
    the same."""

    def __init__(self, preparation: Preparation, report: GraphReport) -> None:
        self._preparation, self._report = preparation, report
        self._looking, self._telling = threading.Lock(), threading.Lock()
        self._rivals: Iterator[Errand] | None = None
        self._until = math.inf
        self.done: Stitching | None = None
        self.died = False

    def start(self, device: torch.device, compared: int) -> None:
        """There may be something to do, once the first step is over: processes that have imported
        by then what they need are seconds earlier.  Where processors are few, Inductor has all."""
        if PROCESSORS * len(HELPERS) > COMPILERS:
            return
        for process in self._helping(compared):
            process.start()
        if target_of(device) is not None:
            WRITER.start()

    def begin(self, compared: int) -> None:
        """There will be something to compile: the whole graph, and what kernels of about so many
        regions are compared with."""
        if not self._report.reason:
            for process in self._helping(compared):
                process.begin()

    def _helping(self, compared: int) -> list[Helper]:
        count = min(compared // REGIONS, COMPILERS // PROCESSORS)
        return [*HELPERS[: max(1, count)]]

    def written(
        self, graphs: Sequence[Graph], race: Race, device: torch.device
    ) -> Sequence[Racing] | None:
        """The plans that race for regions, which have been stitched and whose kernels are being
        compiled; None where that has to be done here."""
        if self._unneeded:
            return ()
        target = target_of(device)
        if target is None:
            return None
        return self._told(
            self._asked("written", WRITER, Writing(tuple(graphs), race, target, id(self)))
        )

    def wait(self) -> None:
        """Until all of them are compiled, or for :data:`PATIENCE_S` none is."""
        left, until = math.inf, math.inf
        while not self._unneeded and WRITER.running:
            answer = self._asked("compiled", WRITER, Compiling())
            self._told(answer)
            if answer.done is None or not answer.done.left:
                return
            if answer.done.left < left:
                left, until = answer.done.left, time.perf_counter() + PATIENCE_S
            elif time.perf_counter() > until:
                say_once(f"stitching in the background failed: {left} kernels are not compiled")
                WRITER.end()
                self.died = True

    def _told(self, answer: Answer[Written]) -> Sequence[Racing] | None:
        done = answer.done
        if self._unneeded:
            return ()
        for failure in (answer.failure,) if done is None else done.failures:
            say_once(f"stitching in the background failed: {failure}")
        if done is None:
            return None
        self.died = self.died or done.died
        return done.racing

    @property
    def _unneeded(self) -> bool:
        return bool(self._report.reason) or ending()

    def duels(self, duels: Duels, host: Host, process: Helper) -> None:
        """Have this process compile what kernels are compared with, beside others that do, for
        about as long as comparisons may take."""
        if not (Ranks.here().leads and duels.modules and isinstance(host, InductorHost)):
            return
        while process is HELPER or process.begun:
            errand = self._rival(duels, host)
            if errand is None or self._answer(errand, process).failure:
                return
            with self._looking:
                if time.perf_counter() > self._until:
                    return
                # From when the first process is there.
                end = time.perf_counter() + self._report.seconds["plain"]
                self._until = min(self._until, end)

    def _rival(self, duels: Duels, host: InductorHost) -> Errand | None:
        """The next one that nobody compiles."""
        with self._looking:
            if self._rivals is None:
                self._rivals = errands(duels, host)
            return next(self._rivals, None)

    def stitched(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        patches: Mapping[str, Any],
        selection: Selection,
    ) -> bool:
        """Whether the stitched version is being compiled; the preparation is ready when it is."""
        try:
            errand = Errand(module, layouts(inputs), dict(patches), selection)
        except Exception as error:  # it is compiled where it is needed
            self._report.not_ahead = str(error)
            return False

        def work() -> None:
            answer = self._answer(errand, HELPER)
            self.done = answer.done
            if not self._report.reason:
                self._report.not_ahead = answer.failure

        self._preparation.add_last(work)
        self._preparation.start()
        return True

    def _answer(self, errand: Errand, process: Helper) -> Answer[Stitching]:
        if self._report.reason:
            return Answer("the graph has chosen")
        return self._asked("ahead", process, errand)

    def _asked(self, what: str, process: Helper, errand: Asked[T]) -> Answer[T]:
        began = time.perf_counter()
        answer = process.do(errand)
        taken = time.perf_counter() - began
        self._preparation.add_cpu_seconds(answer.cpu_seconds)
        with self._telling:
            seconds = self._report.seconds
            seconds[what] = seconds.get(what, 0.0) + taken
        return answer


def errands(duels: Duels, host: InductorHost) -> Iterator[Errand]:
    """What Inductor has to compile before kernels can be compared, for another process; those that
    move the most bytes first."""
    kept, patches = Kept(), dict(host.patches)
    for key, rival in duels.rivals(kept).items():
        if kept.answer(DuelRecord, key) is None:
            fakes, device = placeholders(rival.module), device_of_graph(rival.module)
            inputs = [(tuple(x.shape), x.stride(), x.dtype, device, False) for x in fakes]
            around = replace(Surroundings.here(), grad=False)
            yield Errand(rival.module, tuple(inputs), patches, None, around)


def target_of(device: torch.device) -> Any:
    """What Triton compiles for, where another process can do that: into a cache."""
    if device.type != "cuda" or knobs.compilation.always_compile:
        return None
    try:
        return driver.active.get_current_target()
    except Exception:  # who compiles here says what is wrong
        return None
