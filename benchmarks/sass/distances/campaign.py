"""Run many tasks on worker processes: a fault or a hang ends only the worker of its task."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from benchmarks.sass.distances.search import Prober
from nostall.core.process import Channel, ChildProcess, ProcessEnded

START_SECONDS = 60.0
TASK_SECONDS = 10.0
"""Deadline of one task."""
_MAX_FAULTS = 40
"""Faults after which a worker gives up; each costs the start of a process."""

MAX_SHARE = 4
"""Largest share of a task: how many of its variations run."""

MakeProber = Callable[[], Prober]


class Task(Protocol):
    """One measurement."""

    @property
    def name(self) -> str:
        """Its name in the results."""
        ...

    def run(self, template: bytes, prober: Prober, share: int) -> dict[str, Any]:
        """Measure ``share`` of 1 to MAX_SHARE variations; returns the row of the results."""
        ...


@dataclass
class Campaign:
    """The results of tasks, and the time that they may take."""

    template: bytes
    seconds: float
    results: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    faults: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    started: float = field(default_factory=monotonic)

    @property
    def remaining(self) -> float:
        """Seconds left."""
        return self.seconds - (monotonic() - self.started)


def run_campaign(campaign: Campaign, tasks: Sequence[Task], make: MakeProber, workers: int) -> None:
    """Run ``tasks`` in their order until the time is over; results go to ``campaign``."""
    waiting: queue.SimpleQueue[tuple[int, Task]] = queue.SimpleQueue()
    for numbered in enumerate(tasks):
        waiting.put(numbered)
    threads = [
        threading.Thread(target=_serve_tasks, args=(campaign, waiting, make, len(tasks), workers))
        for _ in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve_tasks(
    campaign: Campaign,
    waiting: queue.SimpleQueue[tuple[int, Task]],
    make: MakeProber,
    total: int,
    workers: int,
) -> None:
    """Give tasks to one worker process, and start a new process after a fault or a hang."""
    worker: ChildProcess | None = None
    spent, done = 0.0, 0
    for _ in range(_MAX_FAULTS):
        try:
            worker = ChildProcess.spawn(_work, make, campaign.template)
            message = worker.receive(START_SECONDS)
            if message != "ready":
                campaign.faults.append({"task": "start", "detail": str(message)})
                return
            while campaign.remaining > 0:
                try:
                    at, task = waiting.get_nowait()
                except queue.Empty:
                    return
                since = monotonic()
                share = _share(campaign, spent, done, (total - at) / workers)
                worker.send((task, share))
                answer = _receive(worker, task, campaign)
                if answer is None:
                    break
                campaign.results.append(answer)
                spent, done = spent + (monotonic() - since) / (share + 1), done + 1
            else:
                return
        except (ProcessEnded, TimeoutError) as error:
            campaign.faults.append({"task": "start", "detail": str(error)})
        finally:
            if worker is not None:
                worker.reap(0.0)


def _receive(worker: ChildProcess, task: Task, campaign: Campaign) -> dict[str, Any] | None:
    """The row of a task; None, with a recorded fault, if the worker must be replaced."""
    try:
        answer = worker.receive(TASK_SECONDS)
    except (TimeoutError, ProcessEnded) as error:
        campaign.faults.append({"task": task.name, "detail": str(error)})
        return None
    if isinstance(answer, str):
        campaign.faults.append({"task": task.name, "detail": answer})
        return None
    summary: dict[str, Any] = answer
    return summary


def _share(campaign: Campaign, spent: float, done: int, left: float) -> int:
    """The share that each remaining task can have, judged by the time of those before."""
    if done < 3:
        return 1
    affordable = campaign.remaining / max(1.0, left) / (spent / done) - 1
    return max(1, min(MAX_SHARE, int(affordable)))


def _work(channel: Channel, make: MakeProber, template: bytes) -> None:
    """Main function of a worker: runs the tasks that it receives."""
    try:
        prober = make()
    except Exception:  # any error of the driver; the parent records it
        channel.send(traceback.format_exc())
        return
    channel.send("ready")
    while True:
        try:
            task, share = channel.receive()
        except ProcessEnded:
            return
        try:
            channel.send(task.run(template, prober, share))
        except Exception:  # a faulted CUDA context cannot be used again
            channel.send(traceback.format_exc())
            return
