"""``docs/results/workload.md``: the job model and the trace reader against measurements.

python -m benchmarks page workload
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import results
from benchmarks.harness.template import render_page, source

PAGE = PAGES / "workload.md"
FOLDER = results("workload")
_SLOWDOWNS = {
    "leaving_one_of_three_out": "three models, each left out in turn",
    "unseen": "three further models, fitted on the first three",
    "leaving_one_of_all_out": "all six models, each left out in turn",
}
_TOOLS = {"hta": "HolisticTraceAnalysis 0.5.0", "tracelens": "TraceLens"}
"""Result file -> tool beside which trace figures are held."""
Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    fit, slowdown, population, reading = (
        source(FOLDER / f"{name}.json")
        for name in ("fit", "slowdown", "synthetic_population", "reading_speed")
    )
    values = {
        "gpu_file": FOLDER / "gpu.json",
        "fit": fit,
        "steps": [row for model in fit["models"] for row in _steps(model)],
        "slowdown": slowdown,
        "slowdowns": {name: slowdown["summary"][key] for key, name in _SLOWDOWNS.items()},
        "population": population,
        "tools": [_beside(name, tool) for name, tool in _TOOLS.items()],
        "reading": reading,
    }
    return render_page(__file__, PAGE, values)


def _steps(model: Row) -> list[Row]:
    """The parts of a model's step: measured, and modelled with their errors."""
    kinds = ("measured_ms", "flat_ms", "flat_error", "fitted_ms", "fitted_error")
    return [
        {"model": model["model"], "part": part, **{kind: model[kind][part] for kind in kinds}}
        for part in model["measured_ms"]
    ]


def _beside(name: str, tool: str) -> Row:
    """How far the figures of traces are from a tool's, as shares of the span."""
    record = source(FOLDER / f"{name}.json")
    largest = [
        max(abs(value) for value in row["difference_of_total"].values() if value is not None)
        for row in record["records"]
    ]
    equal = sum(difference < 1e-5 for difference in largest)
    return {"tool": tool, "differences": largest, "equal": equal, "file": record["file"]}
