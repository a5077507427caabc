"""Long searches with moves that break kernels on purpose, to test that nothing wrong is accepted.

    python -m benchmarks run sass.soak --baseline gpu_baseline.json --folder soak \\
        --out gpu_soak.json

Searches the suite's kernels in slices, one kernel after the other, on all visible GPUs
(``--abreast`` searches at a time on each). About 1 % of the proposals are illegal and run without a
check by the verifier (``--share``: share of all draws). The benchmark ends after ``--limit``
seconds; the next one with the same ``--folder`` resumes all runs. It counts survived faults and
hangs, lost results, and accepted broken kernels: those that fail on the GPU although the verifier
finds them safe, or that are the result of a search.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness import gpu_pool
from benchmarks.harness.result_file import save
from benchmarks.harness.schema import Options
from benchmarks.kernels.suite import Entry, entries
from benchmarks.sass.compiler_baseline import fastest, is_selected, load
from benchmarks.sass.robustness.illegal_moves import ILLEGAL_SHARE, BrokenCandidate, VerifyingDevice
from benchmarks.sass.suite_cell import OpenDevice, cached_build
from nostall.core import Run
from nostall.core.errors import ContractBroken
from nostall.gpu import Kernel, LocalGpu, MeasurementPlan
from nostall.search import Anneal
from nostall.tuning.job import describe, tune
from nostall.tuning.settings import Settings

SLICE_SECONDS = 20.0
"""Seconds of search in one slice of a run; the next slice resumes the search."""
_OVERHEAD = 15.0
"""Expected seconds of a slice beyond its search."""
DEADLINE = 3.0
"""Seconds after which a kernel counts as hung; those of the suite take less than 1 ms."""


@dataclass(frozen=True)
class SoakSlice:
    """The next slice of a run: search until ``seconds`` are spent in all slices together."""

    entry: Entry
    options: Options | None
    folder: Path
    seconds: float
    open: OpenDevice = LocalGpu
    share: float = ILLEGAL_SHARE

    @property
    def path(self) -> Path:
        return self.folder / self.entry.name.replace("/", "_")


def run_slice(job: SoakSlice) -> dict[str, Any]:
    """Start or resume a run and append its outcomes to its logs; runs in the process of one GPU."""
    source = cached_build(job.entry, job.options)
    assert source.launch is not None
    settings = Settings("anneal", seconds=job.seconds, objective="gpu", rounds=40, checks=4)
    began, resume = monotonic(), (job.path / "run.json").exists()
    if resume:
        run = Run.open(job.path)
    else:
        files = {"original.cubin": source.cubin}
        run = Run.create(job.path, "gpu_soak", describe(source, settings), files)
    log = job.path / "broken.jsonl"

    def note(broken: BrokenCandidate) -> None:
        with log.open("a") as file:
            file.write(json.dumps(broken.as_row()) + "\n")

    kernel = Kernel(source.cubin, source.kernel, source.launch)
    before = len(list(run.trials())) if resume else 0
    status, evaluated = "done", 0
    with run, job.open(kernel, MeasurementPlan(deadline=DEADLINE)) as gpu:
        device = VerifyingDevice(gpu, source.cubin, note, job.share)
        try:
            tuned = tune(
                source,
                Anneal(),
                settings,
                run=run,
                resume=resume,
                device=device,
                make_space=device.make_space,
            )
            evaluated = tuned.search.evaluations
        except ContractBroken as error:
            status = f"a broken kernel was accepted: {error}"
    trials = len(list(Run.open(job.path).trials()))
    row = {
        "kernel": job.entry.name,
        "ended": status,
        "legal": device.legal,
        "lost": device.lost,
        "trials_before": before,
        "trials": trials,
        "missing_trials": max(0, evaluated - trials),
        "seconds": round(monotonic() - began, 2),
        "gpu": dict(device.info),
    }
    with (job.path / "slices.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def summary(folder: Path) -> dict[str, Any]:
    """Totals of all slices in ``folder``, and the list of broken kernels."""
    slices, rows = [], []
    for path in sorted(folder.glob("*/slices.jsonl")):
        slices += list(_lines(path))
    for path in sorted(folder.glob("*/broken.jsonl")):
        rows += [{"kernel": path.parent.name, **row} for row in _lines(path)]
    fates = Counter(row["fate"] for row in rows)
    accepted = [r for r in rows if r["safe"] and r["fate"] != "timed"]
    return {
        "kind": "measured",
        "kernels": len({s["kernel"] for s in slices}),
        "slices": len(slices),
        "search_minutes": round(sum(s["seconds"] for s in slices) / 60, 2),
        "legal_candidates": sum(s["legal"] for s in slices),
        "broken_kernels": len(rows),
        "fates": dict(fates),
        "faults_survived": fates["fault"] + fates["hang"],
        "spoilt_processes": sum(row["spoilt"] for row in rows),
        "refused_by_the_verifier": sum(not row["safe"] for row in rows),
        "lost_results": sum(len(s["lost"]) + s["missing_trials"] for s in slices),
        "wrong_kernels_accepted": len(accepted) + sum(s["ended"] != "done" for s in slices),
        "lost": [text for s in slices for text in s["lost"]],
        "gpu": slices[0]["gpu"] if slices else {},
        "broken": rows,
    }


def next_slices(
    suite: Iterable[Entry], baselines: dict[str, Any], options: argparse.Namespace
) -> list[SoakSlice]:
    """The next slices of all runs: ``--rounds`` rounds over all kernels."""
    jobs = []
    for number in range(1, options.rounds + 1):
        for entry in suite:
            best = fastest(baselines.get(entry.name, ()))
            if (entry.options and best is None) or not is_selected(entry.name, options):
                continue
            compile_options = best.options if best else None
            done = _searched_seconds(options.folder / entry.name.replace("/", "_"))
            seconds = done + number * SLICE_SECONDS
            job = SoakSlice(entry, compile_options, options.folder, seconds, share=options.share)
            jobs.append(job)
    return jobs


def _searched_seconds(path: Path) -> float:
    """Seconds of search in the earlier slices of a run."""
    file = path / "slices.jsonl"
    return SLICE_SECONDS * len(list(_lines(file))) if file.exists() else 0.0


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text().splitlines())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="run directories")
    parser.add_argument(
        "--baseline", type=Path, required=True, help="made by benchmarks.sass.compiler_baseline"
    )
    parser.add_argument("--kernel", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument("--skip", nargs="*", default=[], help="not these (patterns)")
    parser.add_argument("--rounds", type=int, default=20, help="slices per kernel at most")
    parser.add_argument("--abreast", type=int, default=1, help="searches at a time on each GPU")
    parser.add_argument(
        "--share", type=float, default=ILLEGAL_SHARE, help="illegal draws among all"
    )
    parser.add_argument("--limit", type=float, default=500.0, help="stop after so many seconds")


def main(options: argparse.Namespace) -> None:
    until, gpus = monotonic() + options.limit, gpu_pool.visible_gpus() * options.abreast
    if not gpus:
        raise SystemExit("no GPU is visible; `nostall doctor` shows what is there")
    suite = entries()
    jobs = next_slices(suite, load(options.baseline), options)
    names = [entry.name for entry in suite]
    queues = gpu_pool.assign_queues(jobs, len(gpus), lambda job: job.entry.name, names)
    for job_result in gpu_pool.run_jobs(
        run_slice, queues, gpus, until, lambda _: SLICE_SECONDS + _OVERHEAD
    ):
        if job_result.result is None:
            print(f"{job_result.job.entry.name}: {job_result.error!r}"[:300], flush=True)
            continue
        print({k: v for k, v in job_result.result.items() if k != "gpu"}, flush=True)
        save(options.out, **summary(options.folder))
    totals = summary(options.folder)
    print({key: value for key, value in totals.items() if key not in ("broken", "lost", "gpu")})
