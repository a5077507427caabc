"""Measured objective of the assembler search: builds in all cores while the GPU times others."""

from __future__ import annotations

import heapq
import math
import queue
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic
from typing import Any, ClassVar, Protocol

import numpy as np

from nostall.core import Measurement, Objective
from nostall.core.errors import ContractBroken
from nostall.core.measurement import Kind
from nostall.gpu import AsyncDevice, Device, Outcome, PendingOutcome
from nostall.ptx.schedule.state import PtxState
from nostall.search.orders.operators import GIVEN, Proposal
from nostall.search.orders.pipeline import Finished
from nostall.tuning.assembler.candidate import Candidate, build_proposal, find_hazards

_QUEUED_PER_WORKER = 2
_ALWAYS_QUEUED = 4
"""Proposals in the pipeline: this many for each worker, and these for the device."""
_MAX_CUBINS = 400
"""Cubins that are kept: those of the candidates with the lowest values."""

DEVICE_PHASES = ("load", "check", "time")
"""Phases of a device; the others are those of the workers."""


class Workers(Protocol):
    """Worker processes: :class:`~nostall.ptx.assemble.pool.BuildPool`, or a test's fake."""

    @property
    def workers(self) -> int: ...

    def submit_task(self, task: Callable[[Any, Any], Any], argument: Any) -> Future[Any]: ...


class Log(Protocol):
    """Receives each candidate that was measured or dropped."""

    def record(
        self,
        number: int,
        proposal: Proposal[PtxState],
        candidate: Candidate,
        result: str,
        samples: Sequence[float],
    ) -> None: ...


@dataclass
class _Known:
    """A candidate that was built, and what has been found of it."""

    candidate: Candidate
    measured: int = 0
    """Number of measurements."""


@dataclass(frozen=True)
class _Job:
    """A candidate that is ready to be measured."""

    number: int
    proposal: Proposal[PtxState]
    known: _Known
    cubin: bytes


