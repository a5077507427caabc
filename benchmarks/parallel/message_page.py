"""Section of ``docs/results/parallel.md``: why predictions for the GPT were too low."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render

Row = Mapping[str, Any]
FOLDER = results("parallel")
PASSES = FOLDER / "pass_times_4.json"
PROFILES = (FOLDER / "profile_error_2.json", FOLDER / "profile_error_4.json")
AHEAD, NEEDED = "one operation ahead", "when needed"
LABELS = {
    "default": AHEAD,  # of the first version of the benchmark
    "received one operation ahead": AHEAD,
    "received when needed": NEEDED,
    "messages first": f"{AHEAD}, messages before operators",
}
"""When receives start, by the setting of a record."""


def section() -> str:
    """The whole section."""
    records = [_over_profile(record) for record in load(PASSES)["records"]]
    even = {r["setting"]: r for r in records if r["plan"] == "even 1f1b"}
    # Its last backward pass runs beside all-reduces.
    replicas = next(r for r in records if r["plan"] == "data-parallel")
    values = {
        "ahead": even[AHEAD],
        "needed": even[NEEDED],
        "passes_file": PASSES,
        "gpus": [f"GPU {number}" for number in range(len(records[0]["ranks"]))],
        "passes": [r for r in records if r["plan"] != "data-parallel"],
        "replicas": replicas,
        "whole_backward_s": len(replicas["ranks"]) * replicas["ranks"][0]["predicted_backward_s"],
        "chain": next(
            r
            for r in load(FOLDER / "predicted_vs_measured_4.json")["records"]
            if (r["model"], r["links"]) == ("chain", "fast") and "data-parallel" in r["name"]
        ),
        "profiles": [
            {**record, "gpus": load(path)["gpus"], "file": path}
            for path in PROFILES
            for record in load(path)["records"]
        ],
    }
    return render(__file__, values)


def _over_profile(record: Row) -> Row:
    """A record with the times of its passes over the profile, by GPU: forward and backward."""
    ratios = [
        [rank[f"{kind}_s"] / rank[f"predicted_{kind}_s"] for kind in ("forward", "backward")]
        for rank in record["ranks"]
    ]
    return {
        **record,
        "setting": LABELS[record["setting"]],
        "ratios": ratios,
        "slowest": max(map(max, ratios)),
    }
