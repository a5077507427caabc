"""Whole models by the torch.compile backend, beside torch.compile as it is, on every GPU there is.

    python -m benchmarks run torch_compile.models --out OUT [--limit 300] [--models bert,dien] [--parts steady]

For every model of ``benchmarks.torch_compile.model_zoo``, each part in processes of its own:

- ``inductor``, ``nostall``: a program's start by torch.compile and by the backend, with empty
  caches and then with warm ones: seconds (of the clock and of all processors) of the first step and
  until the backend has chosen.
- ``first`` and ``again``, only where they are asked for: ``--pairs`` pairs of first steps by the
  two, each in a process with empty caches of its own, or with the caches that ``inductor`` and
  ``nostall`` have left, run by the same command; who goes first alternates.  ``again`` has a third
  one, with every stitched kernel put in, as the choice may be Inductor's version.
- ``steady``: torch.compile (twice: the null), the backend, its stitched version whatever it costs
  (``always``), and eager, in turns: seconds per step in a loop, where the host may be what takes
  longest, and as replayed CUDA graphs of the whole step, where only the GPU counts.  Kernels that
  one step launches (profiler), how far results and gradients are apart.
- ``autotuned``, ``graphs``: the same loop in the modes max-autotune-no-cudagraphs and
  reduce-overhead, and torch.compile's mode once more with a model of its own, as each of them has:
  two copies of one version are not equally fast.  They come last.  ``graphs`` has a third copy,
  which the backend hands to Inductor as it is, and takes four processes, which make the copies and
  time them in different orders.

Before a GPU's first start a process that is not recorded has read what all need from the disk;
before a model's ``first`` one did that runs this model.  Python's bytecode is kept, as where
packages were installed: where it may not be, every process compiles PyTorch's modules anew.

OUT is a folder with one JSON for each model and part, and what the processes said in ``logs``.
What is complete is left out, so an interrupted run goes on.  No part begins that is expected to end
after ``--limit``; one that takes longer than ``--each`` is ended and named.
``--small --device cpu --dtype float32`` tries all of it in Triton's interpreter (set
TRITON_INTERPRET=1; it multiplies no bf16): times are worth nothing then, and recorded ones have
stitched versions win.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.gpu_pool import run_jobs, visible_gpus
from benchmarks.torch_compile.model_process import (
    AGAIN,
    FIRST,
    PAIRED,
    ROUNDS,
    SIDE_BY_SIDE,
    STARTED,
    Setup,
)
from benchmarks.torch_compile.model_zoo import models
from nostall.core.errors import BadInput

IN_PAIRS = {PAIRED: 25, AGAIN: 8}
"""Seconds for one process of a pair."""
LEFT_BY = {**{method: method for method in FIRST}, "always": "nostall"}
"""The part whose caches a warm start of a pair finds."""
PARTS = (*FIRST, *IN_PAIRS, *SIDE_BY_SIDE)
STATES = ("cold", "warm")
THREADS = 16
"""With which Inductor compiles, of each GPU's share of a machine."""
EXPECTED = {
    "bert-train": {"inductor": 50, "nostall": 100, "steady": 70, "autotuned": 200, "graphs": 120},
    "bert-infer": {"inductor": 25, "nostall": 60, "steady": 40, "autotuned": 120, "graphs": 70},
}
ELSE = {"inductor": 25, "nostall": 60, "steady": 50, "autotuned": 100, "graphs": 60}
"""Seconds by which parts are dealt out; nothing is measured against them."""
NEXT_ROUND = {"bert-train": 35}
NEXT_ROUND_ELSE = 20
"""Seconds for each process of a part in rounds behind the first, which has all to compile."""
ALONE = {"inductor", PAIRED}
"""Parts of a model of which no other needs anything, but for :data:`AGAIN`."""
SLACK = 60.0
INTERPRETED = 8.0
"""So many times as long it takes in Triton's interpreter."""


@dataclass(frozen=True)
class Job:
    """A part of a model, to be run before ``until`` (of the monotonic clock)."""

    setup: Setup
    until: float
    caches: str

    @property
    def expected(self) -> float:
        """Seconds."""
        if self.setup.part in IN_PAIRS:
            pairs = self.setup.pairs if self.setup.recorded else 0
            methods = len(STARTED[self.setup.part])
            recorded = IN_PAIRS[self.setup.part] * methods * pairs
            return self.slower * (IN_PAIRS[PAIRED] + recorded)
        first = EXPECTED.get(self.setup.model, ELSE)[self.setup.part]
        more = ROUNDS.get(self.setup.part, 1) - 1
        return self.slower * (first + more * self.round)

    @property
    def round(self) -> float:
        return NEXT_ROUND.get(self.setup.model, NEXT_ROUND_ELSE)

    @property
    def slower(self) -> float:
        return 1.0 if self.setup.device == "cuda" else INTERPRETED

    @property
    def most(self) -> float:
        """Seconds for one process: what ends it knows those that compile for it."""
        return min(self.setup.seconds, self.expected + SLACK)


