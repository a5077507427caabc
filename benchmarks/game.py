"""Learning against annealing on the model, at equal evaluations.

    python -m benchmarks.game --evaluations 12800 --seeds 5 --out benchmarks/results/game.json

Each (kernel, strategy, seed) is one record, written when it is done; a second run does only what is
missing.  ``--jobs`` runs so many at a time, each with one thread.  ``ppo-trained`` begins with a
policy that learned on the kernels of the other half, for ``--rollouts`` rollouts each; those turns
are not in its evaluations.  ``sip`` is restarted when its one published run ends.  Evaluations to
95 % of the best known gain count from each run's beginning.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from benchmarks.example_kernels import sources
from benchmarks.provenance import save
from nostall.core import Budget, Checkpoint, Search, Trial
from nostall.sass.game.cuasmrl import Cuasmrl
from nostall.sass.game.learning import Ppo
from nostall.sass.game.policy import save_policy
from nostall.sass.game.ppo import LearnedSearch
from nostall.sass.game.randomness import kept_apart
from nostall.sass.game.training import Lesson, train
from nostall.sass.model import SmModel
from nostall.sass.schedule import ScheduleSpace
from nostall.search import Anneal, RandomSearch, Sip
from nostall.tuning.corpus import modelled

KERNELS = (
    "batched_gemm",
    "dot_product",
    "fused_attention",
    "gemm_leakyrelu",
    "gemm_leakyrelu@mma",
    "rmsnorm",
    "softmax",
    "transpose",
)
PART = 0.95
"""Part of the best known gain that has to be reached."""


class Curve:
    """Observer: evaluations and value of each improvement."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def on_trial(self, trial: Trial) -> None:
        if not self.points or trial.best < self.points[-1][1]:
            self.points.append((trial.index + 1, trial.best))

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Nothing to keep."""


def strategies(policy: Path) -> dict[str, Search]:
    """The contestants; ``policy`` is for the kernel that is next."""
    return {
        "anneal": Anneal(),
        "sip": Sip(restarts=True),
        "random": RandomSearch(),
        "cuasmrl": Cuasmrl(),
        "ppo": LearnedSearch(),
        "ppo-trained": LearnedSearch(policy=policy),
    }


def teach(kernels: Mapping[str, tuple[ScheduleSpace, SmModel]], rollouts: int, path: Path) -> None:
    """A policy that learned on these kernels; a training that was cut off goes on."""
    checkpoint = path.with_suffix(".checkpoint")
    lessons = [Lesson(name, space, model) for name, (space, model) in kernels.items()]
    with kept_apart():
        policy = train(lessons, Ppo(), rollouts, checkpoint=checkpoint)
    save_policy(policy, path, {"kernels": list(kernels), "rollouts": rollouts})


@cache
def kernel(arch: str, name: str) -> tuple[ScheduleSpace, SmModel]:
    """The space and the model of an example kernel; each process makes its own."""
    return next(modelled(source) for other, source in sources(arch) if other == name)


def race(
    arch: str, name: str, strategy: str, policy: Path, evaluations: int, seed: int
) -> dict[str, Any]:
    """One run: its gain, its curve and its cost."""
    space, model = kernel(arch, name)
    curve, began, search = Curve(), process_time(), strategies(policy)[strategy]
    found = search.run(space, model, Budget(evaluations=evaluations), seed=seed, observers=[curve])
    start = found.start_measurement.value
    return {
        "kernel": name,
        "strategy": strategy,
        "kind": "modelled",
        "seed": seed,
        "evaluations": found.evaluations,
        "stopped": found.stopped,
        "ratio": found.ratio,
        "processor_s": round(process_time() - began, 2),
        "curve": [[at, round(start / best, 6)] for at, best in curve.points],
    }


def reached(curve: Sequence[Sequence[float]], ratio: float) -> int | None:
    """Evaluations after which the curve is at ``ratio``; None when it never is."""
    return next((int(at) for at, value in curve if value >= ratio), None)


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per kernel and strategy: gains, evaluations to 95 % of the best known, the median curve with
    its quartiles."""
    rows = []
    for kernel in sorted({r["kernel"] for r in records}):
        mine = [r for r in records if r["kernel"] == kernel]
        best = max(r["ratio"] for r in mine)
        wanted = 1.0 + PART * (best - 1.0)
        for strategy in sorted({r["strategy"] for r in mine}):
            runs = [r for r in mine if r["strategy"] == strategy]
            ratios = [r["ratio"] for r in runs]
            needed = [reached(r["curve"], wanted) for r in runs]
            rows.append(
                {
                    "kernel": kernel,
                    "strategy": strategy,
                    "seeds": len(runs),
                    "median_ratio": float(np.median(ratios)),
                    "low": min(ratios),
                    "high": max(ratios),
                    "best_known": best,
                    "reached_95": sum(n is not None for n in needed),
                    "evaluations_to_95": needed,
                    "curve": _quartiles([r["curve"] for r in runs], runs[0]["evaluations"]),
                }
            )
    return rows


def _quartiles(curves: Sequence[Sequence[Sequence[float]]], evaluations: int) -> list[list[float]]:
    """[evaluations, lower quartile, median, upper quartile] at doubling numbers of evaluations."""
    grid = sorted({*(2**k for k in range(int(np.log2(evaluations)) + 1)), evaluations})
    rows = []
    for at in grid:
        values = [max(v for n, v in curve if n <= at) for curve in curves]
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
        rows.append([at, *(round(float(x), 6) for x in (low, median, high))])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--evaluations", type=int, default=12_800)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=100, help="of training, per kernel")
    parser.add_argument("--kernel", nargs="*", default=KERNELS)
    parser.add_argument("--strategy", nargs="*", default=list(strategies(Path())))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/game"), help="for policies")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    kernels = {n: modelled(s) for n, s in sources(options.arch) if n in options.kernel}
    names = sorted(kernels)
    halves = (names[::2], names[1::2])
    policies = [options.work / f"half{number}.safetensors" for number in (0, 1)]
    if "ppo-trained" in options.strategy:
        for number, path in enumerate(policies):
            if not path.exists() and halves[number]:
                teach({n: kernels[n] for n in halves[number]}, options.rollouts, path)
    asked = {k: getattr(options, k) for k in ("arch", "evaluations", "rollouts")}
    records: list[dict[str, Any]] = []
    if options.out.exists():
        before = json.loads(options.out.read_text())
        if {k: before.get(k) for k in asked} != asked:
            parser.error(f"{options.out} was made with other settings; choose another file")
        records = before["records"]
    done = {(r["kernel"], r["strategy"], r["seed"]) for r in records}
    jobs = [
        # A policy that has not seen this kernel.
        (options.arch, name, strategy, policies[1 - number % 2], options.evaluations, seed)
        for seed in range(options.seeds)
        for number, name in enumerate(names)
        for strategy in options.strategy
        if (name, strategy, seed) not in done and (strategy != "sip" or kernels[name][1].flops)
    ]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for found in as_completed(pool.submit(race, *job) for job in jobs):
            records.append(found.result())
            last = records[-1]
            said = f"{last['kernel']:20} {last['strategy']:12} seed {last['seed']}"
            print(f"{said} {last['ratio']:.4f} {last['processor_s']:.0f} s", flush=True)
            save(options.out, **asked, summary=summary(records), records=records)


if __name__ == "__main__":
    main()
