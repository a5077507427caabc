"""Published results of DAPPLE, compared with the planner and simulator of nostall (modelled).

    NOSTALL_DAPPLE_PROFILES=FOLDER python -m benchmarks run parallel.dapple_tables \\
        --out benchmarks/parallel/results/dapple_tables.json

FOLDER contains the files of the authors' ``profiling_results``, which are not in this repository.
The clusters are examples/clusters/dapple-*.toml; all rows use the same constants.  A published plan
matches if its simulated time is within 2 % of the best plan: the plan of the planner ``dapple``, or
data parallelism with all samples of a replica in one pass.  It is also compared by the formula of
the paper, among the plan shapes of the paper (dapple_formula).  A speed-up matches if it is within
10 % of the published (measured) one.  Source: arXiv:2007.01045, tables 3 to 7, figure 12.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.parallel.dapple.formula import best_by_formula, data_parallel, formula_s, one_pass
from benchmarks.parallel.dapple.memory import table_5, table_7
from benchmarks.parallel.dapple.profiles import load_published
from nostall.parallel.cluster import load_cluster
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners import Effort, make_plan
from nostall.parallel.simulate import simulated_s

CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"
PLAN_TOLERANCE, SPEED_TOLERANCE = 0.02, 0.10
UNTIMED_S = 3600.0
"""A time limit for planners that is never reached, so the result does not depend on the machine."""


@dataclass(frozen=True)
class Row:
    """A published plan."""

    where: str
    """Table or figure, model and cluster."""
    profile: str
    cluster: str
    global_batch: int
    sizes: tuple[int, ...]
    """GPUs of each stage; empty if only the speed-up is published (the plan of nostall is used)."""
    ends: tuple[int, ...] = ()
    """End of each stage in layers of the profile; empty if the cuts are not published (the best
    ones are used)."""
    speedup: float | None = None


ROWS = (
    Row("table 6, VGG-19", "vgg-19-pbs-32", "a-2x8", 1024, (14, 2), (16, 25), 9.6),
    Row("table 6, BERT-Large", "bert-24-pbs-6", "a-2x8", 128, (8, 8), (16, 29), 14.5),
    Row("figure 12, VGG-19, 4 x 8", "vgg-19-pbs-32", "a-4x8", 1024, (), (), 16.3),
    Row("figure 12, BERT-Large, 4 x 8", "bert-24-pbs-6", "a-4x8", 128, (), (), 24.4),
    Row("table 4, VGG-19, A", "vgg-19-pbs-32", "a-2x8", 2048, (16,)),
    Row("table 4, VGG-19, B", "vgg-19-pbs-32", "b-16x1", 2048, (16,)),
    Row("table 4, VGG-19, C", "vgg-19-pbs-32", "c-16x1", 2048, (15, 1)),
    Row("table 4, GNMT-16, A", "gnmt-16-pbs-64", "a-2x8", 1024, (8, 8), (9, 16)),
    Row("table 4, GNMT-16, B", "gnmt-16-pbs-64", "b-16x1", 1024, (8, 8), (9, 16)),
    Row("table 4, GNMT-16, C", "gnmt-16-pbs-64", "c-16x1", 1024, (1,) * 16),
    Row("table 4, BERT-48, A", "bert-48-pbs-2", "a-2x8", 64, (8, 8), (27, 53)),
    Row("table 4, BERT-48, B", "bert-48-pbs-2", "b-16x1", 64, (1,) * 16),
    Row("table 4, BERT-48, C", "bert-48-pbs-2", "c-16x1", 64, (1,) * 16),
)
PUBLISHED_ACR = {
    "table 4, GNMT-16, A": 0.10,
    "table 4, GNMT-16, B": 0.10,
    "table 4, GNMT-16, C": 3.75,
    "table 4, BERT-48, A": 0.06,
    "table 4, BERT-48, B": 0.50,
    "table 4, BERT-48, C": 1.25,
}
"""Table 4: communication over computation (ACR), mean over the stages."""
PUBLISHED_PB_OVER_PA = {"bert-48-pbs-2": 1.0, "vgg-19-pbs-32": 1.1, "gnmt-16-pbs-64": 1.31}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    folder = os.environ.get("NOSTALL_DAPPLE_PROFILES")
    if folder is None:
        print("set NOSTALL_DAPPLE_PROFILES to a folder with DAPPLE's profiling_results")
        sys.exit(3)
    rows = [_row(Path(folder), row) for row in ROWS]
    for row in rows:
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    policies = [_policies(Path(folder), name) for name in PUBLISHED_PB_OVER_PA]
    print(policies)
    two = load_cluster(CLUSTERS / "dapple-b-16x1.toml")
    memory = table_5(Path(folder), two)
    scaling = table_7(Path(folder), two)
    implied = [_implied(Path(folder), row) for row in ROWS if row.where in PUBLISHED_ACR]
    for record in (*memory, *scaling, *implied):
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in record.items()})
    save(
        options.out,
        kind="modelled",
        rows=rows,
        pb_over_pa=policies,
        memory=memory,
        scaling=scaling,
        implied_bandwidth=implied,
        matching=_count_matches(rows),
    )


def _count_matches(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Number of matches among the rows that have a published value."""
    counts = {}
    for key in ("plan_matches", "plan_matches_by_formula", "speedup_matches"):
        verdicts = [row[key] for row in rows if row[key] is not None]
        counts[key] = f"{sum(verdicts)} of {len(verdicts)}"
    print(counts)
    return counts


