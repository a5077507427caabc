"""Random walks of legal moves, run on a GPU and compared bit by bit with the original.

    python -m benchmarks run sass.random_walks_on_gpu \\
        --out benchmarks/sass/results/random_walks_on_gpu.json

For each Triton kernel of the corpus (sm_90) there are two kinds of walks: over all proposed moves,
and over moves that do not lengthen the schedule, so that distances shrink to what the rules allow.
The last schedule of each walk runs on several inputs. If it is wrong, bisection finds a move that
makes it wrong. Nondeterministic kernels are counted separately. Needs a GPU of compute capability
9.0 and the built corpus (``make test`` builds it).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.result_file import save
from nostall.core import BadInput, LaunchSpec
from nostall.gpu import Kernel, LocalGpu, MeasurementPlan
from nostall.sass import Program
from nostall.sass.schedule import Schedule, ScheduleSpace

CORPUS = Path(__file__).resolve().parents[2] / ".cache" / "corpus" / "triton-3.6.0"
NUM_INPUTS = 4
"""Random inputs on which each schedule runs."""


class Task(NamedTuple):
    """One walk of one kernel."""

    name: str
    tighten: bool
    """Whether moves that lengthen the schedule are skipped."""
    seed: int
    moves: int


class WalkEnd(NamedTuple):
    """Last schedule of a walk."""

    task: Task
    cubin: bytes
    cycles: tuple[int, int]
    """Sum of stall counts before and after the walk."""


def walk(task: Task) -> Iterator[tuple[ScheduleSpace, Schedule, str]]:
    """States of a walk, with the move that led to each."""
    program = Program.from_cubin((CORPUS / f"{task.name}.cubin").read_bytes())
    space = ScheduleSpace(program, program.kernel(corpus_entry(task.name)["kernel"]))
    state, rng = space.start(), np.random.default_rng(task.seed)
    yield space, state, "start"
    length = int(state.stall.sum())
    for _ in range(task.moves):
        move = space.propose(state, rng)
        if move is None:
            return
        after = space.apply(state, move)
        if task.tighten and int(after.stall.sum()) > length:
            continue
        state, length = after, int(after.stall.sum())
        yield space, state, str(move)


def walk_to_end(task: Task) -> WalkEnd:
    """Do a walk; returns its last schedule."""
    states = [(space, state) for space, state, _ in walk(task)]
    space, last = states[-1]
    cycles = (int(states[0][1].stall.sum()), int(last.stall.sum()))
    return WalkEnd(task, space.impose(last).to_cubin(), cycles)


def corpus_entry(name: str) -> dict[str, Any]:
    """Kernel name and launch of a cubin, from the index of the corpus."""
    entry: dict[str, Any] = json.loads((CORPUS / "index.json").read_text())[name]
    return entry


def find_wrong_move(task: Task, gpu: LocalGpu) -> tuple[int, str]:
    """(number, text) of a move that makes the kernel wrong, found by bisection."""
    steps = [(space.impose(state).to_cubin(), move) for space, state, move in walk(task)]
    good, bad = 0, len(steps) - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if gpu.evaluate(steps[middle][0]).status == "timed":
            good = middle
        else:
            bad = middle
    return bad, steps[bad][1]


def run_kernel(name: str, ends: list[WalkEnd], plan: MeasurementPlan) -> dict[str, Any]:
    """Run the last schedules of all walks of one kernel; returns its record."""
    about = corpus_entry(name)
    kernel = Kernel(
        (CORPUS / f"{name}.cubin").read_bytes(),
        about["kernel"],
        LaunchSpec.model_validate(about["launch"]),
    )
    row: dict[str, Any] = {"kernel": name, "walks": len(ends), "wrong": []}
    try:
        gpu = LocalGpu(kernel, plan)
    except BadInput as error:
        return {**row, "walks": 0, "skipped": str(error)[:200]}
    with gpu:
        row["about"] = dict(gpu.info)
        for walk_end in ends:
            outcome = gpu.evaluate(walk_end.cubin)
            if outcome.status != "timed":
                number, move = find_wrong_move(walk_end.task, gpu)
                row["wrong"].append(
                    {
                        **walk_end.task._asdict(),
                        "fate": outcome.status,
                        "detail": outcome.detail,
                        "step": number,
                        "move": move,
                    }
                )
    tight = [w.cycles for w in ends if w.task.tighten]
    row["tightened"] = round(sum(b for _, b in tight) / max(1, sum(a for a, _ in tight)), 3)
    return row


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--walks", type=int, default=4, help="of each kind, per kernel")
    parser.add_argument("--moves", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=400.0, help="stop after so many")
    parser.add_argument("--largest", type=int, default=120_000, help="bytes of the largest cubin")
    parser.add_argument("--match", default="", help="only kernels with this in their name")
    parser.add_argument("--workers", type=int, default=2, help="processes that walk")


def main(options: argparse.Namespace) -> None:
    started = monotonic()
    names = [
        path.stem
        for path in sorted(CORPUS.glob("*.sm_90.cubin"))
        if path.stat().st_size <= options.largest
        and corpus_entry(path.stem).get("launch")
        and options.match in path.stem
    ]
    tasks = [
        Task(name, tighten, options.seed + k, options.moves * (1 + 2 * tighten))
        for name in names
        for tighten in (False, True)
        for k in range(options.walks)
    ]
    plan = MeasurementPlan(rounds=1, inputs=NUM_INPUTS, batch_us=20.0)
    rows: list[dict[str, Any]] = []
    ready: dict[str, list[WalkEnd]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        for walk_end in pool.map(walk_to_end, tasks, chunksize=options.walks):
            ends = ready.setdefault(walk_end.task.name, [])
            ends.append(walk_end)
            if len(ends) < 2 * options.walks:
                continue
            rows.append(run_kernel(walk_end.task.name, ends, plan))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "about"}), flush=True)
            _save(options, rows)
            if monotonic() - started > options.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    walks, wrong, skipped = _save(options, rows)
    print(f"{len(rows) - skipped} kernels, {walks} walks, {wrong} wrong, {skipped} kernels skipped")


def _save(options: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Write the file; returns the numbers of walks, of wrong walks and of skipped kernels."""
    walks, wrong = sum(r["walks"] for r in rows), sum(len(r["wrong"]) for r in rows)
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    save(options.out, settings=settings, walks=walks, wrong=wrong, kernels=rows)
    return walks, wrong, sum("skipped" in r for r in rows)
