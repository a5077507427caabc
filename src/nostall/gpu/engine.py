"""What runs inside the worker process: load, check and time candidates of one kernel."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter

import numpy as np

from nostall.core.errors import BadInput
from nostall.gpu.checking import SEARCH, Checker
from nostall.gpu.cupti import CuptiTimer
from nostall.gpu.device import Kernel, Outcome, Plan, Timing
from nostall.gpu.driver import Arguments, Cuda, DriverError, Loaded
from nostall.gpu.timing import ColdTimer, EventTimer, Flush, GraphTimer, Timer, launches_for

_ASKED = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks.max.sm"


class Engine:
    """Owns the CUDA context of the worker.

    Raises :class:`BadInput` when the original does not load or run, its buffers do not fit, or it
    gives different outputs for the same inputs, and :class:`MissingPart` where the GPU or the clock
    cannot be used.
    """

    def __init__(
        self, kernel: Kernel, plan: Plan, ordinal: int = 0, cuda: Cuda | None = None
    ) -> None:
        self.kernel, self.plan = kernel, plan
        self.cuda = cuda or Cuda(ordinal)
        self.foretold: Callable[[], bytes | None] = lambda: None
        self._ready: list[tuple[bytes, Loaded]] = []
        self.original = self._load_original()
        self.flush = Flush(self.cuda)
        self.checker = Checker(self.cuda, kernel.name, kernel.launch, plan.inputs, plan, self.flush)
        self.arguments: Arguments = self.checker.bind(self.original)
        for number in range(plan.inputs):
            self.checker.expect(self.original, SEARCH + number, number)
        self.timer = self._timer()

    def about(self) -> Mapping[str, str]:
        """GPU, driver, clocks, temperature and power; read, never changed."""
        found = {"gpu": self.cuda.name, "architecture": f"sm_{self.cuda.architecture}"}
        with suppress(OSError, subprocess.SubprocessError):
            line = subprocess.run(
                [
                    "nvidia-smi",
                    f"--query-gpu={_ASKED}",
                    "--format=csv,noheader",
                    "-i",
                    self.cuda.bus,
                ],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout
            names = _ASKED.split(",")
            found.update(zip(names, (v.strip() for v in line.split(",")), strict=False))
        return found

    def evaluate(self, cubin: bytes) -> Outcome:
        """Check ``cubin`` on every input set, then time it in pairs with the original."""
        clock = _Parts()
        try:
            candidate = self._taken(cubin)
        except DriverError as error:
            return Outcome("rejected", detail=str(error), spent=clock.done("load"))
        clock.done("load")
        for number in range(self.plan.inputs):
            wrong = self.checker.wrong(candidate, number)
            if wrong:
                self.cuda.unload(candidate)
                detail = self.checker.said((number, wrong))
                return Outcome("wrong", detail=detail, spent=clock.done("check"))
        clock.done("check")
        original, timed = self.timer.pairs([self.original, candidate], self.plan.rounds)
        self.cuda.unload(candidate)
        return Outcome("timed", Timing(tuple(original), tuple(timed)), spent=clock.done("time"))

    def check(self, cubin: bytes, first: int, count: int) -> Outcome:
        """Compare the outputs of ``count`` samples from number ``first`` on, in the launch itself
        and in each of its further shapes."""
        clock = _Parts()
        try:
            candidate = self._load(cubin)
        except DriverError as error:
            return Outcome("rejected", detail=str(error), spent=clock.done("load"))
        clock.done("load")
        launch = self.kernel.launch
        found = self.checker.first_wrong(self.original, candidate, first, count)
        detail = self.checker.said(found) if found else ""
        for number, shape in enumerate(launch.shapes):
            if detail:
                break
            other = Checker(self.cuda, self.kernel.name, launch.at(shape), 1, self.plan, self.flush)
            found = other.first_wrong(self.original, candidate, first, count)
            detail = f"{other.said(found)} of further shape {number}" if found else ""
            other.release()
        self.cuda.unload(candidate)
        return Outcome("wrong" if detail else "agrees", detail=detail, spent=clock.done("check"))

    def compare(self, cubin: bytes, rounds: int) -> Outcome:
        """Interleaved triples original, candidate, original again, over several loads of each.

        Where a module lies in memory changes its time a little.  All loads stay until the end, so
        that each lies elsewhere, and their order rotates.
        """
        clock = _Parts()
        loads = max(1, min(self.plan.loads, rounds // 2))
        try:
            triples = [self._triple(cubin, turn) for turn in range(loads)]
        except DriverError as error:
            return Outcome("rejected", detail=str(error), spent=clock.done("load"))
        clock.done("load")
        samples: list[list[float]] = [[], [], []]
        shares = [len(part) for part in np.array_split(np.arange(rounds), loads)]
        for triple, share in zip(triples, shares, strict=True):
            for kept, new in zip(samples, self.timer.pairs(triple, share), strict=True):
                kept += new
        original, changed, again = (tuple(s) for s in samples)
        timing = Timing(original, changed, again, loads)
        return Outcome("timed", timing, spent=clock.done("time"))

    def _triple(self, cubin: bytes, turn: int) -> list[Loaded]:
        """Original, candidate and original again, loaded in an order that rotates."""
        what = [self.kernel.cubin, cubin, self.kernel.cubin]
        loaded: dict[int, Loaded] = {}
        for step in range(3):
            which = (turn + step) % 3
            loaded[which] = self._load(what[which])
        return [loaded[which] for which in range(3)]

    def _load_ahead(self) -> None:
        """While the GPU is busy: load what may come next.

        The driver loads a module beside running work, but returns only when that is over, so what
        is told first is all that is loaded.
        """
        cubin = self.foretold()
        if cubin is not None:
            with suppress(DriverError):  # it is told to who asks for it
                self._ready.append((cubin, self._load(cubin)))

    def _taken(self, cubin: bytes) -> Loaded:
        """The module, which may be there already; others that are go at once, because new memory
        for modules takes the driver milliseconds."""
        ready, self._ready = self._ready, []
        found: Loaded | None = None
        for known, loaded in ready:
            if found is None and known == cubin:
                found = loaded
            else:
                self.cuda.unload(loaded)
        return found or self._load(cubin)

    def _load(self, cubin: bytes) -> Loaded:
        return self.cuda.load(cubin, self.kernel.name, self.kernel.launch.shared)

    def _load_original(self) -> Loaded:
        try:
            return self._load(self.kernel.cubin)
        except DriverError as error:
            here = f"{self.cuda.name} (sm_{self.cuda.architecture})"
            raise BadInput(
                f"{self.kernel.name} cannot be loaded on {here}: {error}; compile it for "
                f"sm_{self.cuda.architecture}, or measure on the GPU that it is for"
            ) from error

    def _timer(self) -> Timer:
        plan, spec = self.plan, self.kernel.launch
        if plan.cold and plan.clock != "cupti":  # one launch at a time: there is nothing to batch
            return ColdTimer(self.cuda, spec, self.arguments, self.flush)
        probe = GraphTimer(self.cuda, spec, self.arguments, 10, self.original)
        probe.pairs([self.original], 10)
        seconds = float(np.median(probe.pairs([self.original], 5)[0]))
        times = launches_for(seconds, plan.batch_us)
        if plan.clock == "cupti":
            flush = self.flush if plan.cold else None
            return CuptiTimer(self.cuda, spec, self.arguments, times, flush)
        if plan.clock == "events":
            return EventTimer(self.cuda, spec, self.arguments, times)
        meanwhile = self._load_ahead if plan.ahead else None
        return GraphTimer(self.cuda, spec, self.arguments, times, self.original, meanwhile)


class _Parts:
    """Where the time of one candidate goes."""

    def __init__(self) -> None:
        self._since = perf_counter()
        self._parts: dict[str, float] = {}

    def done(self, part: str) -> dict[str, float]:
        now = perf_counter()
        self._parts[part] = now - self._since
        self._since = now
        return dict(self._parts)
