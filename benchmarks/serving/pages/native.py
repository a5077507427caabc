"""Section of ``docs/results/serving.md`` on native schedules of the attention kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render

FOLDER = results("serving")
PORTFOLIO = FOLDER / "native_portfolio.json"
WINNERS = FOLDER / "native_winners_h200.json"
LATER = FOLDER / "native_winners_later_h200.json"
"""A run with workers that start before the seconds of the search."""

Row = Mapping[str, Any]


def native() -> str:
    """What the search of native schedules builds, and what it gains."""
    portfolios = load(PORTFOLIO)["results"]
    contents = [load(WINNERS), load(LATER)]
    done = [
        {**result, "run": run}
        for run, content in enumerate(contents, 1)
        for result in content["results"]
        if "kernels" in result
    ]
    kernels = [_kernel(result, row) for result in done for row in result["kernels"]]
    steps = [_deployed(result) for result in done]
    values = {
        "portfolio_file": PORTFOLIO,
        "portfolios": [
            {**row, "step": result["step"], "tried": sum(row["statuses"].values())}
            for result in portfolios
            for row in result["portfolio"]
        ],
        "gpu": done[0]["gpu"],
        "seconds": [c["command"].partition("--seconds ")[2].split()[0] for c in contents],
        "winners_file": WINNERS,
        "later_file": LATER,
        "kernels": kernels,
        "steps": steps,
        "gains": _gains(steps),
        **_answer(kernels, [result["step"] for result in portfolios]),
    }
    return render(__file__, values)


def _kernel(result: Row, row: Row) -> Row:
    """A kernel's last comparison; what the check said if it was not timed."""
    ratio = "{:.4f} [{:.4f}, {:.4f}]".format(*row["ratio"]) if row["ratio"] else row["checked"]
    null = "[{:.4f}, {:.4f}]".format(*row["null"]) if row["null"] else None
    about = {"run": result["run"], "step": result["step"], "stored": bool(row["stored"])}
    return {**row, **about, "shown_ratio": ratio, "shown_null": null}


def _deployed(result: Row) -> Row:
    """A step as a program runs it, beside the null and with the cubins of the store."""
    times = {name: median(row) for name, row in result["deployed"]["samples_us"].items()}
    replaced = result["deployed"]["replaced"]
    return {
        "run": result["run"],
        "step": result["step"],
        "compiled_us": times["compiled"],
        "over_null": times["compiled"] / times["null"],
        "gain": times["compiled"] / times["native"] if replaced else None,
        "replaced": replaced or None,
    }


def _gains(steps: Sequence[Row]) -> str | None:
    """How much faster the steps with cubins of the store are."""
    replaced = [step for step in steps if step["replaced"]]
    gains = (f"{step['gain']:.4f} (null {step['over_null']:.4f})" for step in replaced)
    return " and ".join(gains) or None


def _answer(kernels: Sequence[Row], planned: Sequence[str]) -> Row:
    """Whether it pays, and what has not run."""
    few = {row["step"] for row in kernels if not row["ratio"]}
    few -= {row["step"] for row in kernels if row["ratio"] and "meta" in row["kernel"]}
    steps = {row["step"] for row in kernels}
    return {
        "stored_count": sum(row["stored"] for row in kernels),
        "wrong": sum(row["checked"] not in ("timed", "no candidate") for row in kernels),
        "few": sorted(few),
        "missing": [step for step in planned if step not in steps],
    }
