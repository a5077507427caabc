"""Benchmark of whole models: backend="nostall" against torch.compile, on all visible GPUs.

    python -m benchmarks run torch_compile.models --out OUT [--limit 300] [--models bert,dien]
        [--parts steady] [--zoo users]

For every model of :mod:`.model_zoo.parts`, or with ``--zoo users`` for every whole model of
:mod:`.model_zoo.user_models`, each part in its own processes:

- ``inductor``, ``nostall``: start of a program by torch.compile and by the backend, first with
  empty and then with warm caches: wall and CPU seconds of the first step and until the backend has
  chosen.
- ``first`` and ``again`` (only with ``--parts``): ``--pairs`` pairs of first steps of both, each in
  its own process.  ``first`` has empty caches; ``again`` has the caches that ``inductor`` and
  ``nostall`` fill in the same command.  The order in a pair alternates.  ``again`` has a third
  method, nostall with every stitched kernel, because the backend may choose Inductor's version.
- ``steady``: torch.compile (twice: the null), the backend, its stitched version regardless of times
  (``always``), and eager PyTorch, interleaved.  Seconds of a step in a loop, which include the
  host, and of whole steps replayed as CUDA graphs, which do not.  Also the kernels of one step
  (profiler) and the differences of results and gradients.
- ``gain`` (the default of whole models): as ``steady``, with torch.compile and the backend only.
- ``autotuned``, ``graphs``: the same loop in the modes max-autotune-no-cudagraphs and
  reduce-overhead.  Each method has its own copy of the model, and torch.compile a second copy,
  because equal copies are not equally fast.  ``graphs`` has one more copy, which the backend hands
  to Inductor unchanged, and takes four processes with different orders of the copies.  These parts
  run last.

Before a GPU's first start an unrecorded process reads all files from disk; before the pairs of a
model one runs this model.  Python's bytecode is cached, as in an installed package.

OUT is a folder with one JSON for each model and part; ``logs`` in it has the output of the
processes.  Complete parts are skipped, so an interrupted run can be continued.  A part starts only
if it is expected to end within ``--limit``; a process that exceeds ``--each`` is killed.

``--small --device cpu --dtype float32`` runs everything in Triton's interpreter (set
TRITON_INTERPRET=1; the interpreter cannot multiply bf16).  The times are meaningless then, and the
backend decides by recorded times with which stitched versions win.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.gpu_pool import run_jobs, visible_gpus
from benchmarks.torch_compile.model_jobs import PAIR_SECONDS, SLACK_SECONDS, Job, assign_jobs
from benchmarks.torch_compile.model_setup import (
    INTERLEAVED,
    PAIRED,
    PROCESS_COUNTS,
    START_METHODS,
    STARTS,
    ZOOS,
    Setup,
)
from nostall.core.errors import BadInput

SHARES_GPU = True
"""Processes of other benchmarks may run beside this one: each takes turns on the GPU to time."""
CACHE_SOURCE = {**{method: method for method in STARTS}, "always": "nostall"}
"""The part whose caches a warm paired start uses, by method."""
PARTS = (*STARTS, *PAIR_SECONDS, *INTERLEAVED)
STATES = ("cold", "warm")
COMPILE_THREADS = 16
"""Inductor's compile threads for each GPU."""
DEFAULT_PARTS = {
    "parts": tuple(part for part in PARTS if part not in (*PAIR_SECONDS, "gain")),
    "users": ("gain",),
    "vocabulary": ("gain",),
}
"""Parts that are measured if none are selected, by set of models."""


def run(job: Job) -> str:
    """Run a job; returns its result in one line.  Raises :class:`ProcessFailed`."""
    if not job.setup.recorded:
        shutil.rmtree(job.caches, ignore_errors=True)
        run_process(replace(job.setup, seconds=job.max_seconds), Path(job.caches), job.deadline)
        return "not recorded: read files only"
    if job.setup.part in PAIR_SECONDS:
        return run_pairs(job)
    setup = replace(job.setup, seconds=job.max_seconds)
    if setup.part in INTERLEAVED:
        # Merge the caches of both starts.
        caches = Path(job.caches) / "nostall"
        for cache in ("inductor", "triton"):
            source = Path(job.caches) / "inductor" / cache
            if source.is_dir():
                shutil.copytree(source, caches / cache, dirs_exist_ok=True)
        if setup.part in PROCESS_COUNTS:
            return run_rounds(replace(job, setup=setup), caches)
        run_process(setup, caches, job.deadline)
        return summary_line(json.loads(Path(setup.out).read_text()))
    caches = Path(job.caches) / setup.part
    shutil.rmtree(caches, ignore_errors=True)
    for state in STATES:
        run_process(replace(setup, state=state), caches, job.deadline)
    return summary_line(json.loads(Path(setup.out).read_text()))


