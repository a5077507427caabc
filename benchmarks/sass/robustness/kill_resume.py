"""Kill tuning processes with SIGKILL at random moments and check that resumed runs end equally.

    python -m benchmarks run sass.kill_resume --kills 60 \\
        --out benchmarks/sass/results/kill_resume.json

A search on a replayed device (recorded measurements, with their durations) is killed at random
moments and resumed until it ends. Its run directory is then compared with that of a search that was
never killed: result, samples, bytes and all trials. Needs no GPU.
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
from tests.unit.gpu.replayed_device import RecordingDevice, ReplayedDevice

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import EXAMPLES
from nostall.core import LaunchSpec, Run
from nostall.gpu import Device, Outcome, Timing
from nostall.search import loop, make
from nostall.tuning.job import describe, tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source, load_cubin

SETTINGS = Settings(seed=3, evaluations=300, objective="gpu", rounds=12, checks=2)
CHECKPOINT_SECONDS = 0.02
"""Replaces the default of two seconds, so that short runs write checkpoints, too."""
EVALUATION_SECONDS = 0.001
"""Duration of one evaluation on the slowed device."""
_VOLATILE_KEYS = ("seconds", "fates", "spent", "faults")
"""Keys of a result that may differ between a killed and an undisturbed run."""


class Synthetic:
    """A fake device: times and faults are a function of the candidate's bytes."""

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
    """A device that sleeps before each call of the wrapped device."""

    def __init__(self, device: Device) -> None:
        self.device, self.info = device, device.info

    def evaluate(self, cubin: bytes) -> Outcome:
        time.sleep(EVALUATION_SECONDS)
        return self.device.evaluate(cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        time.sleep(10 * EVALUATION_SECONDS)
        return self.device.compare(cubin, rounds, checks)


def kernel() -> Source:
    """Source of the example kernel ``dot_product``."""
    launch = LaunchSpec.from_toml(EXAMPLES / "nvcc" / "dot_product.toml")
    return load_cubin(EXAMPLES / "nvcc" / "dot_product.sm_90.cubin", None, launch)


def tune_in(path: Path, device: Device) -> None:
    """Tune with run directory ``path``; resumes a run that was killed."""
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


def _tune_replayed(path: Path, recording: Path) -> None:
    """Main function of a tuning process."""
    tune_in(path, Slow(ReplayedDevice(recording)))


def final_state(path: Path) -> dict[str, Any]:
    """Contents of a finished run that must not depend on kills."""
    run = Run.open(path)
    assert run.record.status == "done" and run.record.result is not None, run.record
    result = {k: v for k, v in run.record.result.items() if k not in _VOLATILE_KEYS}
    trials = [(t.index, t.value, t.accepted, t.best, t.move, t.failure) for t in run.trials()]
    best = hashlib.sha256((path / "best.cubin").read_bytes()).hexdigest()
    leftovers = [p.name for p in path.iterdir() if p.name.startswith(".")]
    return {"result": result, "trials": trials, "best": best, "leftovers": leftovers}


@dataclass(frozen=True)
class KillCounts:
    """Kills and results of the experiment; the fields are the keys of the result file."""

    kills: dict[str, int]
    """Kills by progress of the killed run."""
    finished: int
    """Runs that finished after their kills."""
    different: int
    """Finished runs that differ from the undisturbed run."""
    evaluations: int
    improved: bool


def kill_often(kills: int, folder: Path, seed: int = 0, per_run: int = 5) -> KillCounts:
    """Kill searches ``kills`` times in all, each at most ``per_run`` times, and let them end.

    Half of the kills come at any moment of a process, the other half soon after its first
    checkpoint, because a short process spends most of its time on parsing and verifying, when there
    is no state to lose.
    """
    recording, undisturbed = folder / "recording.json", folder / "alone"
    device = RecordingDevice(Synthetic(kernel().cubin))
    began = time.monotonic()
    tune_in(undisturbed, Slow(device))
    lifetime = time.monotonic() - began
    device.save(recording)
    expected, rng = final_state(undisturbed), random.Random(seed)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    counts: dict[str, int] = {}
    finished = different = 0
    while sum(counts.values()) < kills:
        path = folder / f"run-{finished}"
        for number in range(min(per_run, kills - sum(counts.values()))):
            late = bool(number % 2)
            seconds = rng.uniform(0, lifetime / 12 if late else lifetime)
            if not _start_and_kill(server, path, recording, seconds, late):
                break
            progress = _progress(path)
            counts[progress] = counts.get(progress, 0) + 1
        _tune_replayed(path, recording)
        finished += 1
        different += final_state(path) != expected
    search = expected["result"]
    return KillCounts(counts, finished, different, search["evaluations"], search["improved"])


def _start_and_kill(
    server: ForkServerContext, path: Path, recording: Path, seconds: float, late: bool
) -> bool:
    """Start a tuning process and kill it after ``seconds``; False if it ended before.

    With ``late``, the seconds count from the first checkpoint of the process.
    """
    process = server.Process(target=_tune_replayed, args=(path, recording))
    before = _checkpoint_time(path)
    process.start()
    while late and process.is_alive() and _checkpoint_time(path) == before:
        time.sleep(0.005)
    process.join(seconds)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a resumed run ended with exit code {process.exitcode}")
    return process.exitcode != 0


def _checkpoint_time(path: Path) -> float:
    """Modification time of the checkpoint; 0 if there is none."""
    try:
        return (path / "checkpoint.json").stat().st_mtime
    except OSError:
        return 0.0


def _progress(path: Path) -> str:
    """Progress of a killed run, read from its directory."""
    if not (path / "run.json").exists():
        return "nothing written"
    if not (path / "checkpoint.json").exists():
        return "before the first checkpoint"
    checkpoint = Run.open(path).checkpoint()
    assert checkpoint is not None and SETTINGS.evaluations is not None
    is_searching = checkpoint.evaluations < SETTINGS.evaluations
    return "during the search" if is_searching else "during the race or the decision"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        result = kill_often(options.kills, Path(folder), options.seed)
    print(result)
    save(options.out, **vars(result))
