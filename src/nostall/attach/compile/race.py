"""The race of plans for the kernels of one graph, before its versions are compared as a whole.

What needs a compiler is done in the background; kernels run on the program's own thread, where no
CUDA graph is being captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from nostall.attach.compile.parts import Extent
from nostall.attach.compile.ranks import Ranks
from nostall.attach.compile.records import Kept, RegionRecord, StepRecord
from nostall.attach.compile.region import raced_region, stitched_region
from nostall.attach.delivery import say_once
from nostall.core.errors import BadInput
from nostall.fusion.codegen.choice import first_choice, modelled_seconds
from nostall.fusion.codegen.emit import emit
from nostall.fusion.codegen.legal import scheduled
from nostall.fusion.codegen.plan import KernelPlan
from nostall.fusion.codegen.race import candidates
from nostall.fusion.codegen.racing import SECONDS, Racer
from nostall.fusion.codegen.schedule import Schedule
from nostall.fusion.graph import Graph
from nostall.gpu.clock import Clock

LEAST_S = 8e-6
"""Kernels whose modelled choice takes less do not race: a race gains a few hundredths of that, and
compiling a kernel's plans takes as long for those as for any other."""


@dataclass
class Race:
    """As :class:`Racer`, for each kernel that is put in, within about ``seconds`` in all.  Without
    a clock there is none."""

    clock: Clock | None
    most: int
    seconds: float
    extent: Extent
    regions: list[Graph] = field(default_factory=list)

    def prepare(self, graph: Graph) -> Iterator[str]:
        """The kernels of a region that will be put in or race for it, by name: to be compiled."""
        kept = Kept()
        record = stitched_region(graph, kept)
        for step in self._wanted(record):
            yield step.kernel
        if self.clock is None or not self.most:
            return
        self.regions.append(graph)
        for step in self._wanted(record):
            try:
                of = scheduled(graph, step.operators)
            except BadInput:
                continue  # a pack, whose parts have no common loops
            for plan in candidates(of, self.most) if is_worth_it(of) else ():
                yield kept.put(emit(of, plan))

    def run(self, device: torch.device) -> None:
        """Measure what has not been measured yet, and keep regions with the faster plans.  What
        fails leaves the modelled ones."""
        if not self.regions or self.clock is None or not Ranks.here().leads:
            return
        try:
            self._run(device, self.clock, Kept())
        except Exception as error:  # the graph is stitched all the same
            say_once(f"plans were not raced: {type(error).__name__}: {error}")

    def _run(self, device: torch.device, clock: Clock, kept: Kept) -> None:
        count = sum(len(self._wanted(stitched_region(graph, kept))) for graph in self.regions)
        each = min(SECONDS, self.seconds / max(1, count))
        racer = Racer(clock, self.most, each, kept.folder)

        def choice(of: Schedule) -> KernelPlan:
            reduces = any(of.mapping.reduced.get(i) for i in of.mapping.operators)
            put_in = reduces or self.extent == "all"
            return racer(of) if put_in and is_worth_it(of) else first_choice(of)

        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for graph in self.regions:
                raced_region(graph, kept, choice)
        for failure in {record.failure for record in racer.told if record.failure}:
            say_once(f"a kernel keeps its modelled plan: {failure}")

    def _wanted(self, record: RegionRecord) -> list[StepRecord]:
        return [step for step in record.steps if self.extent == "all" or step.reduces]


def is_worth_it(of: Schedule) -> bool:
    """Whether a kernel takes long enough, *modelled*, for its plans to be compiled and raced."""
    return modelled_seconds(of, first_choice(of)) >= LEAST_S
