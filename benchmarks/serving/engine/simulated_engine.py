"""How far is the simulated engine from a real vLLM on the same requests?

    python -m benchmarks run serving.simulated_engine --traces FOLDER \\
        --out benchmarks/serving/results/simulated_engine.json

Simulates the workloads of ``serving.vllm_engine`` whose requests all arrive at once or at a rate,
with the measured step costs of the same model, and compares with the rounds of the first engine
without speculation that has some: token rate, time to the first token, time between tokens.
``--traces`` has the Azure traces of 2023.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.result_file import load, results, save
from benchmarks.serving.engine.vllm_child import lengths_of
from nostall.serving.scheduling import Limits
from nostall.serving.simulate.engine import EngineSettings, simulate
from nostall.serving.simulate.step_costs import BUILT_IN, StepCosts, load_step_costs
from nostall.serving.traces import Request

FOLDER = results("serving")
SETTINGS = EngineSettings("vllm", Limits(4096, 256, 128), uses_prefix_hashes=False)
"""As ``serving.vllm_child`` starts vLLM; the KV cache is that of the record."""


def measured(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the rounds of a workload."""
    return {
        "output_tokens_per_s": fmean(row["output_tokens_per_s"] for row in rows),
        "ttft_p50_s": fmean(row["ttft_s"]["p50"] for row in rows),
        "tbt_p50_s": fmean(row["tbt_s"]["p50"] for row in rows),
        "steps": fmean(row["steps"] for row in rows),
    }


def simulated(
    workload: str, count: int, traces: Path, costs: StepCosts, settings: EngineSettings
) -> dict[str, float]:
    """The same figures of the simulated engine."""
    name, _, rate = workload.partition("@")
    requests = [
        Request(index / float(rate) if rate else 0.0, prompt, output)
        for index, (prompt, output) in enumerate(lengths_of(name, traces, count, 0))
    ]
    metrics = simulate(requests, costs, settings)
    return {
        "output_tokens_per_s": metrics.output_tokens_per_s,
        "ttft_p50_s": metrics.time_to_first_token.p50,
        "tbt_p50_s": metrics.time_between_tokens.p50,
        "steps": float(metrics.steps),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", type=Path, required=True, help="folder of the Azure traces")
    parser.add_argument("--engine", type=Path, default=FOLDER / "vllm_engine.json")
    parser.add_argument("--costs", type=Path, default=BUILT_IN)
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    """Compare all workloads and write the file."""
    costs = load_step_costs(options.costs)
    engines = load(options.engine)["engines"]
    engine = next(e for e in engines if e["speculate"] == 0 and e["rounds"])
    settings = replace(SETTINGS, kv_tokens=engine.get("kv_tokens"))
    rows = []
    for workload in dict.fromkeys(row["workload"] for row in engine["rounds"]):
        rounds = [row for row in engine["rounds"] if row["workload"] == workload]
        real = measured(rounds)
        model = simulated(workload, rounds[0]["requests"], options.traces, costs, settings)
        errors = {name: model[name] / real[name] - 1 for name in real}
        each = [measured([row]) for row in rounds]
        spread = {name: max(r[name] for r in each) / min(r[name] for r in each) for name in real}
        rows.append(
            {"workload": workload, "measured": real, "modelled": model, "error": errors,
             "spread": spread}
        )  # fmt: skip
        print(workload, {name: f"{error:+.1%}" for name, error in errors.items()}, flush=True)
    means = {name: fmean(abs(row["error"][name]) for row in rows) for name in rows[0]["error"]}
    print("mean absolute error", {name: f"{error:.1%}" for name, error in means.items()})
    save(
        options.out, kind="both, compared", gpu=engine["gpu"], engine=engine["backend"], rows=rows,
        mean_error=means,
    )  # fmt: skip
