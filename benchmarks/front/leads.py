"""The first sentence and the picture of result pages whose figures are no headlines of README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, geometric_mean, median
from typing import Any

from benchmarks.front.picture import GAINS, Axis, Series, drawings, picture_text
from benchmarks.fusion.chains import page as chains_page
from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import Values, render
from benchmarks.learning.summary import summary
from benchmarks.sass.distances.table import reason_to_drop

MODELLED = Axis(
    GAINS.ticks[:4], "modelled time of the original / modelled time of the best schedule",
    less="← slower", more="faster in the model →",
)  # fmt: skip


_PAPERS = ("max-margin, fixed spectrum", "topics")
"""Learners of arXiv:1910.05250 and arXiv:1910.04420."""
_SOURCES = {
    "Core ATen": "Core ATen",
    "Inductor": "Inductor's other decompositions",
    "passes": "Inductor's passes",
    "lists": "lists of tensors",
}
"""Field ``source`` of an operator -> its name."""


@dataclass(frozen=True)
class Lead:
    """What a page shows, in a sentence and in a picture."""

    figures: Values
    """Those of the sentence, which is the page's part of the template."""
    rows: Sequence[Series]
    axis: Axis


@cache
def leads() -> dict[str, Lead]:
    """Page below ``docs/results`` -> its lead."""
    makers: dict[str, Callable[[], Lead]] = {
        "fusion-chains.md": _chains, "fusion-cost-model.md": _cost_model,
        "fusion-coverage.md": _coverage, "fusion.md": _explorers,
        "issue-distances.md": _distances, "learners.md": _learners, "learning.md": _learning,
        "sass-modelled.md": _modelled, "workload.md": _workload,
    }  # fmt: skip
    return {page: make() for page, make in makers.items()}


def lead_parts(page: str) -> list[str]:
    """The first parts of a result page: its sentence and its picture; empty without a lead."""
    lead = leads().get(page)
    if lead is None:
        return []
    sentence = render(__file__, lead.figures, page)
    return [sentence, picture_text(page, "The figures of the sentence above")]


def lead_pictures() -> dict[str, str]:
    """File name -> SVG text."""
    pictures = {}
    for page, lead in leads().items():
        title = render(__file__, lead.figures, page).replace("\n", " ").replace("*", "")
        pictures.update(drawings(page, title, lead.rows, lead.axis))
    return pictures


def _ratios(label: str, values: Iterable[float], digits: int = 2) -> Series:
    found = tuple(values)
    mean = geometric_mean(found)
    return Series(label, found, mean, f"{mean:.{digits}f}×")


def _shares(label: str, value: float, text: str) -> Series:
    return Series(label, (value,), value, text, count=False)


def _chains() -> Lead:
    chains = chains_page.load_chains()
    methods = {
        "best Inductor": "fastest Inductor", "max-autotune": "max-autotune",
        "compile": "torch.compile", "liger": "Liger",
    }  # fmt: skip
    compared = [chain["compared"] for chain in chains]
    rows = [
        _ratios(f"fused chains / {name}", (c[method]["ratio"] for c in compared if method in c))
        for method, name in methods.items()
    ]
    ratios = rows[0].values
    figures = {
        "ratios": ratios,
        "below": sum(ratio < 1 for ratio in ratios),
        "gpu": chains[0]["gpu"],
        "dates": [chain["date"] for chain in chains],
    }
    return Lead(figures, rows, GAINS)


def _cost_model() -> Lead:
    record = load(results("fusion") / "cost_model_fit.json")
    kernels = [k for k in record["kernels"] if "held out" in k]
    losses = [k["held out"]["regret"] for k in kernels]
    figures = {"losses": losses, "taus": [k["held out"]["tau"] for k in kernels]}
    rows = [
        _means("fitted to the other half", losses),
        _means("the model that ships", [k["today"]["regret"] for k in kernels]),
    ]
    axis = Axis(
        (1.0, 1.1, 1.2, 1.3, 1.5), "measured time of the plan ranked first / of the fastest plan",
        more="slower than the fastest plan →",
    )  # fmt: skip
    return Lead(figures, rows, axis)


def _means(label: str, losses: Sequence[float]) -> Series:
    values = tuple(1 + loss for loss in losses)
    return Series(label, values, fmean(values), f"{fmean(values):.3f}×")


def _coverage() -> Lead:
    record = load(results("fusion") / "coverage.json")
    totals = Counter(row["source"] for row in record["rows"])
    fused = Counter(r["source"] for r in record["rows"] if r["status"].startswith("fused"))
    rows = [
        _shares(name, 100 * fused[source] / totals[source], f"{fused[source]} of {totals[source]}")
        for source, name in _SOURCES.items()
    ]
    figures = {
        "fused": fused, "totals": totals, "all_fused": fused.total(), "all": totals.total(),
    }  # fmt: skip
    axis = Axis((0, 25, 50, 75, 100), "share of the operators that are fused", "fused", " %", None,
                logarithmic=False)  # fmt: skip
    return Lead(figures, rows, axis)


