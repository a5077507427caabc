"""Evaluator in the worker process: loads, checks and times candidates of one kernel."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter

import numpy as np

from nostall.core.errors import BadInput
from nostall.gpu.cupti import CuptiTimer
from nostall.gpu.device import Kernel, MeasurementPlan, Outcome, Status, Timing
from nostall.gpu.driver import Cuda, DriverError, KernelArguments, LoadedKernel
from nostall.gpu.evaluator.checking import SEARCH_START, Checker
from nostall.gpu.timing import (
    ColdTimer,
    EventTimer,
    GraphTimer,
    L2Flush,
    Timer,
    launches_per_sample,
)

_REFUSED_LAUNCHES = ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "CUDA_ERROR_INVALID_VALUE")
"""Errors of a launch that did not start, such as for too many registers; the context is intact."""
_SMI_FIELDS = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks.max.sm"


class Engine:
    """Loads, checks and times candidates in the CUDA context of this process."""

    def __init__(
        self,
        kernel: Kernel,
        plan: MeasurementPlan,
        ordinal: int = 0,
        cuda: Cuda | None = None,
    ) -> None:
        """Load the original, and run it for the expected outputs.

        Raises :class:`BadInput` if the original does not load or run, its buffers do not fit, or
        its outputs do not repeat, and :class:`MissingPart` if the GPU or the timer cannot be used.
        """
        self.kernel, self.plan = kernel, plan
        self.cuda = cuda or Cuda(ordinal)
        self.next_hint: Callable[[], bytes | None] = lambda: None
        self._prefetched: list[tuple[bytes, LoadedKernel]] = []
        self.original = self._load_original()
        self.flush = L2Flush(self.cuda)
        self.checker = Checker(self.cuda, kernel.name, kernel.launch, plan.inputs, plan, self.flush)
        self.arguments: KernelArguments = self.checker.bind(self.original)
        for index in range(plan.inputs):
            self.checker.prepare_set(self.original, SEARCH_START + index, index)
        self.timer = self._make_timer()

    def info(self) -> Mapping[str, str]:
        """GPU, driver, clocks, temperature and power as read now; nothing is set."""
        info = {"gpu": self.cuda.name, "architecture": f"sm_{self.cuda.architecture}"}
        with suppress(OSError, subprocess.SubprocessError):
            line = subprocess.run(
                [
                    "nvidia-smi",
                    f"--query-gpu={_SMI_FIELDS}",
                    "--format=csv,noheader",
                    "-i",
                    self.cuda.bus,
                ],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout
            names = _SMI_FIELDS.split(",")
            info.update(zip(names, (v.strip() for v in line.split(",")), strict=False))
        return info

    def evaluate(self, cubin: bytes) -> Outcome:
        """Check a candidate on every input set, then time it in pairs with the original."""
        phases = _PhaseTimer()
        try:
            candidate = self._load_candidate(cubin)
        except DriverError as error:
            return Outcome("rejected", detail=str(error), phase_seconds=phases.end("load"))
        phases.end("load")
        for index in range(self.plan.inputs):
            try:
                mismatches = self.checker.count_mismatches(candidate, index)
                if candidate.dependent and not mismatches:
                    mismatches = self.checker.count_early_reads(candidate, index)
            except DriverError as error:
                if error.name not in _REFUSED_LAUNCHES:
                    raise
                self.cuda.unload(candidate)
                return Outcome("rejected", detail=str(error), phase_seconds=phases.end("check"))
            if mismatches:
                self.cuda.unload(candidate)
                detail = self.checker.describe((index, mismatches))
                return Outcome("wrong", detail=detail, phase_seconds=phases.end("check"))
        phases.end("check")
        original, timed = self.timer.time_interleaved([self.original, candidate], self.plan.rounds)
        self.cuda.unload(candidate)
        timing = Timing(tuple(original), tuple(timed))
        return Outcome("timed", timing, phase_seconds=phases.end("time"))

    def check(self, cubin: bytes, first: int, count: int) -> Outcome:
        """Check a candidate on ``count`` samples from number ``first`` on.

        Each sample is checked for the launch itself and for each of its variants.
        """
        phases = _PhaseTimer()
        try:
            candidate = self._load(cubin)
        except DriverError as error:
            return Outcome("rejected", detail=str(error), phase_seconds=phases.end("load"))
        phases.end("load")
        launch = self.kernel.launch
        mismatch = self.checker.first_mismatch(self.original, candidate, first, count)
        detail = self.checker.describe(mismatch) if mismatch else ""
        if self.plan.dependent_launch and not detail:
            early = self.checker.count_early_reads(candidate, 0)
            detail = f"{early} words of the outputs show that it does not wait" if early else ""
        for number, variant in enumerate(launch.shapes):
            if detail:
                break
            changed = launch.with_variant(variant)
            checker = Checker(self.cuda, self.kernel.name, changed, 1, self.plan, self.flush)
            mismatch = checker.first_mismatch(self.original, candidate, first, count)
            detail = f"{checker.describe(mismatch)} of further shape {number}" if mismatch else ""
            checker.release()
        self.cuda.unload(candidate)
        status: Status = "wrong" if detail else "agrees"
        return Outcome(status, detail=detail, phase_seconds=phases.end("check"))

    def compare(self, cubin: bytes, rounds: int) -> Outcome:
        """Time interleaved triples (original, candidate, original), over several loads of each.

        The address at which a module is loaded changes its time a little.  All loads stay until
        the end, so each has another address, and the order of loading rotates.
        """
        phases = _PhaseTimer()
        loads = max(1, min(self.plan.loads, rounds // 2))
        try:
            triples = [self._load_triple(cubin, number) for number in range(loads)]
        except DriverError as error:
            return Outcome("rejected", detail=str(error), phase_seconds=phases.end("load"))
        phases.end("load")
        samples: list[list[float]] = [[], [], []]
        shares = [len(part) for part in np.array_split(np.arange(rounds), loads)]
        for triple, share in zip(triples, shares, strict=True):
            timed = self.timer.time_interleaved(triple, share)
            for all_samples, new_samples in zip(samples, timed, strict=True):
                all_samples += new_samples
        original, candidate, null = (tuple(s) for s in samples)
        timing = Timing(original, candidate, null, loads)
        return Outcome("timed", timing, phase_seconds=phases.end("time"))

    def _load_triple(self, cubin: bytes, number: int) -> list[LoadedKernel]:
        """Load original, candidate and original; the load order rotates with ``number``."""
        cubins = [self.kernel.cubin, cubin, self.kernel.cubin]
        loaded: dict[int, LoadedKernel] = {}
        for step in range(3):
            index = (number + step) % 3
            is_candidate = index == 1
            loaded[index] = self._load(cubins[index], self.plan.dependent_launch and is_candidate)
        return [loaded[index] for index in range(3)]

    def _prefetch(self) -> None:
        """Load the module of the next hint while the GPU is busy.

        The driver loads a module beside running work, but returns only when that work is done, so
        only one module is loaded.
        """
        cubin = self.next_hint()
        if cubin is not None:
            with suppress(DriverError):  # reported if the candidate is evaluated
                loaded = self._load(cubin, self.plan.dependent_launch)
                self._prefetched.append((cubin, loaded))

    def _load_candidate(self, cubin: bytes) -> LoadedKernel:
        """Load a candidate, or take it from the prefetched modules.

        Other prefetched modules are unloaded at once: if they accumulated, the driver would need
        milliseconds to allocate memory for new modules.
        """
        prefetched, self._prefetched = self._prefetched, []
        candidate: LoadedKernel | None = None
        for known, loaded in prefetched:
            if candidate is None and known == cubin:
                candidate = loaded
            else:
                self.cuda.unload(loaded)
        return candidate or self._load(cubin, self.plan.dependent_launch)

    def _load(self, cubin: bytes, dependent: bool = False) -> LoadedKernel:
        shared = self.kernel.launch.shared
        return self.cuda.load(cubin, self.kernel.name, shared, dependent=dependent)

    def _load_original(self) -> LoadedKernel:
        try:
            return self._load(self.kernel.cubin)
        except DriverError as error:
            gpu = f"{self.cuda.name} (sm_{self.cuda.architecture})"
            raise BadInput(
                f"{self.kernel.name} cannot be loaded on {gpu}: {error}; compile it for "
                f"sm_{self.cuda.architecture}, or measure on the GPU that it is for"
            ) from error

    def _make_timer(self) -> Timer:
        plan, spec = self.plan, self.kernel.launch
        if plan.cold and plan.clock != "cupti":  # cold launches are timed alone, not in batches
            return ColdTimer(self.cuda, spec, self.arguments, self.flush)
        probe = GraphTimer(self.cuda, spec, self.arguments, 10, self.original)
        probe.time_interleaved([self.original], 10)
        seconds = float(np.median(probe.time_interleaved([self.original], 5)[0]))
        launches = launches_per_sample(seconds, plan.batch_us)
        if plan.clock == "cupti":
            flush = self.flush if plan.cold else None
            return CuptiTimer(self.cuda, spec, self.arguments, launches, flush)
        if plan.clock == "events":
            return EventTimer(self.cuda, spec, self.arguments, launches)
        while_busy = self._prefetch if plan.prefetch else None
        return GraphTimer(self.cuda, spec, self.arguments, launches, self.original, while_busy)


class _PhaseTimer:
    """Seconds spent in each phase of one evaluation."""

    def __init__(self) -> None:
        self._since = perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, phase: str) -> dict[str, float]:
        """End a phase; returns the seconds of all phases so far."""
        now = perf_counter()
        self._seconds[phase] = now - self._since
        self._since = now
        return dict(self._seconds)
