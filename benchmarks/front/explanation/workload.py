"""Figures of ``docs/explanation/workload.md``."""

from __future__ import annotations

from benchmarks.harness.result_file import load, results

FOLDER = results("workload")


def figures() -> dict[str, str]:
    """Name -> text."""
    found = {}
    for row in load(FOLDER / "slowdown.json")["leaving_one_of_all_out"]:
        fitted = row["fitted_on_others"]
        found[f"error-{row['model']}"] = f"{100 * fitted['mape']:.1f} %"
        found[f"covered-{row['model']}"] = f"{100 * fitted['covered_by_90']:.1f} %"
    bytes_errors = [
        -100 * error
        for model in load(FOLDER / "fit.json")["models"]
        for error in model["bytes_error"].values()
    ]
    tracelens = [
        100 * abs(difference)
        for record in load(FOLDER / "tracelens.json")["records"]
        for difference in record["difference_of_total"].values()
    ]
    ranks = load(FOLDER / "fit.json")
    alone = {row["model"]: row for row in ranks["exchanged"]}
    shares = [row["fitted_ms"] / row["measured_ms"] for row in alone.values()]
    apart, overlaps = _beside_hta()
    return found | {
        "without-waiting": f"{-100 * ranks['all_ranks']['fitted_error']:.0f} %",
        "exchanged": f"{min(shares):.1f} to {max(shares):.1f} times",
        "hta-named": f"{100 * max(apart.pop(_COARSE)):.1f} %",
        "hta": f"{100 * max(value for values in apart.values() for value in values):.1f} %",
        "hta-overlap": f"{max(overlaps):.1f} points",
        "bytes-error": f"{min(bytes_errors):.0f} to {max(bytes_errors):.0f} %",
        "tracelens": f"{max(tracelens):.1f} %",
    }


_COARSE = "critical_path_alexnet"


def _beside_hta() -> tuple[dict[str, list[float]], list[float]]:
    """Differences of times as shares of the span by trace, and of overlaps in points."""
    records = load(FOLDER / "hta.json")["records"]
    apart = {
        _COARSE if row["trace"].startswith(_COARSE) else row["trace"]:
        [abs(value) for value in row["difference_of_total"].values()]
        for row in records
    }  # fmt: skip
    overlaps = [
        100 * abs(row["nostall"]["overlap"] - row["hta"]["overlap"])
        for row in records
        if row["nostall"]["overlap"] is not None and row["hta"]["overlap"] is not None
    ]
    return apart, overlaps