def run(job: Job) -> str:
    """A line about what was found.  Raises :class:`Ended` where there is nothing."""
    if not job.setup.recorded:
        shutil.rmtree(job.caches, ignore_errors=True)
        process(replace(job.setup, seconds=job.most), Path(job.caches), job.until)
        return "not recorded: files were read"
    if job.setup.part in IN_PAIRS:
        return pairs(job)
    setup = replace(job.setup, seconds=job.most)
    if setup.part in SIDE_BY_SIDE:
        # What both starts have compiled is there for all.
        every = Path(job.caches) / "nostall"
        for sort in ("inductor", "triton"):
            other = Path(job.caches) / "inductor" / sort
            if other.is_dir():
                shutil.copytree(other, every / sort, dirs_exist_ok=True)
        if setup.part in ROUNDS:
            return rounds(replace(job, setup=setup), every)
        process(setup, every, job.until)
        return line(json.loads(Path(setup.out).read_text()))
    place = Path(job.caches) / setup.part
    shutil.rmtree(place, ignore_errors=True)
    for state in STATES:
        process(replace(setup, state=state), place, job.until)
    return line(json.loads(Path(setup.out).read_text()))


def order(part: str, pairs: int) -> list[str]:
    """Who starts, one after the other; each goes first as often as the others, where it can."""
    methods = list(STARTED[part])
    firsts = [at % len(methods) for at in range(pairs)]
    return [method for at in firsts for method in (*methods[at:], *methods[:at])]


def pairs(job: Job) -> str:
    """First steps in turns; those that are there already are not taken again."""
    out, setup = Path(job.setup.out), job.setup
    known = len(json.loads(out.read_text())["runs"]) if out.exists() else 0
    most, cold = job.slower * IN_PAIRS[setup.part], setup.part == PAIRED
    # The first one reads files; of warm ones it has the stitched version there, chosen or not.
    unrecorded = ["nostall" if cold else "always"]
    for at, method in enumerate([*unrecorded, *order(setup.part, setup.pairs)[known:]]):
        if monotonic() + most > job.until:
            break
        place = Path(job.caches) / (setup.part if cold else LEFT_BY[method])
        if cold:
            shutil.rmtree(place, ignore_errors=True)
        elif not place.exists():
            raise Ended(f"no caches are there; add {LEFT_BY[method]} to --parts")
        one = replace(setup, state=method, recorded=at >= len(unrecorded), seconds=most + SLACK)
        process(one, place, job.until)
    if not out.exists():
        raise Ended("no time is left")
    return line(json.loads(out.read_text()))


def rounds(job: Job, caches: Path) -> str:
    """A part in several processes; those that there are already are not run again."""
    out, setup = Path(job.setup.out), job.setup
    known = len(json.loads(out.read_text())["rounds"]) if out.exists() else 0
    for turn in range(known, ROUNDS[setup.part]):
        if turn and monotonic() + job.slower * job.round > job.until:
            break
        process(replace(setup, turn=turn), caches, job.until)
    return "; ".join(line(one) for one in json.loads(out.read_text())["rounds"])


class Ended(Exception):
    """A process failed, or took too long."""