def start_order(part: str, pairs: int) -> list[str]:
    """Order of starts: pair after pair, with the first method rotating."""
    methods = list(START_METHODS[part])
    first_indices = [first % len(methods) for first in range(pairs)]
    return [method for first in first_indices for method in (*methods[first:], *methods[:first])]


def run_pairs(job: Job) -> str:
    """Measure first steps of the methods alternately, continuing after recorded ones."""
    out, setup = Path(job.setup.out), job.setup
    done = len(json.loads(out.read_text())["runs"]) if out.exists() else 0
    max_seconds, is_cold = job.slowdown * PAIR_SECONDS[setup.part], setup.part == PAIRED
    # An unrecorded start reads files; with warm caches it also compiles the stitched version.
    unrecorded = ["nostall" if is_cold else "always"]
    for index, method in enumerate([*unrecorded, *start_order(setup.part, setup.pairs)[done:]]):
        if monotonic() + max_seconds > job.deadline:
            break
        caches = Path(job.caches) / (setup.part if is_cold else CACHE_SOURCE[method])
        if is_cold:
            shutil.rmtree(caches, ignore_errors=True)
        elif not caches.exists():
            raise ProcessFailed(f"{caches} has no caches; add {CACHE_SOURCE[method]} to --parts")
        start_setup = replace(
            setup,
            state=method,
            recorded=index >= len(unrecorded),
            seconds=max_seconds + SLACK_SECONDS,
        )
        run_process(start_setup, caches, job.deadline)
    if not out.exists():
        raise ProcessFailed("no time is left")
    return summary_line(json.loads(out.read_text()))


def run_rounds(job: Job, caches: Path) -> str:
    """Run a part in several processes, continuing after recorded ones."""
    out, setup = Path(job.setup.out), job.setup
    done = len(json.loads(out.read_text())["rounds"]) if out.exists() else 0
    for turn in range(done, PROCESS_COUNTS[setup.part]):
        if turn and monotonic() + job.slowdown * job.round_seconds > job.deadline:
            break
        run_process(replace(setup, turn=turn), caches, job.deadline)
    return "; ".join(summary_line(result) for result in json.loads(out.read_text())["rounds"])


class ProcessFailed(Exception):
    """A process failed or exceeded its time limit."""


def run_process(setup: Setup, caches: Path, deadline: float) -> None:
    """Run ``benchmarks.torch_compile.model_process`` with these caches.

    Raises :class:`ProcessFailed`.
    """
    limit = min(setup.seconds, deadline - monotonic())
    if limit < 1:
        raise ProcessFailed("no time is left")
    environment = {
        "NOSTALL_HOME": str(caches / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(cache_root() / "bytecode"),
    }
    argument = json.dumps(asdict(replace(setup, seconds=limit)))
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.torch_compile.model_process",
        argument,
    ]
    log = Path(setup.out).parent / "logs" / f"{setup.model}.{setup.part}.{setup.state}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            exit_code = child.wait(limit)
        except subprocess.TimeoutExpired as error:
            raise ProcessFailed(f"{setup.state} took more than {limit:.0f} s") from error
        finally:
            if child.poll() is None:
                # Kill the whole process group, including its compile workers.
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if exit_code:
        last_line = (log.read_text().strip().splitlines() or ["no output"])[-1]
        raise ProcessFailed(f"{setup.state} failed: {last_line[:300]}")


