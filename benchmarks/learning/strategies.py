"""Compare learning strategies with annealing on the SM model, at equal numbers of evaluations.

    python -m benchmarks run learning.strategies --out benchmarks/learning/results/strategies.json

Each (kernel, strategy, seed) is one record. The file is written after each record, and a second run
computes only missing records. ``--jobs`` is the number of processes, each with one thread.
``ppo-trained`` starts from a policy that was trained on the other half of the kernels, with
``--rollouts`` rollouts for each kernel; these steps do not count as evaluations. ``sip`` restarts
when its published run ends. ``python -m benchmarks page learning`` writes docs/results/learning.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import sources
from nostall.core import Budget, Checkpoint, Search, Trial
from nostall.core.errors import BadInput
from nostall.papers.game.cuasmrl.search import Cuasmrl
from nostall.papers.game.ppo.learner import GraphPpoParameters, TrainingKernel, train
from nostall.papers.game.ppo.policy import load_policy, save_policy
from nostall.papers.game.ppo.search import PpoSearch
from nostall.papers.game.randomness import isolated_random_state
from nostall.sass.model import SmModel
from nostall.sass.schedule import ScheduleSpace
from nostall.search import Anneal, RandomSearch, Sip
from nostall.tuning.sources.corpus import modelled_problem

KERNELS = (
    "batched_gemm",
    "dot_product",
    "gemm_leakyrelu",
    "rmsnorm",
    "softmax",
    "transpose",
)


class Curve:
    """Search observer that records (evaluations, value) of each improvement."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def on_trial(self, trial: Trial) -> None:
        if not self.points or trial.best < self.points[-1][1]:
            self.points.append((trial.index + 1, trial.best))

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Ignore checkpoints."""


def strategies(policy: Path) -> dict[str, Search]:
    """The compared strategies by name; ``policy`` is the policy file of ``ppo-trained``."""
    return {
        "anneal": Anneal(),
        "sip": Sip(restarts=True),
        "random": RandomSearch(),
        "cuasmrl": Cuasmrl(),
        "ppo": PpoSearch(),
        "ppo-trained": PpoSearch(policy=policy),
    }


def train_policy(
    kernels: Mapping[str, tuple[ScheduleSpace, SmModel]], rollouts: int, path: Path
) -> None:
    """Train a policy on these kernels and save it to ``path``.

    Resumes an interrupted training and does nothing if the policy exists. Exits if the existing
    policy was trained with other settings.
    """
    about = {"kernels": list(kernels), "rollouts": rollouts}
    if path.exists():
        existing = load_policy(path)[1]["about"]
        if existing != about:
            raise SystemExit(
                f"{path} was trained with {existing}, not {about}; choose another --work"
            )
        return
    checkpoint = path.with_suffix(".checkpoint")
    training_kernels = [TrainingKernel(name, *pair) for name, pair in kernels.items()]
    with isolated_random_state():
        policy = train(training_kernels, GraphPpoParameters(), rollouts, checkpoint=checkpoint)
    save_policy(policy, path, about)


@cache
def problem(arch: str, name: str) -> tuple[ScheduleSpace, SmModel]:
    """Schedule space and SM model of an example kernel, cached in each process."""
    return next(modelled_problem(source) for label, source in sources(arch) if label == name)


def run_search(
    arch: str, name: str, strategy: str, policy: Path, evaluations: int, seed: int
) -> dict[str, Any]:
    """Run one search; returns its record with gain, learning curve and processor seconds."""
    space, model = problem(arch, name)
    curve, began, search = Curve(), process_time(), strategies(policy)[strategy]
    result = search.run(space, model, Budget(evaluations=evaluations), seed=seed, observers=[curve])
    start = result.start_measurement.value
    return {
        "kernel": name,
        "strategy": strategy,
        "kind": "modelled",
        "seed": seed,
        "evaluations": result.evaluations,
        "stopped": result.stopped,
        "ratio": result.ratio,
        "processor_s": round(process_time() - began, 2),
        "curve": [[at, round(start / best, 6)] for at, best in curve.points],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--evaluations", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=30, help="of training, per kernel")
    parser.add_argument("--kernel", nargs="*", default=KERNELS)
    parser.add_argument("--strategy", nargs="*", default=list(strategies(Path())))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/game"), help="for policies")


def main(options: argparse.Namespace) -> None:
    options.work.mkdir(parents=True, exist_ok=True)
    kernels = {n: modelled_problem(s) for n, s in sources(options.arch) if n in options.kernel}
    names = sorted(kernels)
    halves = (names[::2], names[1::2])
    policies = [options.work / f"half{number}.safetensors" for number in (0, 1)]
    if "ppo-trained" in options.strategy:
        for number, path in enumerate(policies):
            if halves[number]:
                train_policy({n: kernels[n] for n in halves[number]}, options.rollouts, path)
    settings = {k: getattr(options, k) for k in ("arch", "evaluations", "rollouts")}
    settings["kernels"] = names
    records: list[dict[str, Any]] = []
    if options.out.exists():
        before = json.loads(options.out.read_text())
        if {k: before.get(k) for k in settings} != settings:
            raise BadInput(f"{options.out} was made with other settings; choose another file")
        records = before["records"]
    done = {(r["kernel"], r["strategy"], r["seed"]) for r in records}
    jobs = [
        # The policy of the other half was not trained on this kernel.
        (options.arch, name, strategy, policies[1 - number % 2], options.evaluations, seed)
        for seed in range(options.seeds)
        for number, name in enumerate(names)
        for strategy in options.strategy
        if (name, strategy, seed) not in done and (strategy != "sip" or kernels[name][1].flops)
    ]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for future in as_completed(pool.submit(run_search, *job) for job in jobs):
            records.append(future.result())
            last = records[-1]
            label = f"{last['kernel']:20} {last['strategy']:12} seed {last['seed']}"
            print(f"{label} {last['ratio']:.4f} {last['processor_s']:.0f} s", flush=True)
            save(options.out, **settings, records=records)
    save(options.out, **settings, records=records)
