"""Sections of the page of the learners: kernels without names, tests of the samplers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.result_file import results
from benchmarks.harness.template import render, source
from benchmarks.learners.pages.parts import goal

FOLDER = results("learners")
LARGE = 1e6
"""z of a test in which the sampler failed."""
Row = Mapping[str, Any]


def kernels() -> str:
    """Kinds of kernels by launch parameters and times."""
    bodies = [source(FOLDER / f"{name}.json") for name in ("kernels", "kernels_max_margin")]
    methods = {name: row for body in bodies for name, row in body["methods"].items()}
    least = round(methods["forest"]["balanced_accuracy"] - 0.02, 3)
    values = {
        "traces": source(FOLDER / "gpu_traces.json.gz"),
        "launches": [f"{count:,} {kind}" for kind, count in bodies[0]["launches"].items()],
        "files": [body["file"] for body in bodies],
        "methods": [_method(name, row, least) for name, row in methods.items()],
    }
    return render(__file__, values, "kernels")


def _method(name: str, row: Row, least: float) -> Row:
    """A classifier of kernels; the max-margin one has a goal of accuracy."""
    accuracy, error = row["balanced_accuracy"], row["calibration_error"]
    return {
        "method": name,
        "accuracy": goal(accuracy, least) if name == "max-margin" else f"{accuracy:.3f}",
        "recalls": [f"{kind} {value:.3f}" for kind, value in row["recall"].items()],
        "error": goal(error, 0.05, at_most=True)
        if name in ("max-margin", "forest")
        else f"{error:.3f}",
    }


def errors() -> str:
    """Seeded errors, and the test that catches each."""
    result = source(FOLDER / "seeded_errors.json")
    listed = result["listed_errors"]
    rows = [
        (
            f"{name} (listed)" if name in listed else name,
            row["test"],
            "fails" if row["z"] >= LARGE else f"{row['z']:.1f}",
        )
        for name, row in result["results"].items()
    ]
    values = {
        **result,
        "caught": len(set(listed) - set(result["missed"])),
        "tried": len(rows) - 2,
        "missed": result["missed"] or None,
        "false_alarms": result["false_alarms"] or None,
        "rows": rows,
    }
    return render(__file__, values, "errors")


def calibration() -> str:
    """Simulation-based calibration."""
    result = source(FOLDER / "simulated_calibration.json")
    rows = [
        {**row, "model": title, "name": name, "ranks": " ".join(map(str, row["histogram"]))}
        for title, found in result["values"].items()
        for name, row in found.items()
    ]
    values = {**result, "rows": rows, "least": min(row["p"] for row in rows)}
    return render(__file__, values, "calibration")
