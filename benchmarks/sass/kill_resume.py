"""``kill -9`` of the tuning process at random moments: does the run end as if nothing had happened?

    python -m benchmarks run sass.kill_resume --kills 60 \\
        --out benchmarks/sass/results/kill_resume.json

A search on a recorded device (measurements played back, with the time that they take) is killed at
random moments of its life and resumed until it ends; then its run directory is compared with that
of a search that was left alone: result, samples, bytes and every trial.  Needs no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import EXAMPLES
from nostall.core import LaunchSpec, Run
from nostall.gpu import Device, Outcome, RecordingDevice, ReplayedDevice, Timing
from nostall.search import loop, make
from nostall.tuning.job import Settings, describe, tune
from nostall.tuning.source import Source, load_cubin

SETTINGS = Settings(seed=3, evaluations=300, objective="gpu", rounds=12, checks=2)
CHECKPOINT_SECONDS = 0.02
"""In place of two seconds, so that a short life leaves something behind."""
PAUSE = 0.001
"""Seconds that the device takes for a candidate."""
_CHANGING = ("seconds", "fates", "spent", "faults")
"""Parts of a result that tell how it came about."""


class Synthetic:
    """A device whose times and faults follow from the candidate's bytes alone."""

    info: Mapping[str, str] = {"gpu": "synthetic"}

    def __init__(self, original: bytes) -> None:
        self.original = original

    def evaluate(self, cubin: bytes) -> Outcome:
        if cubin != self.original and self._rng(cubin).random() < 0.1:
            return Outcome("fault", detail="CUDA_ERROR_ILLEGAL_ADDRESS")
        return Outcome("timed", self._times(cubin, 5))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return Outcome("timed", self._times(cubin, rounds))

    def _times(self, cubin: bytes, rounds: int) -> Timing:
        rng = self._rng(cubin)
        factor = 1.0 if cubin == self.original else 0.9 + 0.2 * rng.random()
        original, candidate, null = 1e-5 * (1 + 1e-3 * rng.random((3, rounds)))
        return Timing(tuple(original), tuple(factor * candidate), tuple(null))

    def _rng(self, cubin: bytes) -> np.random.Generator:
        return np.random.default_rng(list(hashlib.sha256(cubin).digest()))


class Slow:
    """A device that takes its time."""

    def __init__(self, device: Device) -> None:
        self.device, self.info = device, device.info

    def evaluate(self, cubin: bytes) -> Outcome:
        time.sleep(PAUSE)
        return self.device.evaluate(cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        time.sleep(10 * PAUSE)
        return self.device.compare(cubin, rounds, checks)


def kernel() -> Source:
    """The dot product of the examples."""
    launch = LaunchSpec.from_toml(EXAMPLES / "nvcc" / "dot_product.toml")
    return load_cubin(EXAMPLES / "nvcc" / "dot_product.sm_90.cubin", None, launch)


def live(path: Path, device: Device) -> None:
    """Tune in ``path``: from the beginning, or from where an earlier life ended."""
    loop.CHECKPOINT_SECONDS = CHECKPOINT_SECONDS
    source = kernel()
    resume = (path / "run.json").exists()
    if resume:
        run = Run.open(path)
    else:
        files = {"original.cubin": source.cubin}
        run = Run.create(path, "kill_resume", describe(source, SETTINGS), files)
    with run:
        tune(source, make("anneal"), SETTINGS, run=run, device=device, resume=resume)


def _life(path: Path, recording: Path) -> None:
    live(path, Slow(ReplayedDevice(recording)))


def ending(path: Path) -> dict[str, Any]:
    """All of a finished run that may not depend on how often it was killed."""
    run = Run.open(path)
    assert run.record.status == "done" and run.record.result is not None, run.record
    result = {k: v for k, v in run.record.result.items() if k not in _CHANGING}
    trials = [(t.index, t.value, t.accepted, t.best, t.move, t.failure) for t in run.trials()]
    best = hashlib.sha256((path / "best.cubin").read_bytes()).hexdigest()
    leftovers = [p.name for p in path.iterdir() if p.name.startswith(".")]
    return {"result": result, "trials": trials, "best": best, "leftovers": leftovers}


@dataclass(frozen=True)
class Told:
    """What happened: kills by what the run directory then held, finished runs, and how many of
    those ended otherwise than the one left alone."""

    kills: dict[str, int]
    finished: int
    different: int
    evaluations: int
    improved: bool


def kill_often(kills: int, folder: Path, seed: int = 0, per_run: int = 5) -> Told:
    """Kill searches ``kills`` times in all, each at most ``per_run`` times, and let them end.

    Every other kill comes at any moment of a life; the rest soon after its first checkpoint,
    because most of a short life is spent on reading and proving, where nothing can be lost.
    """
    recording, alone = folder / "recording.json", folder / "alone"
    device = RecordingDevice(Synthetic(kernel().cubin))
    began = time.monotonic()
    live(alone, Slow(device))
    lifetime = time.monotonic() - began
    device.save(recording)
    expected, rng = ending(alone), random.Random(seed)
    nursery = multiprocessing.get_context("forkserver")
    nursery.set_forkserver_preload([__name__])
    counts: dict[str, int] = {}
    finished = different = 0
    while sum(counts.values()) < kills:
        path = folder / f"run-{finished}"
        for number in range(min(per_run, kills - sum(counts.values()))):
            late = bool(number % 2)
            seconds = rng.uniform(0, lifetime / 12 if late else lifetime)
            if not _killed(nursery, path, recording, seconds, late):
                break
            found = _stage(path)
            counts[found] = counts.get(found, 0) + 1
        _life(path, recording)
        finished += 1
        different += ending(path) != expected
    result = expected["result"]
    return Told(counts, finished, different, result["evaluations"], result["improved"])


def _killed(
    nursery: ForkServerContext, path: Path, recording: Path, seconds: float, late: bool
) -> bool:
    """Start a tuning process and kill it after ``seconds`` (``late``: counted from its first
    checkpoint); False when it ended before."""
    process = nursery.Process(target=_life, args=(path, recording))
    before = _age(path)
    process.start()
    while late and process.is_alive() and _age(path) == before:
        time.sleep(0.005)
    process.join(seconds)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a resumed run ended with exit code {process.exitcode}")
    return process.exitcode != 0


def _age(path: Path) -> float:
    """When the last checkpoint was written; 0 before there is one."""
    try:
        return (path / "checkpoint.json").stat().st_mtime
    except OSError:
        return 0.0


def _stage(path: Path) -> str:
    """How far a killed run had come."""
    if not (path / "run.json").exists():
        return "nothing written"
    if not (path / "checkpoint.json").exists():
        return "before the first checkpoint"
    checkpoint = Run.open(path).checkpoint()
    assert checkpoint is not None and SETTINGS.evaluations is not None
    within = checkpoint.evaluations < SETTINGS.evaluations
    return "during the search" if within else "during the race or the decision"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        told = kill_often(options.kills, Path(folder), options.seed)
    print(told)
    save(options.out, **vars(told))
