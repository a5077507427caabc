"""Run a list of benchmarks unattended, one after the other on each GPU, within a time limit.

A file of steps has one benchmark a line; empty lines and those that begin with ``#`` are skipped::

    # seconds  benchmark            options
    120        fusion.unseen        --set reported
    90         fusion.list_plans

``seconds`` is the limit of the step.  Each step writes ``FOLDER/BENCHMARK[-N].json``, or a folder
of this name if its benchmark writes several files; N counts the lines of a benchmark from its
second one on.  A step that ends well leaves ``.done``; the same command runs again what has none.
A step is not started if less than its limit is left.  A benchmark that needs several GPUs gets all
of them, when all steps on one GPU have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic

from benchmarks.harness.gpu_lock import LOCK_VARIABLE
from benchmarks.harness.gpu_pool import visible_gpus
from benchmarks.registry import find
from nostall.core.errors import BadInput, one_line

END_SECONDS = 10.0
"""Time that an interrupted step has to write what it measured before it is killed."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Step:
    """A benchmark to run."""

    name: str
    seconds: float
    options: tuple[str, ...]
    stem: str
    """Name of the step's files, without their ends."""
    result: str
    """Name of the file or folder that the benchmark writes."""

    @property
    def takes_all_gpus(self) -> bool:
        return find(self.name).needs.startswith("2")

    def mark(self, folder: Path) -> Path:
        """The file that says that the step ended well; it holds the last line of its output."""
        return folder / f"{self.stem}.done"


@dataclass(frozen=True)
class Lane:
    """A part of the machine on which one step runs at a time."""

    gpu: str
    """Its GPU, or several with commas between them; empty for a machine without."""
    cpus: frozenset[int]
    lock: Path
    """File by which lanes of one GPU take turns when they time."""


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    step: Step
    text: str
    seconds: float = 0.0
    gpu: str = ""


