"""Measure on a GPU how close fixed-latency producers and their consumers may issue.

    python -m benchmarks.sass.distances.archive --out build/distances.zip      (needs nvcc)
    python -m benchmarks run sass.measured_distances --archive build/distances.zip \\
        --out benchmarks/sass/results/measured_distances.json.gz --seconds 240

For each pair a micro-kernel issues the consumer at decreasing distances from the producer until a
result is wrong.  A minimum above a distance that compilers left means that the experiment is
wrong: those pairs are listed first.  With ``--part witnesses``, kernels show whether the hardware
keeps the orders that rules of the verifier rely on.  Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import load, save
from benchmarks.sass.distances.archive import Archive
from benchmarks.sass.distances.campaign import Campaign, Task, run_campaign
from benchmarks.sass.distances.gpu_prober import GpuProber
from benchmarks.sass.distances.microkernels.overwrites import overwrite_pairs
from benchmarks.sass.distances.microkernels.pairs import Pair, all_pairs
from benchmarks.sass.distances.microkernels.witnesses import CASES
from benchmarks.sass.distances.table import reason_to_drop
from benchmarks.sass.distances.tasks import DistanceTask, WitnessTask
from nostall.gpu.driver import Cuda

_SHOWN = 12
_COMPARED = ("kind", "names", "joint", "coarse", "sighting", "floor", "safe")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--archive", type=Path, default=Path("build/distances.zip"))
    parser.add_argument(
        "--part",
        choices=("distances", "overwrites", "witnesses"),
        default="distances",
        help="distances: RAW pairs; overwrites: WAW and WAR pairs",
    )
    parser.add_argument(
        "--again", type=Path, help="earlier results: only pairs that they have no minimum for"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after so many")
    parser.add_argument("--workers", type=int, default=6, help="processes on the GPU")
    parser.add_argument("--match", default="", help="only names that match this expression")
    parser.add_argument("--limit", type=int, default=0, help="at most so many; 0 for all")
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 if a measured minimum is above a compiler's distance, else 0."""
    archive = Archive.read(options.archive)
    plan = {row["pair"]: row for row in archive.plan}
    is_distances = options.part != "witnesses"
    pairs = overwrite_pairs() if options.part == "overwrites" else all_pairs()
    if options.again is not None:
        pairs = without_minimum(pairs, load(options.again)["rows"])
    tasks: list[Task] = [*map(WitnessTask, CASES)]
    if is_distances:
        tasks = distance_tasks(pairs, plan, options.seed)
    tasks = [task for task in tasks if re.search(options.match, task.name)]
    tasks = tasks[: options.limit or None]
    facts = {"gpu": gpu_facts(), "seed": options.seed, "wanted": len(tasks)}
    campaign = Campaign(archive.template, options.seconds)
    run_campaign(campaign, tasks, partial(GpuProber, options.seed), options.workers)
    if not is_distances:
        rows = sorted(campaign.results, key=lambda row: row["case"])
        save(options.out, **facts, faults=campaign.faults, rows=rows)
        print_witnesses(rows, campaign.faults)
        return 0
    rows = [compared(result, plan[result["pair"]]) for result in campaign.results]
    rows.sort(key=lambda row: row["pair"])
    above = [row["pair"] for row in rows if row.get("above_sighting")]
    save(options.out, **facts, faults=campaign.faults, above_sighting=above, rows=rows)
    print_distances(rows, campaign.faults, len(tasks))
    return int(bool(above))


def without_minimum(pairs: Iterable[Pair], rows: Iterable[dict[str, Any]]) -> tuple[Pair, ...]:
    """The pairs whose rows of earlier results are no evidence, and those without a row."""
    done = {row["pair"] for row in rows if not reason_to_drop(row)}
    return tuple(pair for pair in pairs if pair.name not in done)


def distance_tasks(
    pairs: Iterable[Pair], plan: Mapping[str, dict[str, Any]], seed: int
) -> list[Task]:
    """A task for each pair, in a random order, so that a time limit leaves a sample."""
    shuffled = list(pairs)
    random.Random(seed).shuffle(shuffled)
    return [DistanceTask(pair, plan[pair.name]["top"], at) for at, pair in enumerate(shuffled)]


def compared(result: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """A result beside the distances that compilers left."""
    row = {**result, **{key: plan[key] for key in _COMPARED}}
    if "problem" in result:
        return row
    minimum = result["largest_wrong"] + 1
    sighting = plan["sighting"]
    row["minimum"] = minimum
    row["above_sighting"] = sighting is not None and minimum > sighting
    row["above_floor"] = minimum > plan["floor"]
    return row


def print_distances(
    rows: Sequence[dict[str, Any]], faults: Sequence[dict[str, str]], wanted: int
) -> None:
    """A short table: counts first, then the pairs that need an explanation."""
    measured = [row for row in rows if "minimum" in row]
    blind = [row for row in rows if "problem" in row]
    proven = [row for row in measured if row["smallest_right"] is not None]
    above = [row for row in measured if row["above_sighting"]]
    below = [row for row in proven if row["minimum"] + 2 < row["safe"]]
    odd = [row for row in measured if row["wrong_but_not_stale"]]
    print(f"pairs wanted {wanted}, measured {len(measured)}, proven right {len(proven)}, "
          f"blind {len(blind)}, wrong but not stale {len(odd)}, faults {len(faults)}")  # fmt: skip
    print(f"above a compiler's distance {len(above)}, more than 2 below the table {len(below)}")
    groups = (
        ("ABOVE SIGHTING", above),
        ("BLIND", blind),
        ("NOT STALE", odd),
        ("BELOW TABLE", below),
    )
    for title, group in groups:
        for row in group[:_SHOWN]:
            print(f"{title:15} {row['pair'][:60]:60} minimum {row.get('minimum')}, "
                  f"seen {row['sighting']}, table {row['safe']}")  # fmt: skip
    _print_faults(faults)


def print_witnesses(rows: Sequence[dict[str, Any]], faults: Sequence[dict[str, str]]) -> None:
    """Cases that were wrong and cases that show nothing, a line each; the others as counts."""
    counted = [row for row in rows if "problem" not in row]
    wrong = [row for row in counted if row["covered_wrong"] and not row["is_control"]]
    controls = [row for row in counted if row["is_control"]]
    silent = [row for row in counted if not row["uncovered_wrong"] and not row["is_control"]]
    kept = len(counted) - len(controls) - len([r for r in counted if r in wrong or r in silent])
    print(f"orders kept in {kept} cases, broken in {len(wrong)}, no evidence from {len(silent)}, "
          f"controls {len(controls)}, not run {len(rows) - len(counted)}")  # fmt: skip
    for title, group in (("BROKEN", wrong), ("CONTROL", controls), ("NO EVIDENCE", silent)):
        for row in group[: 2 * _SHOWN]:
            print(f"{title:11} {row['case'][:54]:54} wrong {row['covered_wrong']:8}, without "
                  f"wait {row['uncovered_wrong']:8} of {row['results']}")  # fmt: skip
    _print_faults(faults)


def _print_faults(faults: Sequence[dict[str, str]]) -> None:
    for fault in faults[:_SHOWN]:
        last = fault["detail"].strip().splitlines()[-1:]
        print(f"FAULT           {fault['task'][:60]:60} {' '.join(last)[:120]}")


def gpu_facts() -> dict[str, str]:
    """Name and architecture of the GPU."""
    cuda = Cuda()
    return {"gpu": cuda.name, "architecture": f"sm_{cuda.architecture}"}
