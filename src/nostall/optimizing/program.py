"""A program under watch: its process group, the orders to it and its events."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nostall.attach.program.channel import EVENTS, ORDERS
from nostall.attach.program.start import VARIABLE
from nostall.core.errors import BadInput
from nostall.optimizing.device_time import traced

SHIM = Path(__file__).resolve().parents[1] / "attach" / "start_shim"
SCRATCH = "{scratch}"
"""In a command: an empty folder, a new one at each start."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 10.0
"""After the agreed step; threads, children and ``except:`` outlive an exit."""
HIDDEN = (".", "__pycache__", "site-packages", "torchinductor_", "nostall-")
"""Beginnings of the names of folders whose files are not the program's results."""
MAX_FILES, MAX_SHOWN = 20_000, 20
Event = Mapping[str, Any]


class ProgramEnded(Exception):
    """The program ended, or stopped obeying, before an answer came."""


class TimeIsUp(Exception):
    """The time for attempts ended before an answer came."""


def program_environment(
    inherited: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, str]:
    """``inherited`` with the start-up module and its settings."""
    paths = [p for p in inherited.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(SHIM)]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([str(SHIM), *paths]),
        VARIABLE: json.dumps(settings),
    }


class Program:
    """A started program; use it as a context, which leaves no process and no folder behind."""

    def __init__(
        self, command: Sequence[str], settings: Mapping[str, Any], quiet: bool = False
    ) -> None:
        """``quiet``: its standard output goes to standard error.

        Raises :class:`BadInput` if the command cannot be run.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="nostall-"))
        self.events: list[Event] = []
        self.pid: int | None = None
        """The process whose steps count: the first one that was watched, rank 0 of several."""
        self.was_killed = self.was_interrupted = False
        """Whether nostall ended what is left of it, or interrupted it as Ctrl-C does."""
        self.hears_ctrl_c = False
        """Whether Ctrl-C reached the program, which ends in its own time then."""
        self.began = time.time()
        self.scratch = self.folder / "scratch"
        self.scratch.mkdir()
        self.command = [word.replace(SCRATCH, str(self.scratch)) for word in command]
        self.orders, self._position = 0, 0
        given = {**settings, "folder": str(self.folder), "director": os.getpid()}
        sys.stdout.flush()
        try:
            self.process = subprocess.Popen(
                self.command,
                env=program_environment(os.environ, given),
                stdout=sys.stderr.fileno() if quiet else None,
                process_group=0,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise BadInput(
                f"cannot run {command[0]!r}: {error.strerror}; write "
                "`nostall optimize -- python train.py`"
            ) from error
        self._terminal = _Terminal.lent_to(self.process.pid)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self._kill()
        if self._terminal is not None:
            self._terminal.take_back()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return next((e["world"] for e in self.events if e["event"] == "watched"), 1)

    def wait_watched(self, until: float = math.inf) -> Event:
        """The event ``watched`` of rank 0, once all ranks have one; raises ProgramEnded.

        Raises :class:`TimeIsUp` at ``until`` (of ``time.monotonic``).
        Its key ``trace`` has what the traced steps show: the file of the trace ends with the run.
        """
        for _ in self._rounds():
            watched = {e["rank"]: e for e in self.events if e["event"] == "watched"}
            if 0 in watched and len(watched) >= watched[0]["world"]:
                self.pid = watched[0]["process"]
                return {**watched[0], "trace": traced(watched[0])}
            if time.monotonic() > until:
                raise TimeIsUp
        raise AssertionError("the rounds end with an error")

    def ask(self, until: float, **order: Any) -> list[Event]:
        """Give an order and wait for its end; returns its events of rank 0.

        Failures and refusals are those of all ranks.
        Raises :class:`TimeIsUp` at ``until`` (of ``time.monotonic``), and :class:`ProgramEnded`.
        """
        number = self._send(order)
        for _ in self._rounds():
            answers = [e for e in self.events if e.get("order") == number]
            done = [e for e in answers if e["event"] == "done"]
            if {e["process"] for e in done} >= {self.pid} and len(done) >= self.world:
                own = [e for e in answers if e["process"] == self.pid]
                own[-1] = self._of_all_ranks(own[-1], done)
                return [{**e, "trace": traced(e)} if "trace_file" in e else e for e in own]
            if time.monotonic() > until:
                raise TimeIsUp
        raise AssertionError("the rounds end with an error")

    def _of_all_ranks(self, own: Event, done: Sequence[Event]) -> Event:
        """The last answer of rank 0 with what went wrong in others, whose data are others."""
        others = [e for e in done if e["process"] != self.pid]
        failures = [f for e in (own, *others) for f in e["failures"]]
        refusals = [e["refusal"] for e in others if e.get("refusal")]
        if own.get("refusal") or not refusals:
            return {**own, "failures": failures}
        return {**own, "failures": failures, "refusal": f"in another rank: {refusals[0]}"}

    def _rounds(self) -> Iterator[None]:
        """Rounds in which new events were read; :class:`ProgramEnded` ends them.

        Ctrl-C in the terminal, which the program may handle itself, is ``KeyboardInterrupt``.
        """
        while True:
            self._had_ctrl_c()
            has_ended = self.process.poll() is not None
            self._read()
            yield
            if reasons := [e["reason"] for e in self.events if e["event"] == "failed"]:
                raise ProgramEnded(f"nostall stopped inside the program: {reasons[0]}")
            if has_ended:
                raise ProgramEnded("the program ended")
            time.sleep(POLL_SECONDS)

    def _had_ctrl_c(self, exits: bool = True) -> bool:
        """Whether Ctrl-C came again; the first one raises ``KeyboardInterrupt`` if it ``exits``."""
        had = self._terminal is not None and self._terminal.had_ctrl_c() and exits
        if had and not self.hears_ctrl_c:
            self.hears_ctrl_c = True
            raise KeyboardInterrupt
        return had

    def ranks_agree(self, number: int | None = None) -> bool:
        """Whether all ranks have equal parameters after an order (default: when watched)."""
        sums = [
            e["checksum"]
            for e in self.events
            if (e["event"] == "watched" and number is None)
            or (e["event"] == "done" and number is not None and e["order"] == number)
        ]
        pairs = [pair for s in sums for pair in zip(sums[0], s, strict=True)]
        # NaN of a program that has diverged is equal on all ranks, too.
        return all(math.isclose(a, b, rel_tol=1e-6) or repr(a) == repr(b) for a, b in pairs)

    @property
    def was_ended(self) -> bool:
        """Whether the program obeyed the order to end, and did not end by itself."""
        return any(event["event"] == "ended" and event["exits"] for event in self.events)

    def end(self, *, exits: bool) -> None:
        """End the program at an agreed step, or let it run to its own end.

        If it comes to none, because it waits or because nostall compiles in it, it is interrupted
        as by Ctrl-C, with which it can still write its files.
        """
        if self.process.poll() is None:
            self._send({"do": "end", "arm": [], "exit": exits})
            self._wait(math.inf if self.hears_ctrl_c or not exits else GRACE_SECONDS, exits)
            if exits and self.process.poll() is None and not (self.was_ended or self.hears_ctrl_c):
                self.was_interrupted = True
                watched = {e["process"] for e in self.events if e["event"] == "watched"}
                for process in watched or {self.process.pid}:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGINT)
                self._wait(GRACE_SECONDS, exits)
            self.was_killed = self.process.poll() is None
            if self.was_killed or self.was_ended:  # children of its own end are the program's
                self._kill()
        self._read()

    def _wait(self, seconds: float, exits: bool) -> None:
        """Wait for the end of the program, from its last step for as long as any exit may take."""
        until = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until:
            had_ended = self.was_ended
            self._read()
            if self.was_ended and not had_ended:  # the exit itself takes time, too
                until = time.monotonic() + GRACE_SECONDS
            if self._had_ctrl_c(exits):
                break
            time.sleep(POLL_SECONDS)
        self._read()

    @property
    def exit_code(self) -> int:
        """The program's exit code, 128 + N after signal N; 0 if nostall ended it."""
        code = self.process.poll()
        if code is None or self.was_ended or self.was_killed or self.was_interrupted:
            return 0
        return code if code >= 0 else 128 - code

    def _send(self, order: Mapping[str, Any]) -> int:
        self.orders += 1
        text = json.dumps({"number": self.orders, "agree": self.world > 1, **order})
        partial = self.folder / "partial"
        partial.write_text(text)
        partial.replace(self.folder / ORDERS)
        return self.orders

    def _read(self) -> None:
        """Read the events that were appended; the last line can be incomplete."""
        path = self.folder / EVENTS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        self.events += [json.loads(line) for line in whole.splitlines()]

    def _kill(self) -> None:
        """End what is left of the process group."""
        if self._terminal is not None:
            self._terminal.forget_ctrl_c()  # its process is one of the group
        for number, pause in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):
            try:
                os.killpg(self.process.pid, number)
            except (ProcessLookupError, PermissionError):
                break
            until = time.monotonic() + pause
            while time.monotonic() < until and _group_lives(self.process):
                time.sleep(POLL_SECONDS)
        self.process.wait()


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # a zombie would count as alive
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class _Terminal:
    """The terminal while it is that of the program's process group, so that this can read.

    Its keys then go to that group alone.  A process in it that does nothing shows them.
    """

    def __init__(self, file: int, group: int) -> None:
        self.file, self.group = file, group
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(file, group)
        self._listen()

    @classmethod
    def lent_to(cls, group: int) -> _Terminal | None:
        """The terminal of this process as that of ``group``; None without one."""
        with suppress(OSError, ValueError):
            file = sys.stdin.fileno()
            if os.isatty(file) and os.tcgetpgrp(file) == os.getpgrp():
                return cls(file, group)
        return None

    def _listen(self) -> None:
        self._listener: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # the group has ended
            self._listener = subprocess.Popen(
                ["cat"], process_group=self.group, stdin=subprocess.PIPE,  # ends with this process
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip

    def had_ctrl_c(self) -> bool:
        """Whether Ctrl-C came since the last call; after Ctrl-Z, waits for ``fg``."""
        if self._listener is None:
            return False
        with suppress(ChildProcessError):  # it has ended
            if os.waitid(os.P_PID, self._listener.pid, os.WSTOPPED | os.WNOHANG):
                self._stop()
        if self._listener.poll() is None:
            return False
        is_interrupt = self._listener.returncode == -signal.SIGINT
        self.forget_ctrl_c()
        self._listen()
        return is_interrupt

    def _stop(self) -> None:
        """Stop as the program did, and go on with it."""
        os.tcsetpgrp(self.file, os.getpgrp())
        os.killpg(os.getpgrp(), signal.SIGTSTP)  # goes on here after `fg` or `bg`
        if os.tcgetpgrp(self.file) == os.getpgrp():
            os.tcsetpgrp(self.file, self.group)
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGCONT)

    def forget_ctrl_c(self) -> None:
        """End the process that shows keys."""
        if self._listener is not None:
            self._listener.kill()
            self._listener.communicate()
            self._listener = None

    def take_back(self) -> None:
        """The terminal is that of this process again."""
        self.forget_ctrl_c()
        with suppress(OSError):
            os.tcsetpgrp(self.file, os.getpgrp())


