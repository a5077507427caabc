"""The race of plans for the kernels of one graph, before its versions are compared as a whole.

What needs a compiler is done in the background; kernels run on the program's own thread, where no
CUDA graph is being captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from nostall.attach.torch_compile.options import Extent
from nostall.attach.torch_compile.store.rank_sync import Ranks
from nostall.attach.torch_compile.store.records import Kept, RegionRecord, StepRecord
from nostall.attach.torch_compile.store.regions import raced_region, stitched_region
from nostall.attach.warning import say_once
from nostall.core.errors import BadInput
from nostall.fusion.codegen.autotune.autotuner import Autotuner
from nostall.fusion.codegen.autotune.candidates import candidates
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.graph.graph import Graph
from nostall.gpu.clock import Clock

SECONDS = 0.05
"""Of each comparison: the program goes on meanwhile, and whole graphs are compared afterwards."""
LEAST_S = 8e-6
"""Kernels whose modelled choice takes less do not race: a race gains a few hundredths of that, and
compiling a kernel's plans takes as long for those as for any other."""


@dataclass(frozen=True)
class Racing:
    """The kernels of a region whose plans race, by their operators: the modelled first choice comes
    first."""

    graph: Graph
    kernels: dict[tuple[int, ...], tuple[Schedule, tuple[KernelPlan, ...]]]


@dataclass
class Race:
    """As :class:`Autotuner`, for each kernel that is put in, within about ``seconds`` in all.  With
    ``most`` 0 there is none."""

    most: int
    seconds: float
    extent: Extent
    regions: list[Racing] = field(default_factory=list)

    def prepare(self, graph: Graph) -> Iterator[str]:
        """The kernels of a region that will be put in or race for it, by name: to be compiled.  All
        that is needed of the process is the store."""
        kept = Kept()
        wanted = self._wanted(stitched_region(graph, kept))
        for step in wanted:
            yield step.kernel
        if not self.most or graph.varying is not None:
            return
        racing = Racing(graph, {})
        for step in wanted:
            try:
                of = schedule_operators(graph, step.operators)
                every = candidates(of, self.most)
            except BadInput:
                continue  # a pack, whose parts have no common loops
            if modelled_seconds(of, every[0]) >= LEAST_S:
                racing.kernels[of.mapping.operators] = of, every
                for plan in every:
                    yield kept.put(emit(of, plan))
        if racing.kernels:
            self.regions.append(racing)

    def run(self, device: torch.device, clock: Clock) -> None:
        """Measure what has not been measured yet, and keep regions with the faster plans.  What
        fails leaves the modelled ones."""
        if not self.regions or not Ranks.here().leads:
            return
        try:
            self._run(device, clock, Kept())
        except Exception as error:  # the graph is stitched all the same
            say_once(f"plans were not raced: {type(error).__name__}: {error}")

    def _run(self, device: torch.device, clock: Clock, kept: Kept) -> None:
        count = sum(len(racing.kernels) for racing in self.regions)
        racer = Autotuner(clock, self.most, min(SECONDS, self.seconds / count), kept.folder)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for racing in self.regions:
                _put(racing, racer, kept)
        for failure in {record.failure for record in racer.records if record.failure}:
            say_once(f"a kernel keeps its modelled plan: {failure}")

    def _wanted(self, record: RegionRecord) -> list[StepRecord]:
        return [step for step in record.steps if self.extent == "all" or step.reduces]


def _put(racing: Racing, racer: Autotuner, kept: Kept) -> None:
    """Race, and keep the region anew where another plan than the first choice has won: the program
    waits for it."""
    won = {at: racer.fastest_of(of, every) for at, (of, every) in racing.kernels.items()}
    if all(won[at] == every[0] for at, (_, every) in racing.kernels.items()):
        return

    def choice(of: Schedule) -> KernelPlan:
        return won.get(of.mapping.operators) or default_plan(of)

    raced_region(racing.graph, kept, choice)