def process(setup: Setup, caches: Path, until: float) -> None:
    """``benchmarks.torch_compile.model_process`` with these caches.  Raises :class:`Ended`."""
    seconds = min(setup.seconds, until - monotonic())
    if seconds < 1:
        raise Ended("no time is left")
    places = {
        "NOSTALL_HOME": str(caches / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(THREADS),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(root() / "bytecode"),
    }
    given = json.dumps(asdict(replace(setup, seconds=seconds)))
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.torch_compile.model_process",
        given,
    ]
    log = Path(setup.out).parent / "logs" / f"{setup.model}.{setup.part}.{setup.state}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as said:
        child = subprocess.Popen(
            command, env={**os.environ, **places}, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise Ended(f"{setup.state} took more than {seconds:.0f} s") from error
        finally:
            if child.poll() is None:
                # Those that compile for it, too.
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if code:
        last = (log.read_text().strip().splitlines() or ["nothing said"])[-1]
        raise Ended(f"{setup.state} failed: {last[:300]}")


def line(found: Mapping[str, Any]) -> str:
    """The result in a few words."""
    if "runs" in found:
        return ", ".join(f"{one['method']} {one['first_s']:.1f} s" for one in found["runs"])
    if "starts" in found:
        told = []
        for state, start in found["starts"].items():
            active = f", chosen after {start['until_chosen_s']:.1f} s"
            told.append(f"{state} {start['first_s']:.1f} s{active if start['graphs'] else ''}")
            told += [f"{g['reason']}, {g['kernels']} in, {g['left']} left" for g in start["graphs"]]
        return ", ".join(told)
    told = []
    for name in ("looped", "replayed"):
        compared = found.get(name, {}).get("compared", {})
        told += [f"{name} {x} {c['ratio']:.3f} {c['verdict']}" for x, c in compared.items()]
    launches = {n: k.get("launches") for n, k in found.get("kernels", {}).items()}
    return f"{', '.join(told)}; launches {launches}; apart {found['apart']}"


def dealt(jobs: Sequence[Job], gpus: int) -> list[list[Job]]:
    """A queue for each GPU: the longest first, to whichever has least to do; the parts of a model
    that use what ``nostall`` compiled stay behind it, the modes behind everything else."""
    queues: list[list[Job]] = [[] for _ in range(gpus)]
    late = [job for job in jobs if job.setup.part in SIDE_BY_SIDE and job.setup.part != "steady"]
    groups: dict[tuple[str, str], list[Job]] = {}
    warm = any(job.setup.part == AGAIN for job in jobs)
    for job in jobs:
        if job not in late:
            alone = job.setup.part if job.setup.part in ({PAIRED} if warm else ALONE) else ""
            groups.setdefault((job.setup.model, alone), []).append(job)

    def length(group: Sequence[Job]) -> float:
        return sum(job.expected for job in group)

    for group in sorted(groups.values(), key=length, reverse=True):
        min(queues, key=length).extend(group)
    for job in sorted(late, key=lambda job: job.expected):
        min(queues, key=length).append(job)
    return queues


def wanted(options: argparse.Namespace, until: float) -> list[Job]:
    """Every part of every model that is not complete."""
    jobs = []
    parts = options.parts.split(",") if options.parts else [p for p in PARTS if p not in IN_PAIRS]
    for model in models(options.small):
        if not any(part in model for part in options.models.split(",")):
            continue
        for part in parts:
            out = options.out / f"{model}.{part}.json"
            if out.exists() and json.loads(out.read_text()).get("complete"):
                continue
            setup = Setup(
                model=model,
                part=part,
                out=str(out),
                device=options.device,
                dtype=options.dtype,
                small=options.small,
                seconds=options.each,
                measured_s=options.measured,
                pairs=options.pairs,
            )
            jobs.append(Job(setup, until, str(root() / model)))
    return jobs


def root() -> Path:
    """Where caches of every sort are."""
    return Path(tempfile.gettempdir()) / f"nostall-fusion-backend-{os.getuid()}"


def headed(number: int, jobs: list[Job]) -> list[Job]:
    """A queue, with a start in front that reads from the disk what the others find in memory."""
    starts = [job for job in jobs if job.setup.part in FIRST]
    if not starts:
        return jobs
    nowhere = root() / f"unrecorded-{number}"
    setup = replace(
        starts[0].setup,
        part=PAIRED,
        state="nostall",
        recorded=False,
        out=str(nowhere / f"{starts[0].setup.model}.json"),
    )
    return [Job(setup, starts[0].until, str(nowhere / "caches")), *jobs]


def expected(job: Job) -> float:
    return job.expected


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="", help="only those whose name has one of these parts")
    parser.add_argument("--parts", default="", help=f"of {','.join(PARTS)}")
    parser.add_argument("--pairs", type=int, default=2, help="of first steps, in first and again")
    parser.add_argument("--limit", type=float, default=300, help="seconds for everything")
    parser.add_argument("--each", type=float, default=200, help="seconds for one process")
    parser.add_argument("--measured", type=float, default=4, help="seconds for each set of times")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")


def main(options: argparse.Namespace) -> None:
    if unknown := sorted({*filter(None, options.parts.split(","))} - {*PARTS}):
        raise BadInput(f"--parts has {', '.join(unknown)}; allowed are {', '.join(PARTS)}")
    gpus = visible_gpus() if options.device == "cuda" else [""]
    if not gpus:
        sys.exit("there is no GPU here; run this on one, or give --small --device cpu")
    began = monotonic()
    jobs = wanted(options, began + options.limit)
    queues = [headed(at, queue) for at, queue in enumerate(dealt(jobs, len(gpus)))]
    answered = set()
    for answer in run_jobs(run, queues, gpus, began + options.limit, expected):
        setup = answer.job.setup
        if setup.recorded:
            answered.add((setup.model, setup.part))
        error = answer.error
        told = answer.result if error is None else f"{type(error).__name__}: {error}"
        print(f"[{monotonic() - began:.0f} s] {setup.model}, {setup.part}: {told}", flush=True)
    for job in jobs:
        if (job.setup.model, job.setup.part) not in answered:
            print(f"{job.setup.model}, {job.setup.part}: not begun, no time is left", flush=True)
