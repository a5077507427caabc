"""Measure on a GPU how close fixed-latency producers and their consumers may issue.

    python -m benchmarks.sass.distances.archive --out build/distances.zip      (needs nvcc)
    python -m benchmarks run sass.measured_distances --archive build/distances.zip \\
        --out benchmarks/sass/results/measured_distances.json.gz --seconds 240

For each pair a micro-kernel issues the consumer at decreasing distances from the producer until a
result is wrong.  A minimum above a distance that compilers left means that the experiment is
wrong: those pairs are listed first.  Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.sass.distances.archive import Archive
from benchmarks.sass.distances.campaign import Campaign, run_campaign
from benchmarks.sass.distances.gpu_prober import GpuProber
from benchmarks.sass.distances.pairs import Pair, all_pairs

_SHOWN = 12


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--archive", type=Path, default=Path("build/distances.zip"))
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after so many")
    parser.add_argument("--workers", type=int, default=6, help="processes on the GPU")
    parser.add_argument("--match", default="", help="only pairs with this in their name")
    parser.add_argument("--limit", type=int, default=0, help="at most so many pairs; 0 for all")
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 if a measured minimum is above a compiler's distance, else 0."""
    archive = Archive.read(options.archive)
    plan = {row["pair"]: row for row in archive.plan}
    pairs = chosen_pairs(options.match, options.limit, options.seed)
    tops = {name: row["top"] for name, row in plan.items()}
    campaign = Campaign(archive.template, tops, options.seconds)
    run_campaign(campaign, pairs, partial(GpuProber, options.seed), options.workers)
    rows = [compared(result, plan[result["pair"]]) for result in campaign.results]
    rows.sort(key=lambda row: row["pair"])
    suspicious = [row for row in rows if row.get("above_sighting")]
    save(
        options.out,
        gpu=_gpu_facts(),
        seed=options.seed,
        pairs=len(pairs),
        measured=len(rows),
        faults=campaign.faults,
        above_sighting=[row["pair"] for row in suspicious],
        rows=rows,
    )
    print_summary(rows, campaign, len(pairs))
    return int(bool(suspicious))


def chosen_pairs(match: str, limit: int, seed: int) -> list[Pair]:
    """The pairs to measure, in a random order, so that a time limit leaves a sample."""
    pairs = [pair for pair in all_pairs() if match in pair.name]
    random.Random(seed).shuffle(pairs)
    return pairs[:limit] if limit else pairs


def compared(result: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """A result beside the distances that compilers left."""
    row = {**result, **{key: plan[key] for key in ("names", "coarse", "sighting", "floor", "safe")}}
    if "problem" in result:
        return row
    minimum = result["largest_wrong"] + 1
    sighting = plan["sighting"]
    row["minimum"] = minimum
    row["above_sighting"] = sighting is not None and minimum > sighting
    row["above_floor"] = minimum > plan["floor"]
    return row


def print_summary(rows: Sequence[dict[str, Any]], campaign: Campaign, wanted: int) -> None:
    """A short table: counts first, then the pairs that need an explanation."""
    measured = [row for row in rows if "minimum" in row]
    blind = [row for row in rows if "problem" in row]
    proven = [row for row in measured if row["smallest_right"] is not None]
    above = [row for row in measured if row["above_sighting"]]
    below = [row for row in proven if row["minimum"] + 2 < row["safe"]]
    print(f"pairs wanted {wanted}, measured {len(measured)}, proven right {len(proven)}, "
          f"blind {len(blind)}, faults {len(campaign.faults)}")  # fmt: skip
    print(f"above a compiler's distance {len(above)}, more than 2 below the table {len(below)}")
    for title, group in (("ABOVE SIGHTING", above), ("BLIND", blind), ("BELOW TABLE", below)):
        for row in group[:_SHOWN]:
            print(f"{title:15} {row['pair'][:70]:70} minimum {row.get('minimum')}, "
                  f"seen {row['sighting']}, table {row['safe']}")  # fmt: skip
    for fault in campaign.faults[:_SHOWN]:
        last = fault["detail"].strip().splitlines()[-1:]
        print(f"FAULT           {fault['pair'][:70]:70} {' '.join(last)[:120]}")


def _gpu_facts() -> dict[str, str]:
    from nostall.gpu.driver import Cuda

    cuda = Cuda()
    return {"gpu": cuda.name, "architecture": f"sm_{cuda.architecture}"}
