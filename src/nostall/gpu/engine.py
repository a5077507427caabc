"""What runs inside the worker process: load, check and time candidates of one kernel."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from time import perf_counter

import numpy as np

from nostall.core.errors import BadInput
from nostall.gpu.buffers import Buffers
from nostall.gpu.device import Kernel, Outcome, Plan, Timing
from nostall.gpu.driver import Arguments, Cuda, DriverError, Loaded
from nostall.gpu.timing import ColdTimer, GraphTimer, launches_for

_ASKED = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks.max.sm"


class Engine:
    """Owns the CUDA context of the worker.

    Raises :class:`BadInput` when the original does not run, is for another architecture, or gives
    different outputs for the same inputs.
    """

    def __init__(self, kernel: Kernel, plan: Plan, ordinal: int = 0) -> None:
        self.kernel, self.plan, self.ordinal = kernel, plan, ordinal
        self.cuda = Cuda(ordinal)
        self.buffers = Buffers(self.cuda, kernel.launch, plan.inputs, plan.seed)
        self.original = self._load(kernel.cubin)
        given = sum(not hasattr(a, "constant") for a in kernel.launch.args)
        extra = self.cuda.missing_parameters(self.original, given)
        self.arguments = Arguments.of(kernel.launch, self.buffers.pointers, extra)
        for number in range(plan.inputs):
            self._expect(number)
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
                    str(self.ordinal),
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
            candidate = self._load(cubin)
        except DriverError as error:
            return Outcome("rejected", detail=str(error), spent=clock.done("load"))
        clock.done("load")
        for number in range(self.plan.inputs):
            wrong = self._wrong(candidate, number)
            if wrong:
                self.cuda.unload(candidate)
                detail = f"{wrong} words of the outputs differ on input set {number}"
                return Outcome("wrong", detail=detail, spent=clock.done("check"))
        clock.done("check")
        original, timed = self.timer.pairs([self.original, candidate], self.plan.rounds)
        self.cuda.unload(candidate)
        return Outcome("timed", Timing(tuple(original), tuple(timed)), spent=clock.done("time"))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        """``checks`` fresh inputs against the original, then interleaved triples."""
        clock = _Parts()
        try:
            candidate, again = self._load(cubin), self._load(self.kernel.cubin)
        except DriverError as error:
            return Outcome("rejected", detail=str(error), spent=clock.done("load"))
        clock.done("load")
        for check in range(checks):
            self.buffers.refresh(0, np.random.default_rng([self.plan.seed, 1, check]))
            self._expect(0)
            wrong = self._wrong(candidate, 0)
            if wrong:
                detail = f"{wrong} words of the outputs differ on fresh input {check}"
                return Outcome("wrong", detail=detail, spent=clock.done("check"))
        clock.done("check")
        samples = self.timer.pairs([self.original, candidate, again], rounds)
        spent = clock.done("time")
        return Outcome("timed", Timing(*(tuple(s) for s in samples)), spent=spent)

    def _load(self, cubin: bytes) -> Loaded:
        return self.cuda.load(cubin, self.kernel.name, self.kernel.launch.shared)

    def _launch(self, which: Loaded, number: int) -> None:
        self.buffers.restore(number)
        self.cuda.launch(which, self.kernel.launch, self.arguments)

    def _wrong(self, candidate: Loaded, number: int) -> int:
        self._launch(candidate, number)
        return self.buffers.wrong_words(number)

    def _expect(self, number: int) -> None:
        """Run the original twice on one input set; it must repeat itself."""
        self._launch(self.original, number)
        self.buffers.expect(number)
        wrong = self._wrong(self.original, number)
        if wrong:
            raise BadInput(
                f"{self.kernel.name} is not deterministic: {wrong} words of its outputs differ "
                "between two launches on the same inputs, so no candidate could be checked bit by "
                "bit; tune a kernel whose outputs repeat (no floating-point atomics, no unwritten "
                "outputs)"
            )

    def _timer(self) -> GraphTimer | ColdTimer:
        if self.plan.cold:
            return ColdTimer(self.cuda, self.kernel.launch, self.arguments)
        spec, kept = self.kernel.launch, self.original
        probe = GraphTimer(self.cuda, spec, self.arguments, 10, kept)
        probe.pairs([self.original], 10)
        seconds = float(np.median(probe.pairs([self.original], 5)[0]))
        times = launches_for(seconds, self.plan.batch_us)
        return GraphTimer(self.cuda, spec, self.arguments, times, kept)


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