class AssemblerObjective(Objective[PtxState]):
    """Seconds per launch of a state; a :class:`~nostall.search.orders.pipeline.Pipeline`.

    The value is the original's time at the start of the search, times the median ratio candidate /
    original of interleaved pairs.  Outputs are compared with the original's before each timing.
    The verifier of machine code takes longer than ptxas, so it checks only what may be the result:
    see :meth:`safe_states`.
    """

    kind: ClassVar[Kind] = "measured"
    unit: ClassVar[str] = "s"

    def __init__(
        self,
        workers: Workers,
        device: Device,
        flops: float | None = None,
        log: Log | None = None,
    ) -> None:
        self.workers, self.device, self.flops = workers, device, flops
        self.log = log
        self.original_s: float | None = None
        """Time of the original in the first evaluation; None before it."""
        self.outcome_counts: Counter[str] = Counter()
        """Candidates by result: ``timed``, why they were dropped, and ``measured again``."""
        self.codes: Counter[str] = Counter()
        """Messages of ptxas that dropped candidates, by code."""
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds by phase, of all workers and of the device."""
        self.waiting_seconds = 0.0
        """Time in which the device had nothing to measure, since the first submission."""
        self.failures: list[str] = []
        """Result and detail of candidates that failed on the device or in the verifier."""
        self._known: dict[PtxState, _Known] = {}
        """Candidates that were built."""
        self._code: dict[str, PtxState] = {}
        """The first state with this machine code."""
        self._kept: list[tuple[float, int, _Known]] = []
        """Heap of the candidates whose cubins are kept: (negative value, number), worst first."""
        self._numbers = count()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready: deque[_Job] = deque()
        self._finished: deque[Finished[PtxState]] = deque()
        self._running: tuple[_Job, PendingOutcome] | None = None
        self._generation = 0
        self._idle_since: float | None = None

    # Pipeline

    @property
    def capacity(self) -> int:
        return _QUEUED_PER_WORKER * self.workers.workers + _ALWAYS_QUEUED

    @property
    def idle(self) -> bool:
        return not self._ready

    def submit(self, number: int, proposal: Proposal[PtxState]) -> None:
        """As :meth:`Pipeline.submit`."""
        if self._idle_since is None and self._running is None:
            self._idle_since = monotonic()
        known = self._known.get(proposal.parent)
        if proposal.operator == GIVEN and known is not None and known.candidate.cubin:
            self._ready.appendleft(_Job(number, proposal, known, known.candidate.cubin))
            return
        future = self.workers.submit_task(build_proposal, proposal)
        self._when_done(future, lambda built: self._built(number, proposal, built))

    def collect(self) -> Finished[PtxState]:
        """As :meth:`Pipeline.collect`."""
        while True:
            self._handle_events(wait=False)
            self._start_next()
            if self._finished:
                return self._finished.popleft()
            if self._running is None:
                self._handle_events(wait=True)
                continue
            job, pending = self._running
            outcome = pending.wait()
            self._running = None
            self._idle_since = monotonic()
            self._handle_events(wait=False)
            self._start_next()
            return self._finish(job, outcome)

    def discard(self) -> None:
        """As :meth:`Pipeline.discard`."""
        self._generation += 1
        self._ready.clear()
        self._finished.clear()
        if self._running is not None:
            _, pending = self._running
            self._running = None
            pending.wait()
        self._idle_since = None

    # Objective

    def evaluate(self, states: Sequence[PtxState]) -> list[Measurement]:
        return [self._evaluate(state) for state in states]

    def candidate(self, state: PtxState) -> Candidate:
        """A state with its cubin, which is built again if it was not kept.

        Raises :class:`ContractBroken` for a state that cannot be built.
        """
        known = self._known.get(state)
        if known is None or not known.candidate.cubin:
            self.prepare([state])
            known = self._known[state]
        if not known.candidate.cubin:
            raise ContractBroken(f"the state has no cubin: {known.candidate.detail}")
        return known.candidate

    def prepare(self, states: Sequence[PtxState]) -> list[Candidate]:
        """Build states in parallel, without measuring them; in order."""
        proposals = [Proposal(GIVEN, state) for state in states]
        futures = [self.workers.submit_task(build_proposal, proposal) for proposal in proposals]
        candidates: list[Candidate] = [future.result() for future in futures]
        for candidate in candidates:
            self._remember(candidate)
        return candidates

    def safe_states(self, states: Sequence[PtxState]) -> list[PtxState]:
        """The states whose cubin the verifier of machine code accepts, checked in parallel.

        Rejected ones are counted as ``unsafe``.
        """
        cubins = [self.candidate(state).cubin for state in states]
        futures = [self.workers.submit_task(find_hazards, cubin) for cubin in cubins]
        safe: list[PtxState] = []
        for state, future in zip(states, futures, strict=True):
            hazards = future.result()
            if hazards:
                self.outcome_counts["unsafe"] += 1
                self.failures.append(f"unsafe: {hazards}")
            else:
                safe.append(state)
        return safe

    def _evaluate(self, state: PtxState) -> Measurement:
        known = self._known.get(state)
        if known is None or not known.candidate.cubin:
            self.prepare([state])
            known = self._known[state]
        if not known.candidate.cubin:
            return self._failed(f"{known.candidate.status}: {known.candidate.detail}")
        return self._measurement(known, self.device.evaluate(known.candidate.cubin))

    # Steps of a proposal: build, wait for the device, measure

    def _when_done(self, future: Future[Any], use: Callable[[Any], None]) -> None:
        """Use the result of a worker in this thread, unless the search has ended by then."""
        generation = self._generation

        def in_this_thread() -> None:
            if generation == self._generation:
                use(future.result())

        future.add_done_callback(lambda _: self._events.put(in_this_thread))

    def _handle_events(self, *, wait: bool) -> None:
        """Use the results of workers that are there; ``wait`` for the first one."""
        while True:
            try:
                event = self._events.get(block=wait)
            except queue.Empty:
                return
            wait = False
            event()

    def _built(self, number: int, proposal: Proposal[PtxState], candidate: Candidate) -> None:
        seen = candidate.state in self._known and proposal.operator != GIVEN
        known, is_first = self._remember(candidate)
        if candidate.status != "built":
            self._drop(number, proposal, candidate, candidate.status)
        elif seen or not is_first:
            self._drop(number, proposal, candidate, "duplicate")
        else:
            self._ready.append(_Job(number, proposal, known, candidate.cubin))

    def _remember(self, candidate: Candidate) -> tuple[_Known, bool]:
        """The entry of a candidate, and whether it is the first state with its machine code."""
        for phase, seconds in candidate.phase_seconds.items():
            self.phase_seconds[phase] += seconds
        self.codes.update(candidate.codes)
        state = candidate.state
        first = self._code.setdefault(candidate.code_sha256, state) if candidate.cubin else state
        known = self._known.setdefault(state, _Known(candidate))
        known.candidate = candidate
        return known, first == state

    def _drop(
        self, number: int, proposal: Proposal[PtxState], candidate: Candidate, why: str
    ) -> None:
        self.outcome_counts[why] += 1
        if self.log is not None and why != "no change":
            self.log.record(number, proposal, candidate, why, ())
        self._finished.append(Finished(number, candidate.state, None, why))

    def _start_next(self) -> None:
        """Give the next candidate to the device, if it is free, and announce the one after it."""
        if self._running is not None or not self._ready:
            return
        job = self._ready.popleft()
        if self._idle_since is not None:
            self.waiting_seconds += monotonic() - self._idle_since
            self._idle_since = None
        if not isinstance(self.device, AsyncDevice):
            outcome = self.device.evaluate(job.cubin)
            self._running = job, PendingOutcome(lambda: True, lambda: outcome)
            return
        pending = self.device.start(job.cubin)
        self._running = job, pending
        if self._ready:
            pending.prefetch(self._ready[0].cubin)

    def _finish(self, job: _Job, outcome: Outcome) -> Finished[PtxState]:
        is_first = job.known.measured == 0
        measurement = self._measurement(job.known, outcome)
        samples = outcome.timing.candidate if outcome.timing else ()
        originals = outcome.timing.original if outcome.timing else ()
        ratios = [o / c for o, c in zip(originals, samples, strict=True)]
        self._log(job, outcome.status if is_first else "measured again", ratios)
        return Finished(job.number, job.known.candidate.state, measurement)

    def _measurement(self, known: _Known, outcome: Outcome) -> Measurement:
        self.outcome_counts[outcome.status if known.measured == 0 else "measured again"] += 1
        known.measured += 1
        for phase, seconds in outcome.phase_seconds.items():
            self.phase_seconds[phase] += seconds
        if outcome.timing is None:
            self.failures.append(f"{outcome.status}: {outcome.detail}")
            _forget_cubin(known)
            return self._failed(self.failures[-1])
        original = np.asarray(outcome.timing.original)
        if self.original_s is None:
            self.original_s = float(np.median(original))
        ratios = np.asarray(outcome.timing.candidate) / original
        samples = tuple(float(x) for x in self.original_s * ratios)
        measurement = Measurement("s", samples, "measured", dict(self.device.info))
        if known.measured == 1:
            self._keep(known, measurement.value)
        return measurement

    def _keep(self, known: _Known, value: float) -> None:
        """Keep the cubin of a candidate, and forget that of the candidate with the highest value.

        All of a search would need gigabytes.
        """
        heapq.heappush(self._kept, (-value, next(self._numbers), known))
        if len(self._kept) > _MAX_CUBINS:
            _forget_cubin(heapq.heappop(self._kept)[2])

    def _log(self, job: _Job, result: str, ratios: Sequence[float]) -> None:
        if self.log is not None:
            self.log.record(job.number, job.proposal, job.known.candidate, result, ratios)

    @staticmethod
    def _failed(why: str) -> Measurement:
        return Measurement("s", (), "measured", failure=why)


def _forget_cubin(known: _Known) -> None:
    known.candidate = replace(known.candidate, cubin=b"")


def idle_share(objective: AssemblerObjective, seconds: float) -> float:
    """Part of ``seconds`` in which the device did not load, check or time a candidate."""
    busy = sum(objective.phase_seconds[phase] for phase in DEVICE_PHASES)
    return max(0.0, 1.0 - busy / seconds) if seconds > 0 else math.nan
