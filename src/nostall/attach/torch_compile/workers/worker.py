"""Processes that work for the program while the program runs.

PyTorch's tracing sets flags that all threads see, so no thread of the program can have Inductor
compile behind its back; another process can (:mod:`nostall.attach.torch_compile.workers.compile_job`).  Threads that
write kernels would take Python's lock from the program; another process does not
(:mod:`nostall.attach.torch_compile.workers.codegen_job`).  Each is started when there will be something to do for it,
takes memory of a GPU when there is, and is ended when all graphs have chosen, or there has been
nothing to do for a while.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from nostall.attach.torch_compile.workers.cpu_time import COMPILERS, ENDED, tree
from nostall.attach.torch_compile.workers.tasks import at_end
from nostall.attach.torch_compile.workers.torch_state import Unsent

LEAST_MEMORY = 2 << 30
"""Bytes of a GPU that are free, or no other process is let onto it."""
MOST_BYTES = 64 << 20
"""Of a graph with all that it holds."""
PATIENCE_S = 600.0
"""For one answer."""

PROGRAM = "import torch; from nostall.attach.torch_compile.workers.worker_main import main; main()"


T = TypeVar("T")
Done = TypeVar("Done", covariant=True)


class Asked(Protocol[Done]):
    """An errand: whatever :meth:`fulfil`, in the other process, makes of what is :meth:`written`
    here."""

    def written(self) -> bytes:
        """Raises :class:`Unsent`."""
        ...

    @staticmethod
    def fulfil(text: bytes) -> Done:
        """Whatever it raises, who asked is told."""
        ...


@dataclass
class Answer(Generic[T]):
    """``failure`` says what went wrong, and ``done`` is None, if something did; ``cpu_seconds``
    what it took."""

    failure: str = ""
    done: T | None = None
    cpu_seconds: float = 0.0


class Helper:
    """A process, on the program's GPU or on none.  Whoever asks waits for the answer; one at a
    time.  ``needs``: a module that it imports before it is asked.  ``most``: of such processes that
    there may be on that GPU by then; they share the processors for compilers."""

    def __init__(self, needs: str, *, on_gpu: bool = True, most: int = 1) -> None:
        self._needs, self._on_gpu, self._most = needs, on_gpu, most
        self._closed = False
        self._new()

    def _new(self) -> None:
        self._told = self._untold = 0.0
        self._placed = False
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def forget(self) -> None:
        """In a process that was forked: the helper is its parent's."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.returncode = 0  # or it is said to be running still
        self._new()

    @property
    def running(self) -> bool:
        with ENDED.apart():  # answers have said what it took, but for what it was amid
            return self._process is not None and self._process.poll() is None

    @property
    def begun(self) -> bool:
        """Whether it runs, and may use what :meth:`begin` lets it use."""
        return self._placed and self.running

    def start(self) -> None:
        """Start the process, if there is none; it takes seconds to import what it needs, and
        nothing of a GPU.  Nobody waits, and where it cannot be started the first errand says why.
        """
        if not self._turn.acquire(blocking=False):
            return  # whoever asks it something has started it
        try:
            with contextlib.suppress(Exception):
                self._started()
        finally:
            self._turn.release()

    def begin(self) -> None:
        """Let the process, which is started if there is none, onto the program's GPU, for what it
        is asked then; it takes a second or more to be ready.  Where that fails the first errand
        says why."""
        with self._turn, contextlib.suppress(Exception):
            self._begun()

    def do(self, errand: Asked[T]) -> Answer[T]:
        """What became of it; a failure costs time only."""
        try:
            text = errand.written()
            if len(text) > MOST_BYTES:
                raise Unsent(f"a graph takes {len(text) >> 20} MB; at most {MOST_BYTES >> 20}")
            with self._turn:
                return self._asked(pickle.dumps((errand.fulfil, text)))
        except Exception as error:  # the program compiles it, as it would without a helper
            return Answer(f"{type(error).__name__}: {error}")

    def _asked(self, text: bytes) -> Answer[Any]:
        connection = self._begun()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.end()

        timer = threading.Timer(PATIENCE_S, give_up)
        timer.daemon = True
        timer.start()
        try:
            with _unharmed():
                connection.send_bytes(text)
            answer: Answer[Any] = pickle.loads(connection.recv_bytes())
            self._told += answer.cpu_seconds
        except BaseException as error:
            self._close()
            if late.is_set():
                raise TimeoutError(f"no answer within {PATIENCE_S:.0f} s") from error
            raise
        finally:
            timer.cancel()
        return answer

    def end(self) -> None:
        """End the process, whatever it does; the next errand starts another one."""
        process = self._process
        if process is None:
            return
        with ENDED.apart():
            if process.poll() is None:
                self._untold += max(0.0, tree(process.pid) - self._told)
            process.kill()  # who waits for it is told by the closed connection
            process.wait()

    def untold(self) -> float:
        """Processor time of processes that were ended amid something or before they were asked, of
        which no answer has told; each second once."""
        found, self._untold = self._untold, 0.0
        return found

    def close(self) -> None:
        """End it for good: the program ends."""
        self._closed = True
        self.end()

    def _begun(self) -> Connection:
        connection = self._connection
        if self.begun and connection is not None:
            return connection
        used = self._on_gpu and torch.cuda.is_initialized()
        gpu = torch.cuda.current_device() if used else -1
        _room(gpu, self._most)
        connection = self._started()
        with _unharmed():
            connection.send_bytes(str(gpu).encode())
        self._placed = True
        return connection

    def _started(self) -> Connection:
        self._still_open()
        if self.running and self._connection is not None:
            return self._connection
        self._close()
        mine, other = Pipe()
        command = [sys.executable, "-P", "-W", "ignore", "-c", PROGRAM]
        with other:
            self._process = subprocess.Popen(
                [*command, str(other.fileno()), self._needs],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
                    "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, COMPILERS // self._most)),
                },
            )
        self._connection, self._told, self._placed = mine, 0.0, False
        try:
            self._still_open()
        except Unsent:
            self._close()
            raise
        return mine

    def _still_open(self) -> None:
        if self._closed:
            raise Unsent("the program ends")

    def _close(self) -> None:
        self.end()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


