"""Compare search strategies on the SM model, at equal numbers of evaluations.

    python -m benchmarks run sass.strategies_on_model --evaluations 5000 --seeds 8 \\
        --out benchmarks/sass/results/strategies_on_model.json

``sip`` is the published annealing. One of its runs ends after 998 steps, so it restarts from the
original until the evaluations are used up (``restarts=True``), which can only improve its result.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import sources
from nostall.core import Budget
from nostall.core.search import Search
from nostall.sass import Program
from nostall.sass.model import SmModel
from nostall.sass.schedule import ScheduleSpace
from nostall.search import Anneal, RandomSearch, Sip


def strategies() -> dict[str, Search]:
    """The compared strategies by name."""
    return {"anneal": Anneal(), "sip": Sip(restarts=True), "random": RandomSearch()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--evaluations", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=8)


def main(options: argparse.Namespace) -> None:
    records = []
    for name, source in sources(options.arch):
        program = Program.from_cubin(source.cubin)
        space = ScheduleSpace(program, program.kernel(source.kernel))
        assert source.launch is not None
        for strategy, search in strategies().items():
            if strategy == "sip" and source.launch.flops is None:
                print(f"{name}: no floating-point work, so sip has no objective")
                continue
            for seed in range(options.seeds):
                model = SmModel(program, space.function, source.launch)
                result = search.run(
                    space, model, Budget(evaluations=options.evaluations), seed=seed
                )
                records.append(
                    {
                        "kernel": name,
                        "arch": options.arch,
                        "kind": "modelled",
                        "strategy": strategy,
                        "seed": seed,
                        "evaluations": result.evaluations,
                        "rejected": result.rejected,
                        "original_us": result.start_measurement.value * 1e6,
                        "best_us": result.best_measurement.value * 1e6,
                        "ratio": result.ratio,
                        "seconds": round(result.seconds, 2),
                    }
                )
        kernel_records = [r for r in records if r["kernel"] == name]
        means = {
            s: sum(r["ratio"] for r in kernel_records if r["strategy"] == s) / options.seeds
            for s in strategies()
        }
        print(f"{name:32}", "  ".join(f"{s} {v:.4f}" for s, v in means.items()), flush=True)
    save(options.out, evaluations=options.evaluations, records=records)
