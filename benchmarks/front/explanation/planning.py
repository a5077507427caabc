"""Figures of ``docs/explanation/pipeline-planners.md``."""

from __future__ import annotations

from benchmarks.harness.result_file import load, results


def figures() -> dict[str, str]:
    """Name -> text."""
    merging = load(results("parallel") / "planning_time.json")["merging"]
    times = {row["cuts"]: row["modelled_iteration_s"] for row in merging}
    found = {
        f"merged-{cuts}": f"{100 * (times[cuts] / times[max(times)] - 1):.1f} %"
        for cuts in (50, 25)
    }
    for model in ("BERT-48", "GNMT-16"):
        rates = [
            f"{row['implied_gbytes_per_s']:.2f}"
            for row in load(results("parallel") / "dapple_tables.json")["implied_bandwidth"]
            if model in row["row"]
        ]
        found[f"implied-{model}"] = f"{', '.join(rates[:-1])} and {rates[-1]} GB/s"
    return found
