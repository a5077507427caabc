"""Time several programs that run at once: all but one are stopped, and they take turns.

A program prints a line ``step N ...`` every few steps.  Its processes are stopped by SIGSTOP while
another program runs, so that start and compilation are waited for once.
"""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

LINE = re.compile(r"step (\d+)\b")
_PATHS = re.compile(r"(?<![\w.])/[\w./-]+")
WARM_LINES = 4
"""Lines before a program counts as started; and again alone, before it is timed."""
BLOCK_SECONDS = 0.5
DRAIN_SECONDS = 0.03
"""For work that a stopped process has left on the device."""


class Line(NamedTuple):
    """A line of a program."""

    seconds: float
    step: int


class ProgramFailed(Exception):
    """A program ended or printed no line in time."""


class Runner:
    """A program in its own process group, and the times of its lines."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.log, self.lines = log, queue.Queue[Line | None]()
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=self._log, process_group=0
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.began = time.perf_counter()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            now = time.perf_counter()
            if match := LINE.match(raw.decode(errors="replace")):
                self.lines.put(Line(now, int(match[1])))
        self.lines.put(None)

    def next_line(self, until: float) -> Line:
        """The next line; raises :class:`ProgramFailed` at ``until`` or at the program's end."""
        try:
            line = self.lines.get(timeout=max(0.01, until - time.perf_counter()))
        except queue.Empty:
            raise ProgramFailed("printed no line in time") from None
        if line is None:
            self.process.wait()
            tail = self.log.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
            message = _PATHS.sub("...", tail[0])[:300]
            raise ProgramFailed(f"ended with {self.process.returncode}: {message}")
        return line

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the program."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End all processes of the program."""
        self.send(signal.SIGKILL)
        self.process.wait()
        self._reader.join(timeout=5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


class Turns:
    """Programs that are started beside each other and stopped once they have started."""

    def __init__(
        self, variables: Mapping[str, str], folder: Path, until: float, reserve: float = 0.0
    ) -> None:
        """``until``: of ``time.perf_counter``; ``reserve``: seconds before it, for the turns.

        A program that has not started by then takes no turns.
        """
        self.variables, self.folder, self.until = variables, folder, until
        self.start_until = until - reserve
        self.failures: dict[str, str] = {}
        self.starts: dict[str, float] = {}
        """Seconds until a program had printed some lines."""
        self._runners: dict[str, Runner] = {}
        self._threads: list[threading.Thread] = []
        self._starting: set[str] = set()
        self._is_held = False
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Stop the programs that start."""
        with self._lock:
            self._is_held = True
            for name in self._starting:
                self._runners[name].send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the programs go on that were starting."""
        with self._lock:
            self._is_held = False
            for name in self._starting:
                self._runners[name].send(signal.SIGCONT)

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        for runner in self._runners.values():
            runner.end()

    def add(self, name: str, command: Sequence[str], **changes: str) -> None:
        """Start a program; it is stopped when it has printed some lines.

        ``changes``: of its environment variables.
        """
        log = self.folder / f"{name.replace(' ', '-')}.log"
        self._runners[name] = runner = Runner(command, {**self.variables, **changes}, log)
        with self._lock:
            self._starting.add(name)
            if self._is_held:
                runner.send(signal.SIGSTOP)
        thread = threading.Thread(target=self._start, args=(name, runner), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _start(self, name: str, runner: Runner) -> None:
        try:
            for _ in range(WARM_LINES):
                line = runner.next_line(self.start_until)
            self.starts[name] = line.seconds - runner.began
        except ProgramFailed as error:
            self.failures[name] = str(error)
        with self._lock:
            self._starting.discard(name)
            runner.send(signal.SIGSTOP)

    def wait_started(self) -> None:
        """Wait until each program has started, or has failed to."""
        for thread in self._threads:
            thread.join()

    def samples(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of a step of each program, one sample a round; rounds belong together."""
        self.wait_started()
        running = {n: r for n, r in self._runners.items() if n not in self.failures}
        return _blocks(running, rounds, self.until, self.failures)


def _blocks(
    runners: Mapping[str, Runner], rounds: int, until: float, failures: dict[str, str]
) -> dict[str, list[float]]:
    """One block of each program a round, in random order; incomplete rounds are left out.

    ``failures``: programs that end before the first round are added.
    """
    lines: dict[str, int] = {}
    for name, runner in runners.items():
        try:
            times = _alone(runner, WARM_LINES, until)
        except ProgramFailed as error:
            failures[name] = str(error)
            runner.send(signal.SIGSTOP)
            continue
        lines[name] = max(1, min(100, round(BLOCK_SECONDS / median(times))))
    draw, samples = random.Random(0), {name: list[float]() for name in lines}
    for _ in range(rounds):
        order = list(lines)
        draw.shuffle(order)
        try:
            found = {name: _block(runners[name], lines[name], until) for name in order}
        except ProgramFailed:
            break
        for name, seconds in found.items():
            samples[name].append(seconds)
    return samples


def _alone(runner: Runner, count: int, until: float) -> list[float]:
    """Seconds between lines while only this program runs."""
    _resume(runner)
    times = [runner.next_line(until).seconds for _ in range(count + 1)]
    _pause(runner)
    return [b - a for a, b in pairwise(times)]


def _block(runner: Runner, lines: int, until: float) -> float:
    """Seconds of a step; the line in which the program was resumed is not measured."""
    _resume(runner)
    first = runner.next_line(until)
    for _ in range(lines):
        last = runner.next_line(until)
    _pause(runner)
    return (last.seconds - first.seconds) / (last.step - first.step)


def _resume(runner: Runner) -> None:
    while not runner.lines.empty():  # printed between the last block and the stop
        if runner.lines.get() is None:
            raise ProgramFailed("ended")
    runner.send(signal.SIGCONT)


def _pause(runner: Runner) -> None:
    runner.send(signal.SIGSTOP)
    time.sleep(DRAIN_SECONDS)
