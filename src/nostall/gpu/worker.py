"""GPU device that runs candidates in a worker process, which may crash or hang.

Prefetch hints: a worker loads modules that may come next while the GPU is being timed.

A hint's bytes are in memory that both processes share, so sending a hint never waits for the
worker.  A slot may be overwritten while the worker reads it.  What the worker read then matches no
candidate that is evaluated later, and the worker drops it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import SpawnContext
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from nostall.core.errors import BadInput, NostallError
from nostall.core.process import Channel, ChildProcess, ProcessEnded
from nostall.gpu.device import Kernel, MeasurementPlan, Outcome, PendingOutcome

_SLOTS = 2
"""A step of a search has two possible next candidates: accepted or not."""
_HINT = "prefetch"
_HINT_WAIT_SECONDS = 5e-4
"""Time for which a worker waits for a hint: about one step of a search on the host."""


class PrefetchSlots:
    """Shared memory for the modules of the latest hints."""

    def __init__(self, context: SpawnContext, size: int) -> None:
        """``size``: bytes of a slot; larger modules are not prefetched."""
        self._size = size
        self._memory = context.RawArray(ctypes.c_ubyte, _SLOTS * size)
        self._next = 0

    def write(self, cubin: bytes) -> tuple[Any, ...] | None:
        """Store ``cubin`` and return the hint message for it, or None if it is too large."""
        if len(cubin) > self._size:
            return None
        slot, self._next = self._next, (self._next + 1) % _SLOTS
        offset = slot * self._size
        memoryview(self._memory).cast("B")[offset : offset + len(cubin)] = cubin
        return _HINT, offset, len(cubin)

    def read(self, offset: int, length: int) -> bytes:
        """The bytes that a hint message refers to."""
        return bytes(memoryview(self._memory).cast("B")[offset : offset + length])


class WorkerMessages:
    """Messages to the worker: requests, with hints between them."""

    def __init__(self, channel: Channel, slots: PrefetchSlots) -> None:
        self._channel, self._slots = channel, slots
        self._requests: deque[Any] = deque()

    def next_request(self) -> Any:
        """Wait for the next request; hints before it came too late and are dropped."""
        while not self._requests:
            self._sort(self._channel.receive())
        return self._requests.popleft()

    def next_hint(self) -> bytes | None:
        """The module of the next hint, or None if no hint arrives in time."""
        if not self._channel.poll(_HINT_WAIT_SECONDS):
            return None
        return self._sort(self._channel.receive())

    def _sort(self, message: Any) -> bytes | None:
        if isinstance(message, tuple) and message[0] == _HINT:
            return self._slots.read(*message[1:])
        self._requests.append(message)
        return None


@runtime_checkable
class SupportsPrefetch(Protocol):
    """An evaluator that loads hinted modules; the worker sets ``next_hint``."""

    next_hint: Callable[[], bytes | None]


_FIRST_BATCH = 16
"""Samples in the first check request of a comparison."""
_START_SECONDS = 120.0
"""Deadline for the worker's start: driver, expected outputs and first timing of the original."""
_STOP_SECONDS, _CLOSE_SECONDS = 0.2, 5.0
"""Time that a worker has to exit, after an error and at the end, before it is killed."""
_SLOT_FACTOR, _SLOT_MARGIN = 2, 4096
"""A prefetched candidate may have this many times the bytes of the original, and these more."""


class Evaluator(Protocol):
    """Evaluator in the worker process: :class:`~nostall.gpu.evaluator.engine.Engine` or a fake."""

    def info(self) -> Mapping[str, str]: ...

    def evaluate(self, cubin: bytes) -> Outcome: ...

    def check(self, cubin: bytes, first: int, count: int) -> Outcome: ...

    def compare(self, cubin: bytes, rounds: int) -> Outcome: ...


MakeEvaluator = Callable[[Kernel, MeasurementPlan, int], Evaluator]


def make_engine(kernel: Kernel, plan: MeasurementPlan, ordinal: int) -> Evaluator:
    """Create the :class:`~nostall.gpu.evaluator.engine.Engine`, in the worker process only."""
    from nostall.gpu.evaluator.engine import Engine

    return Engine(kernel, plan, ordinal)


