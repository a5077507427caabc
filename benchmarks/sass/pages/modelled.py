"""``docs/results/sass-modelled.md``: results of the SASS level that need no GPU.

python -m benchmarks page sass-modelled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import results
from benchmarks.harness.template import render, render_page, source
from nostall.sass.model.agreement import RANKING_WORTH

PAGE = PAGES / "sass-modelled.md"
FOLDER = results("sass")
_STRATEGIES = ("anneal", "sip", "random")
_FILES = {
    "strategies": "strategies_on_model",
    "speed": "static_speed",
    "mobility": "mobility",
    "walks": "random_walks",
    "hazards": "seeded_hazards",
    "fuzz": "fuzz",
    "kills": "kill_resume",
}
"""Name in the template -> result file."""

Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    files = {name: source(FOLDER / f"{file}.json") for name, file in _FILES.items()}
    records, walks = files["strategies"]["records"], files["walks"]["summary"]
    values = {
        **files,
        "evaluations": [record["evaluations"] for record in records],
        "ranking_worth": RANKING_WORTH,
        "search": search(records),
        "grown": _grown(files["speed"]),
        "movable": [r for r in files["mobility"]["records"] if r["arch"] == "sm_90"],
        "walk_moves": walks["moves"] // walks["functions"],
        "killed": sum(files["kills"]["kills"].values()),
    }
    return render_page(__file__, PAGE, values)


def search(records: Sequence[Row]) -> str:
    """Table of original / best time by kernel and strategy: mean over seeds, standard error."""
    rows = []
    for kernel in dict.fromkeys(r["kernel"] for r in records):
        own = [r for r in records if r["kernel"] == kernel]
        ratios = ([r["ratio"] for r in own if r["strategy"] == s] for s in _STRATEGIES)
        rows.append([kernel, *map(_mean, ratios)])
    values = {
        "seeds": len({r["seed"] for r in records}),
        "strategies": [f"`{strategy}`" for strategy in _STRATEGIES],
        "rows": rows,
    }
    return render(__file__, values, "search")


def _mean(values: Sequence[float]) -> str | None:
    if not values:
        return None
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{mean(values):.4f} ± {stdev(values) / len(values) ** 0.5:.4f}"


def _grown(record: Row) -> list[Row]:
    """One kernel in several sizes, each step against n log n."""
    growth = record["growth"]
    steps = [{"against_n_log_n": None}, *growth["parse_and_analyse_s"]]
    verify_steps = [{"against_n_log_n": None}, *growth["verify_s"]]
    return [
        {
            **kernel,
            "parse_growth": step["against_n_log_n"],
            "verify_growth": verify_step["against_n_log_n"],
        }
        for kernel, step, verify_step in zip(record["grown"], steps, verify_steps, strict=True)
    ]
