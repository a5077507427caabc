"""What another process compiles for one graph while the program runs, before the program does.

Whatever goes wrong here costs time only: what was not compiled ahead is compiled where it is
needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from nostall.attach.compile.background import Preparation
from nostall.attach.compile.duel import Duels
from nostall.attach.compile.errand import Answer, Errand, layouts
from nostall.attach.compile.helper import HELPER
from nostall.attach.compile.hosts import Host, InductorHost
from nostall.attach.compile.parts import Selection, Stitching
from nostall.attach.compile.ranks import Ranks
from nostall.attach.compile.report import GraphReport


class Ahead:
    """``done``: what became of the stitched version's graphs, once they have been compiled."""

    def __init__(self, preparation: Preparation, report: GraphReport) -> None:
        self._preparation, self._report = preparation, report
        self.done: Stitching | None = None

    def begin(self) -> None:
        """There will be something to compile."""
        if not self._report.reason:
            HELPER.begin()

    def duels(self, duels: Duels, host: Host) -> None:
        """Compile what kernels are compared with, for about as long as comparisons may take."""
        if not (Ranks.here().leads and duels.modules and isinstance(host, InductorHost)):
            return
        until = math.inf
        for errand in duels.errands(host):
            if self._answer(errand).failure or time.perf_counter() > until:
                return
            # From when that process is there.
            until = min(until, time.perf_counter() + self._report.seconds["plain"])

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
            answer = self._answer(errand)
            self.done = answer.done
            if not self._report.reason:
                self._report.not_ahead = answer.failure

        self._preparation.add_last(work)
        self._preparation.start()
        return True

    def _answer(self, errand: Errand) -> Answer:
        if self._report.reason:
            return Answer("the graph has chosen")
        began = time.perf_counter()
        answer = HELPER.do(errand)
        self._preparation.add_cpu_seconds(answer.cpu_seconds)
        seconds = self._report.seconds
        seconds["ahead"] = seconds.get("ahead", 0.0) + time.perf_counter() - began
        return answer
