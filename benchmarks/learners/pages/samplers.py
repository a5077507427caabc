"""Sections of the page of the learners: kernels without names, tests of the samplers."""

from __future__ import annotations

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.learners.pages.parts import goal

FOLDER = results("learners")
LARGE = 1e6
"""z of a test in which the sampler failed."""


def kernels() -> str:
    """Kinds of kernels by launch parameters and times."""
    files = [FOLDER / "kernels.json", FOLDER / "kernels_max_margin.json"]
    files = [file for file in files if file.exists()]
    bodies = [load(file) for file in files]
    methods = {name: row for body in bodies for name, row in body["methods"].items()}
    least = methods["forest"]["balanced_accuracy"] - 0.02
    rows = [
        (
            name,
            goal(row["balanced_accuracy"], round(least, 3))
            if name == "max-margin"
            else f"{row['balanced_accuracy']:.3f}",
            ", ".join(f"{kind} {value:.3f}" for kind, value in row["recall"].items()),
            goal(row["calibration_error"], 0.05, at_most=True)
            if name in ("max-margin", "forest")
            else f"{row['calibration_error']:.3f}",
        )
        for name, row in methods.items()
    ]
    traces = load(FOLDER / "gpu_traces.json.gz")
    counts = ", ".join(f"{count:,} {kind}" for kind, count in bodies[0]["launches"].items())
    return "\n\n".join(
        [
            "## Kernels without their names",
            wrapped(
                f"*Measured* on one {traces['gpu']}, torch {traces['torch']}: one training step of "
                f"{len(traces['models'])} models of the corpus "
                f"({link(FOLDER / 'gpu_traces.json.gz')}). At most 12 launches of a kind from each "
                f"model ({counts}); rules over names give the kinds. Features are launch "
                "parameters and times, not names. All models of one kind are left out at a time. "
                "Goal of the max-margin classifier: at most 2 points below the forest "
                f"({', '.join(link(file) for file in files)})."
            ),
            table(("method", "balanced accuracy", "recall", "calibration error"), rows),
        ]
    )


def errors() -> str:
    """Seeded errors, and the test that catches each."""
    path = FOLDER / "seeded_errors.json"
    result = load(path)
    rows = [
        (
            f"{name} (listed)" if name in result["listed_errors"] else name,
            row["test"],
            "fails" if row["z"] >= LARGE else f"{row['z']:.1f}",
        )
        for name, row in result["results"].items()
    ]
    listed = result["listed_errors"]
    caught = len([name for name in listed if name not in result["missed"]])
    return "\n\n".join(
        [
            "## Seeded errors in the samplers",
            wrapped(
                "Each test draws all unknowns and data from the joint distribution "
                f"({result['draws']:,} times), applies one step of a sampler, and compares "
                "statistics before and after it; above "
                f"{result['limit']:g} standard errors an error is caught. Steps that depend on "
                "labels start from their exact distribution on a grid. The tests run until one "
                f"catches the error. Caught: {caught} of {len(listed)} listed errors; missed of "
                f"all {len(rows) - 2}: {', '.join(result['missed']) or 'none'}; false alarms: "
                f"{', '.join(result['false_alarms']) or 'none'} ({link(path)})."
            ),
            table(("seeded error", "test", "largest z"), rows),
        ]
    )


def calibration() -> str:
    """Simulation-based calibration."""
    path = FOLDER / "simulated_calibration.json"
    result = load(path)
    rows = [
        (title, name, f"{row['p']:.3f}", " ".join(map(str, row["histogram"])))
        for title, values in result["values"].items()
        for name, row in values.items()
    ]
    least = min(row["p"] for values in result["values"].values() for row in values.values())
    return "\n\n".join(
        [
            "## Simulation-based calibration",
            wrapped(
                f"{result['replications']} replications draw unknowns and data; a chain from "
                f"another start gives {result['draws']} draws, among which the true value is "
                "ranked. Ranks of a correct sampler are uniform: p of a chi-square test, goal "
                f"above {result['least_p']:g}, least {least:.3f} ({link(path)})."
            ),
            table(("model", "value", "p", "histogram of ranks"), rows),
        ]
    )