def _work(folder: Path, profile: str, cluster: str, global_batch: int) -> Workload:
    return Workload(
        load_published(folder / f"{profile}.txt"),
        load_cluster(CLUSTERS / f"dapple-{cluster}.toml"),
        global_batch,
        fractions=True,
    )


def _row(folder: Path, row: Row) -> dict[str, Any]:
    work = _work(folder, row.profile, row.cluster, row.global_batch)
    dapple = make_plan(work, "dapple", Effort(UNTIMED_S))
    one_pass_s = simulated_s(one_pass(work), data_parallel(work))
    best = dapple if simulated_s(work, dapple) <= one_pass_s else data_parallel(work)
    best_s = min(simulated_s(work, dapple), one_pass_s)
    published = _published_plan(work, row) if row.sizes else best
    published_s = one_pass_s if len(published.stages) == 1 else simulated_s(work, published)
    nostall = make_plan(work, "nostall", Effort(UNTIMED_S, 1200))
    speedup = work.sequential_s / published_s
    return {
        "row": row.where,
        "published": published.split if row.sizes else None,
        "ours": best.split,
        "our_ends": [s.end for s in best.stages],
        "dapple_without_one_pass": dapple.split,
        "published_plan_over_best": published_s / best_s,
        "plan_matches": None if not row.sizes else published_s <= (1 + PLAN_TOLERANCE) * best_s,
        **(_by_formula(work, row, published) if row.sizes else _NO_FORMULA),
        "modelled_speedup_of_published": speedup,
        "modelled_speedup_of_best": work.sequential_s / best_s,
        "modelled_speedup_of_nostall": work.sequential_s / simulated_s(work, nostall),
        "published_speedup": row.speedup,
        "speedup_matches": None
        if row.speedup is None
        else abs(speedup / row.speedup - 1) <= SPEED_TOLERANCE,
    }


_NO_FORMULA = {"best_by_formula": None, "plan_matches_by_formula": None}


def _by_formula(work: Workload, row: Row, published: Plan) -> dict[str, Any]:
    best = best_by_formula(work)
    # The cuts of a straight plan are not published: those that the formula prefers are used.
    is_same = best.split == published.split and not row.ends
    over = 1.0 if is_same else formula_s(work, published) / formula_s(work, best)
    return {
        "best_by_formula": best.split,
        "formula_published_over_best": over,
        "plan_matches_by_formula": over <= 1 + PLAN_TOLERANCE,
    }


def _published_plan(work: Workload, row: Row) -> Plan:
    """The published plan; if its cuts are not published, those with the smallest simulated time.

    All cuts are tried for two stages; more stages have a local search.
    """
    first_gpus = [sum(row.sizes[:i]) for i in range(len(row.sizes))]
    groups = [tuple(range(a, a + n)) for a, n in zip(first_gpus, row.sizes, strict=True)]
    if row.ends:
        return _plan(row.ends, groups)
    layers, stages = len(work.profile), len(row.sizes)
    if stages == 1:
        return _plan((layers,), groups)
    if stages == 2:
        plans = [_plan((end, layers), groups) for end in range(1, layers)]
        return min(plans, key=lambda plan: simulated_s(work, plan))
    time = [f + b for f, b in zip(work.forward_s, work.backward_s, strict=True)]
    shares = [sum(row.sizes[: i + 1]) / sum(row.sizes) * time[-1] for i in range(stages)]
    ends = [min(range(layers + 1), key=lambda j, x=x: abs(time[j] - x)) for x in shares[:-1]]
    for i in range(len(ends)):
        ends[i] = max(ends[i], (ends[i - 1] if i else 0) + 1)
    return _local_search(work, [*ends, layers], groups)


def _local_search(work: Workload, ends: list[int], groups: Sequence[tuple[int, ...]]) -> Plan:
    best = simulated_s(work, _plan(ends, groups))
    improved = True
    while improved:
        improved = False
        for i in range(len(ends) - 1):
            for step in (-3, -2, -1, 1, 2, 3):
                moved = [*ends[:i], ends[i] + step, *ends[i + 1 :]]
                if (moved[i - 1] if i else 0) < moved[i] < moved[i + 1]:
                    seconds = simulated_s(work, _plan(moved, groups))
                    if seconds < best:
                        best, ends, improved = seconds, moved, True
    return _plan(ends, groups)


def _plan(ends: Sequence[int], groups: Sequence[tuple[int, ...]], policy: Policy = "pb") -> Plan:
    starts = [0, *ends[:-1]]
    return Plan(tuple(Stage(a, b, g) for a, b, g in zip(starts, ends, groups, strict=True)), policy)


def _policies(folder: Path, profile: str) -> dict[str, Any]:
    """Table 3: the orders PB and PA on configuration A, for the published plan."""
    row = next(r for r in ROWS if r.profile == profile and r.cluster == "a-2x8")
    work = _work(folder, profile, "a-2x8", row.global_batch)
    stages = _published_plan(work, row).stages
    pa, pb = (simulated_s(work, Plan(stages, policy)) for policy in ("pa", "pb"))
    return {
        "profile": profile,
        "split": Plan(stages).split,
        "modelled_pb_over_pa": pa / pb,
        "published_pb_over_pa": PUBLISHED_PB_OVER_PA[profile],
    }


def _implied(folder: Path, row: Row) -> dict[str, Any]:
    """The link bandwidth that a published communication-to-computation ratio implies.

    Communication is one activation, in slices over as many links as a stage has GPUs; computation
    is the forward pass of a stage.  Counting both passes and both directions gives a quarter less.
    """
    work = _work(folder, row.profile, row.cluster, row.global_batch)
    middle = len(work.profile) // 2
    stage_s = work.forward_s[-1] / sum(row.sizes)  # a stage's share of layers over its GPUs
    slice_bytes = work.cut_bytes[middle] / row.sizes[0]
    port = float(work.cluster.ports[0])
    return {
        "row": row.where,
        "published_acr": PUBLISHED_ACR[row.where],
        "implied_gbytes_per_s": slice_bytes / (PUBLISHED_ACR[row.where] * stage_s) * 1e-9,
        "line_rate_gbytes_per_s": port * 1e-9,
    }