_INDUCTOR, _WRITER = (
    "torch._inductor.compile_fx",
    "nostall.attach.torch_compile.workers.codegen_job",
)
HELPERS = tuple(Helper(_INDUCTOR, most=most) for most in (1, 2, 3))
HELPER, WRITER = HELPERS[0], Helper(_WRITER, on_gpu=False)
"""Who has Inductor compile, alone or with others; who explores regions and has their kernels
compiled."""
_EVERY = *HELPERS, WRITER
for _one in _EVERY:
    at_end(_one.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_one.forget)


def end() -> float:
    """Nothing more is to be done, for now: seconds of processors that nobody was told of."""
    for one in _EVERY:
        one.end()
    return sum(one.untold() for one in _EVERY)


def _room(gpu: int, processes: int) -> None:
    """Raises :class:`Unsent` where the GPU has no room for so many: those that begin at the same
    time have taken nothing yet."""
    if gpu < 0:
        return
    (free, _), least = torch.cuda.mem_get_info(gpu), processes * LEAST_MEMORY
    if free < least:
        raise Unsent(f"{free >> 20} MB of the GPU are free; at least {least >> 20}")


@contextlib.contextmanager
def _unharmed() -> Iterator[None]:
    """Writing to a process that is gone ends a program that has asked for that (``SIGPIPE``)."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        yield
    finally:
        if signal.SIGPIPE not in before:
            while signal.sigtimedwait([signal.SIGPIPE], 0) is not None:
                pass
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])


def said(error: BaseException) -> str:
    """In one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"
