"""Predicted and measured iteration times of pipeline plans, on 2 or 4 GPUs of one host.

    NCCL_NVLS_ENABLE=0 python -m benchmarks run parallel.predicted_vs_measured --gpus 2 \\
        --out OUT.json
    python -m benchmarks run parallel.predicted_vs_measured --gpus 4 --links slow --seconds 240 \\
        --out OUT.json
    python -m benchmarks run parallel.predicted_vs_measured --device cpu --tiny --out OUT.json

First the links and the layers are measured.  Then plans of several planners and orders are made,
also for emulated slow links, and each plan runs for a few iterations.  The ranks are one process
group, which is restarted if a point fails or exceeds its deadline.  Predictions do not use the
measured times of the plans.

Points that OUT.json already has are not run again and keep their session.  The file is written
after each point, so a stopped run can be continued.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmarks.parallel.gpu.plans import Point, make_points, slow_cluster
from benchmarks.parallel.gpu.results import Results
from benchmarks.parallel.gpu.summary import NO_TIME, print_summary
from nostall.core.files.atomic import write_atomically
from nostall.parallel.cluster import parse_cluster
from nostall.parallel.profile import load_profile

SET_UP_S, POINT_S, FIRST_POINT_S = 150.0, 45.0, 60.0
"""Deadlines in seconds."""
STACKS_S = 2.0
"""Seconds in which the ranks print their stacks before they are killed."""


@dataclass(frozen=True)
class Options:
    """Options that the ranks need."""

    gpus: int
    device: str
    tiny: bool
    steps: int
    slow_gbytes: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--slow-gbytes", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=330.0, help="no point begins later")
    parser.add_argument("--links", choices=["fast", "slow", "both"], default="both")
    parser.add_argument("--out", type=Path, required=True)


def main(given: argparse.Namespace) -> None:
    began = monotonic()
    options = Options(given.gpus, given.device, given.tiny, given.steps, given.slow_gbytes)
    results = Results.load(given.out, options)
    folder = Path(tempfile.mkdtemp(prefix="nostall-parallel-gpu-"))
    ranks = Ranks(options, folder)
    ranks.start()
    ranks.wait_for(folder / "measured", SET_UP_S)
    fast = (folder / "cluster.toml").read_text()
    profiles = {p.stem: load_profile(p) for p in sorted((folder / "profiles").glob("*.json"))}
    clusters = {"fast": fast, "slow": slow_cluster(fast, options.slow_gbytes)}
    if given.links != "both":
        clusters = {given.links: clusters[given.links]}
    parsed = {k: parse_cluster(v, k) for k, v in clusters.items()}
    points = make_points(profiles, parsed, folder, results.done)
    print(f"{len(points)} points, {monotonic() - began:.0f} s so far", flush=True)
    results.begin(json.loads((folder / "about.json").read_text()), fast, profiles)
    _run_points(ranks, points, folder, began + given.seconds, results)
    print_summary(results.records, results.summary)
    print(f"{given.out}, {monotonic() - began:.0f} s")


def _run_points(
    ranks: Ranks, points: list[Point], folder: Path, until: float, results: Results
) -> None:
    """Run the points in order; a failed point is recorded with its error."""
    deadline = FIRST_POINT_S
    for number, point in enumerate(points):
        record: dict[str, Any] = asdict(point)
        if monotonic() > until:
            results.add({**record, "error": NO_TIME})
            continue
        if not ranks.are_running:
            ranks.start()
            deadline = FIRST_POINT_S
        request = {"number": number, "point": asdict(point)}
        write_atomically(folder / "next.json", json.dumps(request).encode())
        try:
            ranks.wait_for(folder / f"ran-{number}.json", deadline)
            record |= json.loads((folder / f"ran-{number}.json").read_text())
        except RuntimeError as error:
            record["error"] = str(error)
            ranks.stop()
        deadline = POINT_S
        results.add(record)
        print(_line(record), flush=True)
    write_atomically(folder / "next.json", json.dumps({"number": -1}).encode())
    ranks.stop(grace=5)


def _line(record: dict[str, Any]) -> str:
    name = f"{record['model']:6}{record['links']:5} {record['name']:28}{record['split']:9}"
    if "error" in record:
        return f"{name} {record['error']}"
    return f"{name} predicted {record['predicted_s']:.4f}  measured {record['measured_s']:.4f}"


class Ranks:
    """The rank processes, one per GPU."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def are_running(self) -> bool:
        return bool(self.processes) and all(p.poll() is None for p in self.processes)

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (self.folder / "next.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.parallel.gpu.rank", str(self.folder)]
        for rank in range(self.options.gpus):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.options.gpus,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NCCL_NVLS_ENABLE": 0,
                "CUDA_DEVICE_MAX_CONNECTIONS": 32,
                "NOSTALL_OPTIONS": json.dumps(asdict(self.options)),
            }
            log = open(self.folder / f"rank-{rank}.log", "ab")  # noqa: SIM115 - the child process uses it
            environment = {**os.environ, **{k: str(v) for k, v in variables.items()}}
            self.processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
            log.close()

    def wait_for(self, path: Path, seconds: float) -> None:
        """Return when ``path`` exists.  Raises RuntimeError if a rank exits or the time is up."""
        until = monotonic() + seconds
        while not path.exists():
            exited = [r for r, p in enumerate(self.processes) if p.poll() is not None]
            if exited or monotonic() > until:
                reason = f"rank {exited[0]} ended" if exited else f"not done in {seconds:.0f} s"
                self._print_stacks()
                ranks = exited or range(len(self.processes))
                positions = (self._last_output(rank) for rank in ranks)
                raise RuntimeError(f"{reason}: {'; '.join(positions)}")
            sleep(0.02)

    def _print_stacks(self) -> None:
        """Let each running rank print its stack (SIGUSR1), to explain a deadlock."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        sleep(STACKS_S)

    def _last_output(self, rank: int) -> str:
        """The last stack of a rank, innermost call first, or its last lines of output."""
        lines = (self.folder / f"rank-{rank}.log").read_text(errors="replace").splitlines()
        stacks = [i for i, line in enumerate(lines) if "most recent call first" in line]
        last_lines = lines[stacks[-1] + 1 :][:6] if stacks else lines[-3:]
        shortened = (line.strip().replace(f"{Path(sys.prefix)}/", "") for line in last_lines)
        return f"rank {rank}: {' < '.join(shortened)}"[:600]

    def stop(self, grace: float = 0.0) -> None:
        """Kill the ranks that have not exited after ``grace`` seconds."""
        until = monotonic() + grace
        while self.are_running and monotonic() < until:
            sleep(0.05)
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []
