"""Evolution and random orders in equal seconds: the gain of each, kernel by kernel.

    python -m benchmarks run ptx.search_comparison --seconds-per-search 6.5 --seeds 1 \\
        --baseline benchmarks/sass/results/compiler_baseline.json --budget-s 545 \\
        --out benchmarks/ptx/results/search_comparison.json

Half of the kernels are ``unseen``: written after the searches and their parameters, in the style of
projects that no other file here uses (``benchmarks/kernels/new_projects``).  The others are of the
suites with which the searches were developed.  For each kernel the fastest of its configurations,
timed in the same call, is the start of all strategies, which take turns: the first one of a pair of
kernels is the last one of the next pair.  A strategy's winner is compared with the start in a fresh
process, interleaved with the start again (null).  No native instructions are moved.  Each (kernel,
strategy, seed) is one record, written when it is done; a second run measures only missing ones.

``--portfolio`` also compares with baseline (b): the fastest names, register budgets, options and
versions of ptxas in the compiler's order, so that a ratio over (b) is that of the order alone.
``--suite unseen`` has the unseen kernels only, ``--suite published`` the shapes of the suite.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path
from statistics import geometric_mean
from time import monotonic, sleep
from typing import Any

import numpy as np

from benchmarks.harness.comparison import comparison_record
from benchmarks.kernels.new_projects.entries import PROJECTS, new_project_entries
from benchmarks.kernels.suite import Entry, entries
from benchmarks.kernels.unseen import unseen_entries
from benchmarks.ptx.assembler_cell import Baseline, Cell, OpenDevice, over_portfolio
from benchmarks.ptx.assembler_suite import ResultFile, fastest_build, tried_options
from benchmarks.ptx.evolution import Evolve
from benchmarks.sass.build_comparison import ProcessTimer
from benchmarks.sass.compiler_baseline import load as load_baselines
from benchmarks.sass.compiler_baseline import try_build
from nostall.core import Search
from nostall.gpu import Kernel, LocalGpu, MeasurementPlan
from nostall.search.orders.operators import GIVEN, Proposal
from nostall.search.orders.random_orders import RandomOrders
from nostall.tuning.assembler.candidate import build_proposal
from nostall.tuning.assembler.job import AssemblerJob, Setup, open_setup
from nostall.tuning.settings import ASSEMBLER_TIMING, Settings
from nostall.tuning.sources.source import Source

STRATEGIES: Mapping[str, Search] = {
    "evolution": Evolve(),
    "random": RandomOrders(),
}
"""Both measure the portfolio first; then ``random`` draws each order from the start or from good
settings of the portfolio, and never from an order that it found."""
SEEN = (
    "gemm_leakyrelu-512x512x2048@mma",
    "flash_attention-1x4x8192x64@wgmma",
    "cross_entropy-*",
    "fused_feedforward-512x512x2048@wgmma",
    "attention_dq-*",
    "sgemm",
    "batched_gemm-4x512x512x2048@wgmma",
    "int4_gemm-*",
    "rmsnorm_backward-*",
    "fused_attention-1x4x2048x64@mma",
    "geglu-*",
    "batched_gemm-4x512x512x2048@mma",
)
"""Kernels (patterns) with which the searches were developed or measured before."""
UNSEEN_FIRST = (
    "linear_lse",
    "zero_point_gemm",
    "group_norm",
    "int8_attention",
    "wkv",
    "silu_attention",
    "layernorm_backward",
    "selected_attention",
    "merge_attention",
    "linear_gelu",
    "packed_gemv",
    "retention",
)
"""The unseen kernels that are compared first; then the others."""
_OVERHEAD = 12.0
"""Expected seconds of a kernel beyond its searches: set-up, races and comparisons."""
_ROUNDS = 200


def comparison_entries() -> tuple[Entry, ...]:
    """Unseen kernels and others in turn, then the unseen ones that are left."""
    known = (*entries(), *unseen_entries())
    seen = [next(e for e in known if fnmatch(e.name, pattern)) for pattern in SEEN]
    new = {entry.kernel: entry for entry in new_project_entries()}
    first = [new.pop(name) for name in UNSEEN_FIRST]
    pairs = zip_longest([*first, *new.values()], seen)
    return tuple(entry for pair in pairs for entry in pair if entry is not None)


def suite_entries(suite: str) -> tuple[Entry, ...]:
    """Kernels of ``--suite``: those of the comparison, its unseen ones, or the published suite."""
    if suite == "published":
        return tuple(entry for entry in entries() if entry.options)
    unseen = suite == "unseen"
    return tuple(e for e in comparison_entries() if not unseen or e.kernel in PROJECTS)


@dataclass(frozen=True)
class Plan:
    """What a call measures."""

    entries: tuple[Entry, ...]
    strategies: tuple[str, ...]
    seed: int
    seconds: float
    until: float
    """End of the call, of the monotonic clock."""
    checks: int
    workers: int | None
    compilers: int
    open: OpenDevice = LocalGpu
    evaluations: int | None = None
    """Limit in place of the seconds."""
    portfolio: bool = False
    """Also compare with the fastest settings in the compiler's order."""


@dataclass(frozen=True)
class Prepared:
    """A kernel that is ready for its searches."""

    baseline: Baseline
    setup: Setup
    stack: ExitStack
    """Ends the workers."""


def run(plan: Plan, options: Mapping[str, list[Any]], results: ResultFile) -> None:
    """Compare what is missing until the time is up.

    ``options``: the configurations of each kernel, by its name.
    """
    wanted = [(e, missing_strategies(plan, n, e, results)) for n, e in enumerate(plan.entries)]
    wanted = [item for item in wanted if item[1]]
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(plan.compilers, mp_context=context) as compilers,
        ThreadPoolExecutor(2) as thread,
        ProcessTimer() as timer,
    ):
        built = [[compilers.submit(try_build, e, o) for o in options[e.name]] for e, _ in wanted]
        prepared: Future[Prepared] | None = None
        for at, (entry, strategies) in enumerate(wanted):
            if monotonic() + len(strategies) * plan.seconds + _OVERHEAD > plan.until:
                print(f"{entry.name}: no time left", flush=True)
                break
            try:
                if prepared is None:
                    baseline = fastest_build([b.result() for b in built[at]], timer)
                    prepared = thread.submit(prepare, baseline, plan.workers, 0.0)
                ready, prepared = prepared.result(), None
                following = next_baseline(built[at + 1 : at + 2], timer)

                def ahead(baseline: Baseline | None = following) -> Future[Prepared] | None:
                    """Prepare the next kernel while the winner of the last search is compared."""
                    return baseline and thread.submit(
                        prepare, baseline, plan.workers, plan.seconds + 0.5
                    )

                try:
                    prepared = compare(plan, entry, ready, strategies, results, ahead)
                finally:
                    thread.submit(ready.stack.close)
            except Exception as error:  # a kernel that fails must not end the call
                prepared = None
                results.fail(Cell(entry.name, "baseline", plan.seed, 0.0), error)
                print(f"{entry.name}: failed: {error!r}"[:300], flush=True)
        if prepared is not None:
            prepared.result().stack.close()
        compilers.shutdown(wait=False, cancel_futures=True)


def next_baseline(
    built: Sequence[Sequence[Future[Source | str]]], timer: ProcessTimer
) -> Baseline | None:
    """The fastest build of the next kernel; None if it is not compiled yet, or does not run."""
    if not built or not all(future.done() for future in built[0]):
        return None
    try:
        return fastest_build([future.result() for future in built[0]], timer)
    except ValueError:  # its own turn reports it
        return None


def missing_strategies(plan: Plan, number: int, entry: Entry, results: ResultFile) -> list[str]:
    """The strategies of a kernel without a record.

    Every other pair of an unseen kernel and another one has them the other way.
    """
    names = plan.strategies if number // 2 % 2 == 0 else plan.strategies[::-1]
    return [name for name in names if (entry.name, name, plan.seed) not in results.done]


def prepare(baseline: Baseline, workers: int | None, delay: float) -> Prepared:
    """Find the command of a kernel and start its workers, after ``delay`` seconds."""
    sleep(delay)
    stack = ExitStack()
    setup = stack.enter_context(open_setup(baseline.source, workers=workers))
    start = Proposal(GIVEN, setup.space.start())
    first = [setup.pool.submit_task(build_proposal, start) for _ in range(2 * setup.pool.workers)]
    for future in first:  # so that the first search does not wait for the workers
        future.result()
    return Prepared(baseline, setup, stack)


def compare(
    plan: Plan,
    entry: Entry,
    prepared: Prepared,
    strategies: Sequence[str],
    results: ResultFile,
    ahead: Callable[[], Future[Prepared] | None] = lambda: None,
) -> Future[Prepared] | None:
    """Search one kernel with each strategy and write a record for each.

    ``ahead`` is called when the last search begins; returns its result.
    """
    following = None
    source = prepared.baseline.source
    assert source.launch is not None
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    with plan.open(kernel, MeasurementPlan(seed=plan.seed, **ASSEMBLER_TIMING)) as gpu:
        about = {
            "kernel": entry.name,
            "seed": plan.seed,
            "project": PROJECTS.get(entry.kernel),
            "unseen": entry.kernel in PROJECTS,
            "instructions": matrix_instructions(source),
            "seconds_searched": plan.seconds,
            "grid": source.launch.grid,
            "block": source.launch.block,
            "baseline": [dict(timed) for timed in prepared.baseline.timed],
            "compiled": dict(source.provenance),
            "gpu": dict(gpu.info),
        }
        for place, name in enumerate(strategies):
            if name == strategies[-1]:
                following = ahead()
            try:
                record = search(plan, name, prepared.setup, gpu)
            except Exception as error:  # the other strategy may still work
                results.fail(Cell(entry.name, name, plan.seed, plan.seconds), error)
                print(f"{entry.name} {name}: failed: {error!r}"[:300], flush=True)
                continue
            results.add({**about, "method": name, "place": place, **record})
            print(_line(results.records[-1]), flush=True)
    return following


def search(plan: Plan, name: str, setup: Setup, gpu: Any) -> dict[str, Any]:
    """Search with one strategy, and compare its winner with the start in a fresh process."""
    began = monotonic()
    settings = Settings(
        "assembler",
        seed=plan.seed,
        seconds=None if plan.evaluations else plan.seconds,
        evaluations=plan.evaluations,
        objective="gpu",
        checks=plan.checks,
        rounds=_ROUNDS,
        anneal_share=0.0,
    )
    job = AssemblerJob(setup, settings, gpu, None)
    result, winner = job.run_stages(STRATEGIES[name], (), False)
    over = comparison_record(result.decision)
    portfolio = {}
    if plan.portfolio:
        cell = Cell("", name, plan.seed, plan.seconds, plan.checks, open=plan.open)
        portfolio = over_portfolio(cell, setup, job, gpu, result.search, winner, over)
    return {
        "original_us": result.search.start_measurement.value * 1e6,
        "over_a": over,
        "deployed": over["ratio"] if over and over["verdict"] == "faster" else 1.0,
        **portfolio,
        "outputs": result.decision.outcome.status if result.decision else None,
        "counts": dict(job.objective.outcome_counts),
        "search": {
            "search_s": round(result.search.seconds, 2),
            "spent_s": {k: round(v, 2) for k, v in job.objective.phase_seconds.items()},
            "failures": job.objective.failures[:10],
            **job.describe(result, winner),
        },
        "seconds": round(monotonic() - began, 2),
    }


def matrix_instructions(source: Source) -> str | None:
    """The matrix instructions of a kernel's PTX: ``wgmma``, ``mma`` or None."""
    text = source.ptx or ""
    return next((name for name in ("wgmma", "mma") if f"{name}." in text), None)


def _line(record: Mapping[str, Any]) -> str:
    over = record["over_a"]
    shown = (
        "none" if over is None else f"{over['ratio']:.4f} [{over['low']:.4f}, {over['high']:.4f}]"
    )
    timed = record["counts"].get("timed", 0)
    return (
        f"{record['kernel']:34} {record['method']:9} {record['instructions'] or '-':5} "
        f"{record['original_us']:8.2f} us {shown} timed {timed} in {record['seconds']:.1f} s"
    )


Pair = tuple[dict[str, Any], dict[str, Any]]


def pairs_of(records: Sequence[dict[str, Any]], first: str, second: str) -> list[Pair]:
    """The records of two strategies on the same kernel with the same seed."""
    by_key = {(r["kernel"], r["method"], r["seed"]): r for r in records}
    return [
        (record, other)
        for (kernel, method, seed), record in by_key.items()
        if method == first and (other := by_key.get((kernel, second, seed))) is not None
    ]


def mean_ratio(
    groups: Sequence[Sequence[float]], draws: int = 10_000
) -> tuple[float, float, float]:
    """Mean of the geometric means of groups of ratios, with its 95 % interval.

    The bootstrap draws kernels within each group.
    """
    rng = np.random.default_rng(0)
    means = np.zeros(draws)
    mean = 0.0
    for group in groups:
        logs = np.log(np.asarray(group, dtype=np.float64))
        means += logs[rng.integers(0, len(logs), (draws, len(logs)))].mean(1) / len(groups)
        mean += float(logs.mean()) / len(groups)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    return float(np.exp(mean)), float(low), float(high)


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Each kernel, then the geometric means of the other strategies over random orders."""
    by_key = {(r["kernel"], r["seed"]): r for r in records}
    names = present_strategies(records)
    found = {(r["kernel"], r["seed"], r["method"]): r["deployed"] for r in records}
    lines = [f"{'kernel':34} {'':5} {'':6} " + " ".join(f"{name:>9}" for name in names)]
    for (kernel, seed), r in by_key.items():
        shown = (found.get((kernel, seed, name)) for name in names)
        cells = " ".join(f"{ratio:9.4f}" if ratio else f"{'-':>9}" for ratio in shown)
        kind = "unseen" if r["unseen"] else "seen"
        lines.append(f"{kernel:34} {r['instructions'] or '-':5} {kind:6} {cells}")
    for row in mean_rows(records):
        lines.append(
            "{kernels}: {pairs} pairs ({before} before random), {strategy} {own:.4f}, random "
            "{random:.4f}, {strategy} over random {ratio:.4f} [{low:.4f}, {high:.4f}]".format(**row)
        )
    return lines


def mean_rows(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Geometric means of each other strategy and of random orders on the same kernels.

    A strategy's place in the turn counts: kernels on which it was before random orders weigh as
    much as the others.
    """
    for name in present_strategies(records):
        pairs = pairs_of(records, name, "random") if name != "random" else []
        groups = {
            "all": pairs,
            "unseen": [p for p in pairs if p[0]["unseen"]],
            "seen": [p for p in pairs if not p[0]["unseen"]],
        }
        for title, group in groups.items():
            if not group:
                continue
            own, random = (geometric_mean(p[k]["deployed"] for p in group) for k in (0, 1))
            before = [p for p in group if p[0]["place"] < p[1]["place"]]
            after = [p for p in group if p[0]["place"] > p[1]["place"]]
            turns = [[a["deployed"] / b["deployed"] for a, b in t] for t in (before, after) if t]
            ratio, low, high = mean_ratio(turns)
            undivided = mean_ratio([[r for turn in turns for r in turn]])
            yield {
                "kernels": title,
                "pairs": len(group),
                "before": len(before),
                "strategy": name,
                "own": own,
                "random": random,
                "ratio": ratio,
                "low": low,
                "high": high,
                "undivided": undivided[1:],
            }


def present_strategies(records: Sequence[dict[str, Any]]) -> list[str]:
    """Strategies that have records, in the order of the table."""
    return [name for name in STRATEGIES if any(r["method"] == name for r in records)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--baseline", type=Path, required=True, help="made by benchmarks.sass.compiler_baseline"
    )
    parser.add_argument("--seconds-per-search", type=float, default=8.0)
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--kernels", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument(
        "--suite", choices=("comparison", "unseen", "published"), default="comparison"
    )
    parser.add_argument("--portfolio", action="store_true", help="compare with baseline (b), too")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--budget-s", type=float, default=540.0, help="end after so many seconds")
    parser.add_argument("--checks", type=int, default=6, help="inputs of a comparison")
    parser.add_argument("--configurations", type=int, default=2, help="committed ones, timed anew")
    parser.add_argument("--workers", type=int, help="processes that assemble; default: all cores")
    parser.add_argument("--compilers", type=int, default=4, help="processes that compile")


def main(options: argparse.Namespace) -> None:
    until = monotonic() + options.budget_s
    chosen = tuple(
        entry
        for entry in suite_entries(options.suite)
        if any(fnmatch(entry.name, pattern) for pattern in options.kernels)
    )
    committed = load_baselines(options.baseline)
    tried = {e.name: tried_options(committed, e, options.configurations) for e in chosen}
    results = ResultFile(options.out)
    for seed in options.seeds:
        plan = Plan(
            chosen,
            tuple(options.strategies),
            seed,
            options.seconds_per_search,
            until,
            options.checks,
            options.workers,
            options.compilers,
            portfolio=options.portfolio,
        )
        run(plan, tried, results)
    print("\n".join(table(results.records)))
    if results.failures:
        print(f"{len(results.failures)} failures; the last: {results.failures[-1]['error'][-600:]}")
