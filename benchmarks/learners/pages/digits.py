"""Section of the page of the learners: digits in several views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.result_file import results
from benchmarks.harness.template import render, source
from benchmarks.learners.pages.parts import goal

FOLDER = results("learners")
DIGITS = ("digits", "digits_adaptive", "digits_nonlinear")
"""Result files of scikit-learn's digits; each has rows of other methods."""
SMALLEST_RATIO, LARGEST_RATIO = 13, 19
CALIBRATED = ("20", "80")
"""Items a class for which the calibration error has a goal."""
Row = Mapping[str, Any]


def digits() -> str:
    """Both data sets."""
    bodies = [source(FOLDER / f"{name}.json") for name in DIGITS]
    other = source(FOLDER / "multiple_features.json")
    sweep = bodies[0]["time"]["ratio_for_16_times"]
    missed = "" if SMALLEST_RATIO <= sweep <= LARGEST_RATIO else ", missed"
    if sweep < SMALLEST_RATIO:
        missed += (
            "; the smaller data set has fixed costs of a sweep, which do not depend on the items"
        )
    values = {
        "files": [body["file"] for body in bodies],
        "tables": _tables(bodies),
        "spectra": _spectra(bodies),
        "sweep": sweep,
        "smallest": SMALLEST_RATIO,
        "largest": LARGEST_RATIO,
        "missed": missed,
        "views": [f"{name} {width}" for name, width in other["views"].items()],
        "other": other,
        "other_tables": _tables([other]),
    }
    return render(__file__, values)


def _scores(bodies: Sequence[Row], each: str) -> dict[str, Row]:
    """Scores of all methods with a number of training items a class."""
    return {m: row for body in bodies for m, row in body.get(f"{each}_a_class", {}).items()}


def _tables(bodies: Sequence[Row]) -> str:
    """A table for each number of training items."""
    tables = []
    for each, least in bodies[0]["goals_accuracy"].items():
        scores = _scores(bodies, each)
        others = [_best_missing(row) for method, row in scores.items() if not _is_ours(method)]
        most = max(others, default=0.0)
        rows = [
            _with_goals(method, row, least, most, is_calibrated=each in CALIBRATED)
            if _is_ours(method)
            else (method, *(f"{value:.3f}" for value in _figures(row)))
            for method, row in scores.items()
        ]
        if rows:
            tables.append(render(__file__, {"each": each, "methods": rows}, "table"))
    return "\n\n".join(tables)


def _figures(row: Row) -> tuple[float, float, float]:
    """Accuracy, the best accuracy with missing views, calibration error."""
    return row["accuracy"]["mean"], _best_missing(row), row["calibration_error"]["mean"]


def _with_goals(
    method: str, row: Row, least: float, least_missing: float, *, is_calibrated: bool
) -> tuple[str, ...]:
    accuracy, missing, error = _figures(row)
    return (
        method,
        goal(accuracy, least),
        goal(missing, least_missing),
        goal(error, 0.05, at_most=True) if is_calibrated else f"{error:.3f}",
    )


def _spectra(bodies: Sequence[Row]) -> str:
    """The learnt against the fixed spectrum, in words."""
    gains = []
    for each in bodies[0]["goals_accuracy"]:
        scores = _scores(bodies, each)
        pair = [scores.get(f"max-margin, {kind} spectrum") for kind in ("fixed", "adaptive")]
        if None not in pair:
            first, second = (row for row in pair if row)
            gains.append(
                f"{100 * (second['accuracy']['mean'] - first['accuracy']['mean']):+.1f} points "
                f"({100 * (_best_missing(second) - _best_missing(first)):+.1f} with views missing, "
                f"{second['seconds']['mean'] / first['seconds']['mean']:.1f} times the CPU) at "
                f"{each} a class"
            )
    return "; ".join(gains)


def _is_ours(method: str) -> bool:
    return method.startswith("max-margin")


def _best_missing(row: Row) -> float:
    """The best accuracy with missing views."""
    names = ("missing_", "accuracy_missing")
    return float(max(value["mean"] for name, value in row.items() if name.startswith(names)))
