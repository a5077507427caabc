"""GPU device that runs candidates in a worker process, which may crash or hang."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, Protocol

from nostall.core.errors import BadInput, NostallError
from nostall.gpu.device import Kernel, MeasurementPlan, Outcome, PendingOutcome
from nostall.gpu.prefetch import PrefetchSlots, SupportsPrefetch, WorkerMessages

_FIRST_BATCH = 16
"""Samples in the first check request of a comparison."""
_START_SECONDS = 120.0
"""Deadline for the worker's start: driver, expected outputs and first timing of the original."""
_SLOT_MARGIN = 4096
"""Bytes by which a prefetched candidate may be larger than the original."""


class Evaluator(Protocol):
    """What the worker process runs: :class:`~nostall.gpu.engine.Engine`, or a test's fake."""

    def info(self) -> Mapping[str, str]: ...

    def evaluate(self, cubin: bytes) -> Outcome: ...

    def check(self, cubin: bytes, first: int, count: int) -> Outcome: ...

    def compare(self, cubin: bytes, rounds: int) -> Outcome: ...


MakeEvaluator = Callable[[Kernel, MeasurementPlan, int], Evaluator]


def make_engine(kernel: Kernel, plan: MeasurementPlan, ordinal: int) -> Evaluator:
    """Create the :class:`~nostall.gpu.engine.Engine`; imported in the worker process only."""
    from nostall.gpu.engine import Engine

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
        self._process: Any = None
        self._pipe: Connection | None = None
        self._awaiting = False
        """Whether the worker owes the outcome of a request."""
        self._info: Mapping[str, str] = {}
        context = multiprocessing.get_context("spawn")
        self._slots = PrefetchSlots(context, len(kernel.cubin) + _SLOT_MARGIN)
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
        if self._pipe is not None:
            with suppress(OSError):
                self._pipe.send(None)
                self._process.join(5)
        self._stop_worker()

    def __enter__(self) -> LocalGpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_hint(self, cubin: bytes) -> None:
        hint = self._slots.write(cubin) if self.plan.prefetch else None
        if hint and self._awaiting and self._pipe is not None:
            with suppress(OSError):  # a dead worker is reported when the outcome is awaited
                self._pipe.send(hint)

    def _send(self, request: tuple[Any, ...], seconds: float) -> PendingOutcome:
        """Send a request whose outcome is due after ``seconds``."""
        if self._awaiting:
            self._stop_worker()  # the caller was interrupted; its outcome must not answer this
        if self._pipe is None:
            self._start_worker()
        assert self._pipe is not None
        self._awaiting = True
        pipe, until = self._pipe, monotonic() + seconds
        try:
            pipe.send(request)
        except (EOFError, OSError) as error:
            outcome = self._worker_ended(error)
            return PendingOutcome(lambda: True, lambda: outcome)
        return PendingOutcome(pipe.poll, lambda: self._receive(pipe, until, seconds))

    def _receive(self, pipe: Connection, until: float, seconds: float) -> Outcome:
        try:
            if not pipe.poll(max(0.0, until - monotonic())):
                self._stop_worker()
                return Outcome("hang", detail=f"no answer within {seconds:g} s")
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            return self._worker_ended(error)
        self._awaiting = False
        if isinstance(answer, Outcome):
            return answer
        self._stop_worker()
        if isinstance(answer, NostallError):  # neither this nor another candidate can be measured
            raise answer
        return Outcome("fault", detail=str(answer))

    def _worker_ended(self, error: BaseException) -> Outcome:
        code = self._stop_worker()
        return Outcome("fault", detail=f"the worker ended ({error!r}, exit code {code})")

    def _start_worker(self) -> None:
        context = multiprocessing.get_context("spawn")
        own_end, worker_end = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(worker_end, self._slots, self._make, self.kernel, self.plan, self.ordinal),
            daemon=True,
        )
        self._process.start()
        worker_end.close()
        self._pipe = own_end
        self.restarts += 1
        try:
            ready = own_end.recv() if own_end.poll(_START_SECONDS) else "did not start in time"
        except (EOFError, OSError):
            ready = "ended while it started"
        if isinstance(ready, NostallError):
            self._stop_worker()
            raise ready
        if isinstance(ready, str):
            code = self._stop_worker()
            raise BadInput(
                f"the GPU worker {ready} (exit code {code}); the original kernel itself may fault "
                "with this launch specification: check shapes, bounds and grid"
            )
        self._info = ready

    def _stop_worker(self) -> int | None:
        """Kill the worker, if there is one, and return its exit code."""
        self._awaiting = False
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is None:
            return None
        if self._process.is_alive():
            self._process.join(0.2)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        code = self._process.exitcode
        self._process = None
        return None if code is None else int(code)


def _serve(
    pipe: Connection,
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
        pipe.send(dict(evaluator.info()))
    except NostallError as error:
        pipe.send(error)
        return
    except Exception as error:  # errors of the driver or its bindings; the parent reports them
        pipe.send(f"could not run the original ({error})")
        return
    messages = WorkerMessages(pipe, slots)
    if isinstance(evaluator, SupportsPrefetch):
        evaluator.next_hint = messages.next_hint
    with suppress(EOFError, OSError):  # the parent closed the pipe or ended
        while (request := messages.next_request()) is not None:
            method, *arguments = request
            try:
                pipe.send(getattr(evaluator, method)(*arguments))
            except NostallError as error:
                pipe.send(error)
                return
            except Exception as error:  # a faulting candidate can raise any error of the driver
                pipe.send(f"{type(error).__name__}: {error}")
                return
