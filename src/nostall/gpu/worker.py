"""One spawned process per GPU: whatever a candidate does, the parent survives and goes on."""

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
from nostall.gpu.device import Kernel, Outcome, Pending, Plan
from nostall.gpu.prefetch import Foreseeing, Messages, Slots

_FIRST_SHARE = 16
"""Samples that are asked for at once to begin with."""
_START = 120.0
"""Seconds that a worker may take to start: the driver, the reference outputs, the first timing."""
_LARGER = 4096
"""Bytes that a foreseen candidate may have more than the original."""


class Works(Protocol):
    """What runs in the worker; :class:`~nostall.gpu.engine.Engine`, or a test's stand-in."""

    def about(self) -> Mapping[str, str]: ...

    def evaluate(self, cubin: bytes) -> Outcome: ...

    def check(self, cubin: bytes, first: int, count: int) -> Outcome: ...

    def compare(self, cubin: bytes, rounds: int) -> Outcome: ...


Make = Callable[[Kernel, Plan, int], Works]


def engine(kernel: Kernel, plan: Plan, ordinal: int) -> Works:
    """The real thing, imported in the worker only."""
    from nostall.gpu.engine import Engine

    return Engine(kernel, plan, ordinal)


class LocalGpu:
    """A :class:`~nostall.gpu.device.Device` on this machine.

    A candidate that faults or hangs costs itself and a restart: the worker is killed and a new one
    starts with the next candidate, its inputs made anew from the same seed.  One that does not
    answer is asked once more: where others share the GPU, their faults make it pause for seconds.
    """

    def __init__(
        self, kernel: Kernel, plan: Plan | None = None, ordinal: int = 0, make: Make = engine
    ) -> None:
        self.kernel, self.plan, self.ordinal = kernel, plan or Plan(), ordinal
        self._make = make
        self._process: Any = None
        self._pipe: Connection | None = None
        self._owed = False
        self._about: Mapping[str, str] = {}
        self._slots = Slots(multiprocessing.get_context("spawn"), len(kernel.cubin) + _LARGER)
        self.restarts = -1
        self._start()

    @property
    def about(self) -> Mapping[str, str]:
        return self._about

    def evaluate(self, cubin: bytes) -> Outcome:
        return self.start(cubin).wait()

    def start(self, cubin: bytes) -> Pending:
        """As :meth:`nostall.gpu.device.Overlapping.start`."""
        question = ("evaluate", cubin)
        deadline = self.plan.deadline
        asked = self._asked(question, deadline)

        def answer() -> Outcome:
            first = asked.wait()
            return first if first.fate != "hang" else self._asked(question, deadline).wait()

        return Pending(asked.ready, answer, self._foresee)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        """As :meth:`nostall.gpu.device.Device.compare`.

        Checks go out in shares of about a second, so that a hang is noticed however many there are.
        """
        self._stop()
        done, share, spent = 0, _FIRST_SHARE, Counter[str]()
        while done < checks:
            count, began = min(share, checks - done), monotonic()
            outcome = self._asked(("check", cubin, done, count), self.plan.deadline).wait()
            spent.update(outcome.spent)
            if outcome.fate != "agrees":
                return replace(outcome, spent=dict(spent))
            done += count
            if monotonic() - began < min(1.0, self.plan.deadline / 8):
                share *= 4
        allowed = self.plan.deadline * (1 + rounds / 20)
        outcome = self._asked(("compare", cubin, rounds), allowed).wait()
        spent.update(outcome.spent)
        return replace(outcome, spent=dict(spent))

    def close(self) -> None:
        """End the worker."""
        if self._pipe is not None:
            with suppress(OSError):
                self._pipe.send(None)
                self._process.join(5)
        self._stop()

    def __enter__(self) -> LocalGpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _foresee(self, cubin: bytes) -> None:
        hint = self._slots.hint(cubin) if self.plan.ahead else None
        if hint and self._owed and self._pipe is not None:
            with suppress(OSError):  # whoever waits for the answer will hear of it
                self._pipe.send(hint)

    def _asked(self, question: tuple[Any, ...], seconds: float) -> Pending:
        """Send a question."""
        if self._owed:
            self._stop()  # whoever asked was interrupted: that answer is not for this question
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        self._owed = True
        pipe, until = self._pipe, monotonic() + seconds
        try:
            pipe.send(question)
        except (EOFError, OSError) as error:
            ended = self._ended(error)
            return Pending(lambda: True, lambda: ended)
        return Pending(pipe.poll, lambda: self._answer(pipe, until, seconds))

    def _answer(self, pipe: Connection, until: float, seconds: float) -> Outcome:
        try:
            if not pipe.poll(max(0.0, until - monotonic())):
                self._stop()
                return Outcome("hang", detail=f"no answer within {seconds:g} s")
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            return self._ended(error)
        self._owed = False
        if isinstance(answer, Outcome):
            return answer
        self._stop()
        if isinstance(answer, NostallError):  # the kernel or the machine cannot be measured at all
            raise answer
        return Outcome("fault", detail=str(answer))

    def _ended(self, error: BaseException) -> Outcome:
        code = self._stop()
        return Outcome("fault", detail=f"the worker ended ({error!r}, exit code {code})")

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, self._slots, self._make, self.kernel, self.plan, self.ordinal),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._pipe = mine
        self.restarts += 1
        try:
            ready = mine.recv() if mine.poll(_START) else "did not start in time"
        except (EOFError, OSError):
            ready = "ended while it started"
        if isinstance(ready, NostallError):
            self._stop()
            raise ready
        if isinstance(ready, str):
            code = self._stop()
            raise BadInput(
                f"the GPU worker {ready} (exit code {code}); the original kernel itself may fault "
                "with this launch specification: check shapes, bounds and grid"
            )
        self._about = ready

    def _stop(self) -> int | None:
        self._owed = False
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
    pipe: Connection, slots: Slots, make: Make, kernel: Kernel, plan: Plan, ordinal: int
) -> None:
    """The worker's main loop: one question, one answer; any error ends the process, because a
    faulted context cannot be used again."""
    # Ctrl-C in a terminal reaches this process too; the parent decides what comes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        works = make(kernel, plan, ordinal)
        pipe.send(dict(works.about()))
    except NostallError as error:
        pipe.send(error)
        return
    except Exception as error:  # the driver's own errors: the parent says it to the user
        pipe.send(f"could not run the original ({error})")
        return
    messages = Messages(pipe, slots)
    if isinstance(works, Foreseeing):
        works.foretold = messages.foreseen
    with suppress(EOFError, OSError):  # the parent is done with this worker, or gone
        while (question := messages.question()) is not None:
            verb, *arguments = question
            try:
                pipe.send(getattr(works, verb)(*arguments))
            except NostallError as error:
                pipe.send(error)
                return
            except Exception as error:  # a fault of the candidate, whatever the driver calls it
                pipe.send(f"{type(error).__name__}: {error}")
                return