def _explorers() -> Lead:
    record = load(results("fusion") / "explorers.json")
    proven = [r for r in record["records"] if r["proven"]]
    planners = {
        "explorer": "nostall's choice", "greedy": "greedy, as in Inductor", "unfused": "no fusion",
    }  # fmt: skip
    rows = [
        _ratios(name, (r["us"][key] / r["optimum_us"] for r in proven))
        for key, name in planners.items()
    ]
    axis = Axis(
        (1, 1.5, 2, 3, 5, 10, 20),
        "modelled time / that of the proven optimum; a dot for each region, and the geometric mean",
        more="slower than the optimum →",
    )
    total = len(record["records"])
    figures = {
        "gaps": record["summary"]["gaps"], "proven": len(proven), "regions": total,
        "not_proven": total - len(proven),
    }  # fmt: skip
    return Lead(figures, rows, axis)


def _distances() -> Lead:
    content = load(results("sass") / "measured_distances.json.gz")
    rows = content["rows"]
    kept = sum(not reason_to_drop(row) for row in rows)
    seen = [
        row for row in rows
        if "problem" not in row and row["kind"] == "RAW" and row["sighting"] is not None
    ]  # fmt: skip
    above = sum(row["minimum"] > row["sighting"] for row in seen)
    equal = sum(row["minimum"] == row["sighting"] for row in seen)
    counts = (
        ("pairs with a measured minimum", kept, len(rows)),
        ("compilers keep exactly the minimum", equal, len(seen)),
        ("compilers keep more than the minimum", len(seen) - above - equal, len(seen)),
        ("compilers keep less than the minimum", above, len(seen)),
    )
    figures = {
        "kept": kept, "pairs": len(rows), "above": above, "seen": len(seen),
        "gpu": content["gpu"]["gpu"],
    }  # fmt: skip
    shares = [_shares(name, 100 * n / total, f"{n:,}") for name, n, total in counts]
    axis = Axis((0, 25, 50, 75, 100), "share of the pairs", "pairs", " %", None, logarithmic=False)
    return Lead(figures, shares, axis)


def _learners() -> Lead:
    found = load(results("learners") / "operators.json")
    accuracy = {name: row["known_accuracy"] for name, row in found["methods_test"].items()}
    best = max(accuracy, key=lambda name: accuracy[name])
    papers = " and ".join(f"{accuracy[name]:.3f}" for name in accuracy if name in _PAPERS)
    axis = Axis((0.9, 0.92, 0.94, 0.96, 0.98, 1.0), "accuracy on known kinds", "accuracy", "", None,
                logarithmic=False)  # fmt: skip
    rows = [_shares(name, value, f"{value:.3f}") for name, value in accuracy.items()]
    return Lead({"accuracy": accuracy[best], "best": best, "papers": papers}, rows, axis)


def _learning() -> Lead:
    result = load(results("learning") / "strategies.json")
    rows = summary(result["records"])
    names = ("anneal", "ppo-trained", "ppo", "random", "cuasmrl", "sip")
    ratios = {n: {r["kernel"]: r["median_ratio"] for r in rows if r["strategy"] == n}
              for n in names}  # fmt: skip
    kernels = sorted(ratios["anneal"])
    best = Counter(
        max((n for n in names if k in ratios[n]), key=lambda n: ratios[n][k]) for k in kernels
    )
    figures = {
        "evaluations": result["evaluations"],
        "best": [f"`{name}` on {count}" for name, count in best.most_common()],
        "kernels": len(kernels),
    }
    return Lead(figures, [_ratios(n, ratios[n].values()) for n in names], MODELLED)


def _modelled() -> Lead:
    records = load(results("sass") / "strategies_on_model.json")["records"]
    rows = [_ratios(name, _by_kernel(records, name), 3) for name in ("anneal", "random", "sip")]
    figures = {"means": {row.label: row.mark for row in rows}, "kernels": len(rows[0].values)}
    return Lead(figures, rows, MODELLED)


def _by_kernel(records: Sequence[Any], strategy: str) -> list[float]:
    found: dict[str, list[float]] = {}
    for row in records:
        if row["strategy"] == strategy and row["ratio"] is not None:
            found.setdefault(row["kernel"], []).append(row["ratio"])
    return [fmean(ratios) for ratios in found.values()]


def _workload() -> Lead:
    models = load(results("workload") / "fit.json")["models"]
    labels = {"fitted": "fitted operators", "flat": "flat 70 % of the peaks"}
    figures: dict[str, Any] = {"models": len(models)}
    rows = []
    for name, label in labels.items():
        errors = [model[f"{name}_error"]["step"] for model in models]
        figures[name] = list(map(abs, errors))
        middle = 1 + median(errors)
        rows.append(Series(label, tuple(1 + error for error in errors), middle, f"{middle:.2f}×"))
    axis = Axis(
        (0.5, 0.6, 0.8, 1.0, 1.25), "modelled / measured time of a step; a dot for each model",
        "median", less="← too short", more="too long →",
    )  # fmt: skip
    return Lead(figures, rows, axis)
