"""Measure many pairs on worker processes: a fault or a hang ends only the worker of its pair."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from benchmarks.sass.distances.pairs import Pair
from benchmarks.sass.distances.search import ALIGNMENTS, Prober, measure
from nostall.core.process import Channel, ChildProcess, ProcessEnded

START_SECONDS = 60.0
PAIR_SECONDS = 10.0
"""Deadline of one pair."""
_MAX_FAULTS = 40
"""Faults after which a worker gives up; each costs the start of a process."""

MakeProber = Callable[[], Prober]


@dataclass
class Campaign:
    """Pairs to measure, and what has been found."""

    template: bytes
    tops: dict[str, int]
    """Name of a pair -> largest distance of its first run."""
    seconds: float
    results: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    faults: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    started: float = field(default_factory=monotonic)

    @property
    def remaining(self) -> float:
        """Seconds left."""
        return self.seconds - (monotonic() - self.started)


def run_campaign(
    campaign: Campaign, pairs: Sequence[Pair], make: MakeProber, workers: int
) -> None:
    """Measure ``pairs`` in their order until the time is over; results go to ``campaign``."""
    tasks: queue.SimpleQueue[tuple[int, Pair]] = queue.SimpleQueue()
    for task in enumerate(pairs):
        tasks.put(task)
    threads = [
        threading.Thread(target=_serve_tasks, args=(campaign, tasks, make, len(pairs), workers))
        for _ in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve_tasks(
    campaign: Campaign,
    tasks: queue.SimpleQueue[tuple[int, Pair]],
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
                campaign.faults.append({"pair": "start", "detail": str(message)})
                return
            while campaign.remaining > 0:
                try:
                    at, pair = tasks.get_nowait()
                except queue.Empty:
                    return
                since = monotonic()
                count = _alignment_count(campaign, spent, done, (total - at) / workers)
                order = ALIGNMENTS[at % 4 :] + ALIGNMENTS[: at % 4]
                worker.send((pair, campaign.tops[pair.name], order[:count]))
                answer = _receive(worker, pair, campaign)
                if answer is None:
                    break
                campaign.results.append(answer)
                spent, done = spent + (monotonic() - since) / (count + 1), done + 1
            else:
                return
        except (ProcessEnded, TimeoutError) as error:
            campaign.faults.append({"pair": "start", "detail": str(error)})
        finally:
            if worker is not None:
                worker.reap(0.0)


def _receive(worker: ChildProcess, pair: Pair, campaign: Campaign) -> dict[str, Any] | None:
    """The summary of a pair; None, with a recorded fault, if the worker must be replaced."""
    try:
        answer = worker.receive(PAIR_SECONDS)
    except (TimeoutError, ProcessEnded) as error:
        campaign.faults.append({"pair": pair.name, "detail": str(error)})
        return None
    if isinstance(answer, str):
        campaign.faults.append({"pair": pair.name, "detail": answer})
        return None
    summary: dict[str, Any] = answer
    return summary


def _alignment_count(campaign: Campaign, spent: float, done: int, left: float) -> int:
    """How many alignments each remaining pair can have, judged by the time of those before."""
    if done < 3:
        return 1
    affordable = campaign.remaining / max(1.0, left) / (spent / done) - 1
    return max(1, min(len(ALIGNMENTS), int(affordable)))


def _work(channel: Channel, make: MakeProber, template: bytes) -> None:
    """Main function of a worker: measures the pairs that it receives."""
    try:
        prober = make()
    except Exception:  # any error of the driver; the parent records it
        channel.send(traceback.format_exc())
        return
    channel.send("ready")
    while True:
        try:
            pair, top, alignments = channel.receive()
        except ProcessEnded:
            return
        try:
            channel.send(measure(pair, top, template, prober, alignments).as_json())
        except Exception:  # a faulted CUDA context cannot be used again
            channel.send(traceback.format_exc())
            return
