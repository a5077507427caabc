"""Random walks of legal moves, run on a GPU and compared bit by bit with the original.

    python -m benchmarks run sass.random_walks_on_gpu \\
        --out benchmarks/sass/results/random_walks_on_gpu.json

For each Triton kernel of the corpus (sm_90) there are two kinds of walks: over all proposed moves,
and over moves that do not lengthen the schedule, after which each stall is lowered as far as the
rules allow. The last schedule of each walk runs on several inputs. If it is wrong, bisection finds
a move that makes it wrong. Nondeterministic kernels are counted separately. A second run with the
same options continues. Needs a GPU of compute capability 9.0 and the built corpus (``make test``
builds it).

With ``--measured-latencies``, walks go to the distances that were measured on a GPU. With
``--prepared FILE``, the walks are those of ``python -m benchmarks.sass.gpu_walks.prepare``.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import load, save
from benchmarks.sass.gpu_walks.prepare import read_ends
from benchmarks.sass.gpu_walks.walks import (
    Task,
    WalkEnd,
    corpus_entry,
    kernel_names,
    open_space,
    original,
    tasks_of,
    walk,
    walk_to_end,
)
from nostall.core import BadInput, LaunchSpec
from nostall.gpu import Kernel, LocalGpu, MeasurementPlan
from nostall.sass.schedule import ScheduleSpace

NUM_INPUTS = 4
"""Random inputs on which each schedule runs."""
PLAN = MeasurementPlan(rounds=1, inputs=NUM_INPUTS, batch_us=20.0)
_RESULTS_SETTINGS = ("walks", "moves", "seed", "measured_latencies")


@dataclass(frozen=True)
class Job:
    """All walks of one kernel."""

    name: str
    tasks: tuple[Task, ...]
    measured_latencies: bool
    ends: tuple[WalkEnd, ...] = ()
    """Ends of walks that are done already."""


def run_kernel(job: Job) -> dict[str, Any]:
    """Do the walks of one kernel and run their last schedules; returns the kernel's record."""
    space = open_space(job.name, measured_latencies=job.measured_latencies)
    ends = job.ends or tuple(walk_to_end(space, task) for task in job.tasks)
    about = corpus_entry(job.name)
    launch = LaunchSpec.model_validate(about["launch"])
    row: dict[str, Any] = {"kernel": job.name, "walks": len(ends), "wrong": []}
    try:
        gpu = LocalGpu(Kernel(original(job.name), about["kernel"], launch), PLAN)
    except BadInput as error:
        return {**row, "walks": 0, "skipped": str(error)[:200]}
    with gpu:
        row["about"] = dict(gpu.info)
        for end in ends:
            outcome = gpu.evaluate(space.impose(space.load(end.state)).to_cubin())
            if outcome.status != "timed":
                number, move = find_wrong_move(space, end.task, gpu)
                row["wrong"].append(
                    {
                        **end.task._asdict(),
                        "fate": outcome.status,
                        "detail": outcome.detail,
                        "step": number,
                        "move": move,
                    }
                )
    tight = [end.cycles for end in ends if end.task.tighten]
    row["tightened"] = round(sum(b for _, b in tight) / max(1, sum(a for a, _ in tight)), 3)
    return row


def find_wrong_move(space: ScheduleSpace, task: Task, gpu: LocalGpu) -> tuple[int, str]:
    """(number, text) of a move that makes the kernel wrong, found by bisection."""
    steps = [(space.impose(state).to_cubin(), move) for state, move in walk(space, task)]
    good, bad = 0, len(steps) - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if gpu.evaluate(steps[middle][0]).status == "timed":
            good = middle
        else:
            bad = middle
    return bad, steps[bad][1]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--walks", type=int, default=4, help="of each kind, per kernel")
    parser.add_argument("--moves", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=400.0, help="stop after so many")
    parser.add_argument("--largest", type=int, default=120_000, help="bytes of the largest cubin")
    parser.add_argument("--match", default="", help="only kernels with this in their name")
    parser.add_argument("--workers", type=int, default=2, help="processes that walk and measure")
    parser.add_argument(
        "--measured-latencies", action="store_true", help="walk to distances measured on a GPU"
    )
    parser.add_argument("--prepared", type=Path, help="walks that were done and verified already")


def main(options: argparse.Namespace) -> int:
    """Exit code 1 if a walk was wrong, else 0."""
    started = monotonic()
    jobs, settings = jobs_of(options)
    rows = _earlier_rows(options.out, settings)
    done = {row["kernel"] for row in rows}
    jobs = [job for job in jobs if job.name not in done]
    counts = _save(options.out, settings, rows)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        futures = {pool.submit(run_kernel, job): job.name for job in jobs}
        for future in as_completed(futures):
            name = futures[future]
            try:
                row = future.result()
            except Exception as error:  # the next run tries the kernel again
                if not future.cancelled():
                    print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            rows.append(row)
            counts = _save(options.out, settings, rows)
            state = row.get("skipped", f"{row['walks']} walks, {len(row['wrong'])} wrong")
            print(f"{name}: {state}", flush=True)
            if monotonic() - started > options.seconds:
                for waiting in futures:
                    waiting.cancel()
    walks, wrong, skipped = counts
    print(
        f"{len(rows) - skipped} kernels, {walks} walks executed, {wrong} wrong, {skipped} kernels "
        f"skipped, {len(done) + len(jobs) - len(rows)} kernels not reached"
    )
    return int(wrong > 0)


def jobs_of(options: argparse.Namespace) -> tuple[list[Job], dict[str, Any]]:
    """The kernels with their walks, and the settings of the walks."""
    if options.prepared is None:
        settings = {key: getattr(options, key) for key in _RESULTS_SETTINGS}
        jobs = [
            Job(
                name,
                tuple(tasks_of(name, options.walks, options.moves, options.seed)),
                options.measured_latencies,
            )
            for name in kernel_names(options.largest, options.match)
        ]
        return jobs, settings
    content = load(options.prepared)
    settings = content["settings"]
    refused = [
        name
        for name, row in content["kernels"].items()
        if any(end["findings"] for end in row["ends"])
    ]
    if refused:
        raise BadInput(
            f"{options.prepared}: the verifier rejects walks of {', '.join(refused)}; find out why "
            "before a GPU executes them"
        )
    jobs = [
        Job(name, (), settings["measured_latencies"], tuple(read_ends(row, name)))
        for name, row in content["kernels"].items()
        if options.match in name
    ]
    return jobs, settings


def _earlier_rows(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run with the same settings; raises BadInput for other settings."""
    if not path.is_file():
        return []
    earlier = load(path)
    if earlier["settings"] != settings:
        raise BadInput(
            f"{path} has walks with {earlier['settings']}, not {settings}; give another --out, or "
            "the same options"
        )
    rows: list[dict[str, Any]] = earlier["kernels"]
    return rows


def _save(path: Path, settings: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Write the file; returns the numbers of walks, of wrong walks and of skipped kernels."""
    walks, wrong = sum(r["walks"] for r in rows), sum(len(r["wrong"]) for r in rows)
    rows.sort(key=lambda row: row["kernel"])
    save(path, settings=settings, walks=walks, wrong=wrong, kernels=rows)
    return walks, wrong, sum("skipped" in r for r in rows)