def read_steps(file: Path) -> list[Step]:
    """The steps of a file.  Raises :class:`BadInput` with the line that is wrong."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} is not readable as text: {one_line(error)}") from error
    steps: list[Step] = []
    count: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        try:
            words = shlex.split(line, comments=True)
            if not words:
                continue
            seconds, benchmark = float(words[0]), find(words[1])
        except (ValueError, IndexError):
            allowed = "SECONDS BENCHMARK [options of the benchmark]"
            raise BadInput(f"{where} is {line.strip()!r}; a step is: {allowed}") from None
        except KeyError as error:
            raise BadInput(f"{where}: {error.args[0]}") from None
        if not 0 < seconds < float("inf"):
            raise BadInput(f"{where}: the limit is {words[0]} seconds; it has to be above 0")
        name = benchmark.name
        count[name] += 1
        stem = name if count[name] == 1 else f"{name}-{count[name]}"
        writes_folder = any("." not in Path(result).name for result in benchmark.results)
        result = stem if writes_folder else f"{stem}.json"
        steps.append(Step(name, seconds, tuple(words[2:]), stem, result))
    return steps


def check_sharing(steps: Sequence[Step]) -> None:
    """Raise :class:`BadInput` for a step that must not run beside another one on its GPU.

    A benchmark may if its module has ``SHARES_GPU``: it takes turns (:mod:`.gpu_lock`) to time.
    Nothing runs beside a step that takes all GPUs.
    """
    for step in steps:
        if not step.takes_all_gpus and not getattr(find(step.name).load(), "SHARES_GPU", False):
            raise BadInput(
                f"{step.name} does not take turns on a GPU, so steps beside it would change its "
                "times; give --lanes 1, or move it to a file of its own"
            )


def make_lanes(gpus: Sequence[str], lanes: int, folder: Path) -> list[Lane]:
    """``lanes`` lanes for each GPU; the CPUs are divided evenly, in order."""
    cpus = sorted(os.sched_getaffinity(0))
    count = len(gpus) * lanes
    parts = [
        frozenset(cpus[i * len(cpus) // count : (i + 1) * len(cpus) // count]) for i in range(count)
    ]
    return [
        Lane(gpu, parts[number * lanes + lane] or frozenset(cpus), folder / f"gpu-{gpu}.lock")
        for number, gpu in enumerate(gpus)
        for lane in range(lanes)
    ]


def run_steps(
    steps: Sequence[Step], lanes: Sequence[Lane], folder: Path, seconds: float
) -> Iterator[Outcome]:
    """Run steps in order, each on the next free lane; yields outcomes as they are known.

    Steps that take all GPUs run last.  A caller that stops early (Ctrl-C) ends the running steps.
    """
    end = monotonic() + seconds
    on_one_gpu: SimpleQueue[Step] = SimpleQueue()
    on_all_gpus: SimpleQueue[Step] = SimpleQueue()
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    stop = threading.Event()
    for step in steps:
        if step.mark(folder).exists():
            outcomes.put(Outcome(step, "was done before"))
        else:
            (on_all_gpus if step.takes_all_gpus else on_one_gpu).put(step)

    def work(lane: Lane, waiting: SimpleQueue[Step]) -> None:
        # The affinity of this thread alone; the processes that it starts inherit it.
        os.sched_setaffinity(0, lane.cpus)
        with contextlib.suppress(Empty):
            while not stop.is_set():
                outcomes.put(_run_step(waiting.get_nowait(), lane, folder, end, stop))

    threads = [threading.Thread(target=work, args=(lane, on_one_gpu)) for lane in lanes]

    def work_on_all() -> None:
        for thread in threads[:-1]:
            thread.join()
        gpus = ",".join(dict.fromkeys(lane.gpu for lane in lanes))
        cpus = frozenset[int]().union(*(lane.cpus for lane in lanes))
        work(Lane(gpus, cpus, folder / "gpus.lock"), on_all_gpus)

    threads.append(threading.Thread(target=work_on_all))
    for thread in threads:
        thread.start()
    try:
        for _ in steps:
            yield outcomes.get()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _run_step(step: Step, lane: Lane, folder: Path, end: float, stop: threading.Event) -> Outcome:
    start = monotonic()
    if end - start < step.seconds:
        return Outcome(step, f"not started: less than {step.seconds:g} s are left")
    command = [sys.executable, "-m", "benchmarks", "run", step.name, *step.options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": lane.gpu, LOCK_VARIABLE: str(lane.lock)}
    log = folder / f"{step.stem}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, "--out", str(folder / step.result)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        is_over = _wait(process, start + step.seconds, stop)
    if not is_over:
        text = f"ended at its limit of {step.seconds:g} s"
    elif process.returncode:
        text = f"failed ({process.returncode}): {_last_line(log)}"
    else:
        text = _last_line(log)
        step.mark(folder).write_text(f"{text}\n")
    return Outcome(step, text, monotonic() - start, lane.gpu)


def _wait(process: subprocess.Popen[bytes], deadline: float, stop: threading.Event) -> bool:
    """Wait for a process; False if it had to be ended at the deadline or because of ``stop``."""
    while process.poll() is None and monotonic() < deadline and not stop.is_set():
        stop.wait(POLL_SECONDS)
    is_over = process.poll() is not None
    # Processes that a step leaves behind would disturb the next one.
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    return is_over


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "no output"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="steps: SECONDS BENCHMARK [options] a line")
    parser.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    parser.add_argument("--seconds", type=float, default=3600, help="limit of all steps together")
    parser.add_argument(
        "--lanes", type=int, default=1, help="steps at a time on each GPU, if they take turns"
    )


def main(options: argparse.Namespace) -> int:
    """Run the steps; returns 1 if one failed or was not finished."""
    steps = read_steps(options.file)
    if options.lanes < 1:
        raise BadInput(f"--lanes is {options.lanes}; it has to be at least 1")
    if options.lanes > 1:
        check_sharing(steps)
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus() or [""]
    lanes = make_lanes(gpus, options.lanes, options.out)
    start = monotonic()
    for outcome in run_steps(steps, lanes, options.out, options.seconds):
        place = f" on GPU {outcome.gpu}" if outcome.gpu else ""
        print(
            f"[{monotonic() - start:.0f} s] {outcome.step.stem}{place}, {outcome.seconds:.0f} s: "
            f"{outcome.text}",
            flush=True,
        )
    missing = [step.stem for step in steps if not step.mark(options.out).exists()]
    print(f"{len(steps) - len(missing)} of {len(steps)} steps are done, results in {options.out}")
    if missing:
        print(f"not done: {', '.join(missing)}; the same command runs them")
    return 1 if missing else 0