def summary_line(result: Mapping[str, Any]) -> str:
    """The result of a part in one line."""
    if "runs" in result:
        return ", ".join(f"{start['method']} {start['first_s']:.1f} s" for start in result["runs"])
    if "starts" in result:
        parts = []
        for state, start in result["starts"].items():
            choice = f", chosen after {start['until_chosen_s']:.1f} s"
            parts.append(f"{state} {start['first_s']:.1f} s{choice if start['graphs'] else ''}")
            parts += [
                f"{graph['reason']}, {graph['kernels']} in, {graph['left']} left"
                for graph in start["graphs"]
            ]
        return ", ".join(parts)
    parts = []
    for clock in ("looped", "replayed"):
        compared = result.get(clock, {}).get("compared", {})
        parts += [
            f"{clock} {name} {comparison['ratio']:.3f} {comparison['verdict']}"
            for name, comparison in compared.items()
        ]
    launches = {
        name: kernels.get("launches") for name, kernels in result.get("kernels", {}).items()
    }
    return f"{', '.join(parts)}; launches {launches}; apart {result['apart']}"


def pending_jobs(options: argparse.Namespace, deadline: float) -> list[Job]:
    """Jobs of all selected parts and models that are not complete."""
    jobs = []
    parts = options.parts.split(",") if options.parts else DEFAULT_PARTS[options.zoo]
    for model in ZOOS[options.zoo](options.small):
        if not any(part in model for part in options.models.split(",")):
            continue
        for part in parts:
            path = options.out / f"{model}.{part}.json"
            if path.exists() and json.loads(path.read_text()).get("complete"):
                continue
            setup = Setup(
                model=model,
                part=part,
                out=str(path),
                device=options.device,
                dtype=options.dtype,
                small=options.small,
                seconds=options.each,
                measured_s=options.measured,
                pairs=options.pairs,
                zoo=options.zoo,
            )
            jobs.append(Job(setup, deadline, str(cache_root() / model)))
    return jobs


def cache_root() -> Path:
    """Folder of all caches, whose code programs load; raises :class:`BadInput` if others own it."""
    folder = Path(tempfile.gettempdir()) / f"nostall-fusion-backend-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise BadInput(
            f"{folder} is not a folder that this user alone can write; delete it, or set TMPDIR"
        )
    return folder


def with_unrecorded_start(number: int, jobs: list[Job]) -> list[Job]:
    """A queue with an unrecorded start in front, so that later starts find all files in memory."""
    starts = [job for job in jobs if job.setup.part in STARTS]
    if not starts:
        return jobs
    folder = cache_root() / f"unrecorded-{number}"
    setup = replace(
        starts[0].setup,
        part=PAIRED,
        state="nostall",
        recorded=False,
        out=str(folder / f"{starts[0].setup.model}.json"),
    )
    return [Job(setup, starts[0].deadline, str(folder / "caches")), *jobs]


def expected_seconds(job: Job) -> float:
    return job.expected_seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--zoo",
        choices=tuple(ZOOS),
        default="parts",
        help="parts of published models, or whole models as users write them",
    )
    parser.add_argument("--models", default="", help="only models whose names contain one of these")
    parser.add_argument("--parts", default="", help=f"comma-separated, of {','.join(PARTS)}")
    parser.add_argument(
        "--pairs", type=int, default=2, help="pairs of first steps in first and again"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds for everything")
    parser.add_argument("--each", type=float, default=200, help="seconds for one process")
    parser.add_argument("--measured", type=float, default=4, help="seconds for each set of samples")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")


def main(options: argparse.Namespace) -> None:
    if unknown := sorted({*filter(None, options.parts.split(","))} - {*PARTS}):
        raise BadInput(f"--parts has {', '.join(unknown)}; allowed are {', '.join(PARTS)}")
    gpus = visible_gpus() if options.device == "cuda" else [""]
    if not gpus:
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --small --device cpu")
    start = monotonic()
    jobs = pending_jobs(options, start + options.limit)
    queues = [
        with_unrecorded_start(number, queue)
        for number, queue in enumerate(assign_jobs(jobs, len(gpus)))
    ]
    done = set()
    for answer in run_jobs(run, queues, gpus, start + options.limit, expected_seconds):
        setup = answer.job.setup
        if setup.recorded:
            done.add((setup.model, setup.part))
        error = answer.error
        message = answer.result if error is None else f"{type(error).__name__}: {error}"
        print(f"[{monotonic() - start:.0f} s] {setup.model}, {setup.part}: {message}", flush=True)
    for job in jobs:
        if (job.setup.model, job.setup.part) not in done:
            print(f"{job.setup.model}, {job.setup.part}: not started, no time is left", flush=True)