def written_files(program: Program, own: Path | None = None) -> list[str]:
    """Files that were written since the program's start.

    Those below the working directory and below folders in its command; hidden folders, byte code,
    files in ``own`` and the file that gets all output are left out; at most :data:`MAX_SHOWN` of
    :data:`MAX_FILES`.
    """
    outputs = []
    for stream in (1, 2):
        with suppress(OSError):  # closed
            outputs.append(os.fstat(stream))

    def is_written(path: Path) -> bool:
        with suppress(OSError):  # gone meanwhile, or a link to nothing
            status = path.stat()
            is_output = any(os.path.samestat(status, output) for output in outputs)
            return status.st_mtime >= program.began and not is_output
        return False

    left_out = None if own is None else own.resolve()
    found: set[str] = set()
    count = 0
    given = {path for path in map(Path, program.command) if path.is_dir()}
    for folder in {Path.cwd(), *given} - {program.scratch}:
        for place, inner, names in os.walk(folder):
            if Path(place) != folder and Path(place).resolve() == left_out:
                names = []
            inner[:] = [name for name in inner if not name.startswith(HIDDEN)]
            paths = [Path(place) / name for name in names[: max(0, MAX_FILES - count)]]
            count += len(paths)
            found.update(str(path) for path in paths if is_written(path))
    return sorted(found)[:MAX_SHOWN]