class LocalGpu:
    """A :class:`~nostall.gpu.device.Device` on this machine, with a worker process.

    If a candidate faults or hangs, the worker is killed.  A new one starts with the next candidate
    and generates the same inputs from the seed.  A candidate that misses its deadline is evaluated
    a second time before it counts as hung, because faults of other processes on a shared GPU can
    make it pause for seconds.
    """

    def __init__(
        self,
        kernel: Kernel,
        plan: MeasurementPlan | None = None,
        ordinal: int = 0,
        make: MakeEvaluator = make_engine,
    ) -> None:
        """Start the worker.  ``make`` creates its evaluator; it must be picklable.

        Raises :class:`BadInput` if the original cannot be measured, and
        :class:`~nostall.core.errors.MissingPart` if the GPU cannot be used.
        """
        self.kernel, self.plan, self.ordinal = kernel, plan or MeasurementPlan(), ordinal
        self._make = make
        self._worker: ChildProcess | None = None
        self._awaiting = False
        """Whether the worker owes the outcome of a request."""
        self._info: Mapping[str, str] = {}
        context = multiprocessing.get_context("spawn")
        self._slots = PrefetchSlots(context, _SLOT_FACTOR * len(kernel.cubin) + _SLOT_MARGIN)
        self.restarts = -1
        self._start_worker()

    @property
    def info(self) -> Mapping[str, str]:
        return self._info

    def evaluate(self, cubin: bytes) -> Outcome:
        """As :meth:`nostall.gpu.device.Device.evaluate`."""
        return self.start(cubin).wait()

    def start(self, cubin: bytes) -> PendingOutcome:
        """As :meth:`nostall.gpu.device.AsyncDevice.start`."""
        request = ("evaluate", cubin)
        deadline = self.plan.deadline
        pending = self._send(request, deadline)

        def wait() -> Outcome:
            outcome = pending.wait()
            return outcome if outcome.status != "hang" else self._send(request, deadline).wait()

        return PendingOutcome(pending.ready, wait, self._send_hint)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        """As :meth:`nostall.gpu.device.Device.compare`.

        Checks are requested in batches of about one second, so a hang is noticed within the
        deadline however many checks there are.
        """
        self._stop_worker()
        done, batch, phase_seconds = 0, _FIRST_BATCH, Counter[str]()
        while done < checks:
            count, start = min(batch, checks - done), monotonic()
            outcome = self._send(("check", cubin, done, count), self.plan.deadline).wait()
            phase_seconds.update(outcome.phase_seconds)
            if outcome.status != "agrees":
                return replace(outcome, phase_seconds=dict(phase_seconds))
            done += count
            if monotonic() - start < min(1.0, self.plan.deadline / 8):
                batch *= 4
        deadline = self.plan.deadline * (1 + rounds / 20)
        outcome = self._send(("compare", cubin, rounds), deadline).wait()
        phase_seconds.update(outcome.phase_seconds)
        return replace(outcome, phase_seconds=dict(phase_seconds))

    def close(self) -> None:
        """End the worker process."""
        self._stop_worker(_CLOSE_SECONDS)

    def __enter__(self) -> LocalGpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_hint(self, cubin: bytes) -> None:
        hint = self._slots.write(cubin) if self.plan.prefetch else None
        if hint and self._awaiting and self._worker is not None:
            with suppress(ProcessEnded):  # reported when the outcome is awaited
                self._worker.send(hint)

    def _send(self, request: tuple[Any, ...], seconds: float) -> PendingOutcome:
        """Send a request whose outcome is due after ``seconds``."""
        if self._awaiting:
            self._stop_worker()  # the caller was interrupted; its outcome must not answer this
        worker = self._worker or self._start_worker()
        self._awaiting = True
        until = monotonic() + seconds
        try:
            worker.send(request, seconds)
        except TimeoutError:
            outcome = self._hang(seconds)
            return PendingOutcome(lambda: True, lambda: outcome)
        except ProcessEnded as error:
            outcome = self._worker_ended(error)
            return PendingOutcome(lambda: True, lambda: outcome)
        return PendingOutcome(worker.poll, lambda: self._receive(worker, until, seconds))

    def _receive(self, worker: ChildProcess, until: float, seconds: float) -> Outcome:
        try:
            answer = worker.receive(max(0.0, until - monotonic()))
        except TimeoutError:
            return self._hang(seconds)
        except ProcessEnded as error:
            return self._worker_ended(error)
        self._awaiting = False
        if isinstance(answer, Outcome):
            return answer
        self._stop_worker()
        if isinstance(answer, NostallError):  # neither this nor another candidate can be measured
            raise answer
        return Outcome("fault", detail=str(answer))

    def _hang(self, seconds: float) -> Outcome:
        self._stop_worker()
        return Outcome("hang", detail=f"no answer within {seconds:g} s")

    def _worker_ended(self, error: ProcessEnded) -> Outcome:
        code = self._stop_worker()
        return Outcome("fault", detail=f"the worker ended ({error}; exit code {code})")

    def _start_worker(self) -> ChildProcess:
        self._worker = worker = ChildProcess.spawn(
            _serve, self._slots, self._make, self.kernel, self.plan, self.ordinal
        )
        self.restarts += 1
        try:
            answer = worker.receive(_START_SECONDS)
        except TimeoutError:
            answer = "did not start in time"
        except ProcessEnded:
            answer = "ended while it started"
        if isinstance(answer, NostallError):
            self._stop_worker()
            raise answer
        if isinstance(answer, str):
            code = self._stop_worker()
            raise BadInput(
                f"the GPU worker {answer} (exit code {code}); the original kernel itself may fault "
                "with this launch specification: check shapes, bounds and grid"
            )
        self._info = answer
        return worker

    def _stop_worker(self, grace_seconds: float = _STOP_SECONDS) -> int | None:
        """End the worker, if there is one, and return its exit code."""
        self._awaiting = False
        worker, self._worker = self._worker, None
        return None if worker is None else worker.reap(grace_seconds)


def _serve(
    channel: Channel,
    slots: PrefetchSlots,
    make: MakeEvaluator,
    kernel: Kernel,
    plan: MeasurementPlan,
    ordinal: int,
) -> None:
    """Main function of the worker process: answers requests one by one.

    Any error ends the process, because a faulted CUDA context cannot be used again.
    """
    # Ctrl-C in a terminal reaches this process too; the parent decides when to end it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        evaluator = make(kernel, plan, ordinal)
        channel.send(dict(evaluator.info()))
    except NostallError as error:
        channel.send(error)
        return
    except Exception as error:  # errors of the driver or its bindings; the parent reports them
        channel.send(f"could not run the original ({error})")
        return
    messages = WorkerMessages(channel, slots)
    if isinstance(evaluator, SupportsPrefetch):
        evaluator.next_hint = messages.next_hint
    with suppress(ProcessEnded):  # the parent closed the channel or ended
        while True:
            method, *arguments = messages.next_request()
            try:
                channel.send(getattr(evaluator, method)(*arguments))
            except NostallError as error:
                channel.send(error)
                return
            except Exception as error:  # a faulting candidate can raise any error of the driver
                channel.send(f"{type(error).__name__}: {error}")
                return
