"""How far predictions are off: rows of README's second table."""

from __future__ import annotations

from statistics import median

import numpy as np

from benchmarks.harness.rank_agreement import kendall
from benchmarks.harness.result_file import load, results


def predictions() -> list[tuple[str, str, str]]:
    """(what is predicted, error, of what and where)."""
    return [*_pipelines(), *_shardings(), _jobs(), _kinds()]


def _pipelines() -> list[tuple[str, str, str]]:
    rows = []
    for gpus in (2, 4):
        found = load(results("parallel") / f"predicted_vs_measured_{gpus}.json")["summary"]
        mean, worst = 100 * found["mape"], 100 * found["worst_error"]
        error = f"{mean:.1f} % in the mean, {worst:.0f} % at most"
        rows.append(("[pipeline iteration](docs/results/parallel.md)", error,
                     f"{found['points']} plans, {gpus} H200"))  # fmt: skip
    return rows


def _shardings() -> list[tuple[str, str, str]]:
    content = load(results("sharding") / "gpu_hybrids_4.json")
    rows = []
    for name, found in content["summary"]["models"].items():
        times = np.array([
            (r["predicted_s"], r["measured_s"])
            for r in content["records"] if r["model"] == name and r.get("predicted_s")
        ]).T  # fmt: skip
        error = (
            f"{100 * found['mape']:.0f} % in the mean; tau-b {kendall(*times):.2f} over all pairs"
        )
        rows.append((f"[sharded step, {name}](docs/results/parallel.md)", error,
                     f"{found['plans']} plans, 4 H200"))  # fmt: skip
    return rows


def _jobs() -> tuple[str, str, str]:
    record = load(results("workload") / "fit.json")
    errors = [abs(model["fitted_error"]["step"]) for model in record["models"]]
    error = f"{100 * median(errors):.0f} % in the median, {100 * max(errors):.0f} % at most"
    return "[training step from a table](docs/results/workload.md)", error, (
        f"{len(errors)} models, {record['about']['device'].removeprefix('NVIDIA ')}"
    )  # fmt: skip


def _kinds() -> tuple[str, str, str]:
    """The papers' learners beside the plain classifier that is used."""
    record = load(results("learners") / "operators.json")
    accuracy = {name: found["known_accuracy"] for name, found in record["methods_test"].items()}
    papers = f"{accuracy['max-margin, fixed spectrum']:.2f} and {accuracy['topics']:.2f}"
    return (
        "[kind of a training step](docs/results/learners.md)",
        f"accuracy {accuracy['forest']:.2f} (random forest; the papers' learners {papers})",
        f"{len(record['kinds'])} generated kinds, CPU",
    )
