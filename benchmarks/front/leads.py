"""The first sentence and the picture of result pages whose figures are no headlines of README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, geometric_mean, median
from typing import Any

from benchmarks.front.picture import GAINS, THEMES, Axis, Series, draw, picture_name, picture_text
from benchmarks.fusion.chains import page as chains_page
from benchmarks.harness.markdown import wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.learning.summary import summary
from benchmarks.sass.distances.table import reason_to_drop

MODELLED = Axis(
    GAINS.ticks[:4], "modelled time of the original / modelled time of the best schedule",
    less="← slower", more="faster in the model →",
)  # fmt: skip


@dataclass(frozen=True)
class Lead:
    """What a page shows, in a sentence and in a picture."""

    sentence: str
    rows: tuple[Series, ...]
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
    return [wrapped(lead.sentence), picture_text(page, "The figures of the sentence above")]


def lead_pictures() -> dict[str, str]:
    """File name -> SVG text."""
    return {
        picture_name(page, theme): draw(
            lead.sentence.replace("*", ""), lead.rows, lead.axis, colours
        )
        for page, lead in leads().items()
        for theme, colours in THEMES.items()
    }


def _ratios(label: str, values: Iterable[float], digits: int = 2) -> Series:
    found = tuple(values)
    mean = geometric_mean(found)
    return Series(label, found, mean, f"{mean:.{digits}f}×")


def _shares(label: str, value: float, text: str) -> Series:
    return Series(label, (value,), value, text, count=False)


def _chains() -> Lead:
    chains = chains_page.load_chains()
    rows = [
        _ratios(f"fused chains / {name}", [
            c["compared"][method]["ratio"] for c in chains if method in c["compared"]
        ])
        for method, name in (
            ("best Inductor", "fastest Inductor"), ("max-autotune", "max-autotune"),
            ("compile", "torch.compile"), ("liger", "Liger"),
        )
    ]  # fmt: skip
    best = rows[0]
    gpu, day = chains[0]["gpu"].removeprefix("NVIDIA "), max(c["date"][:10] for c in chains)
    return Lead(
        f"**Fused chains beside the fastest of Inductor's modes and options: {best.text[:-1]} "
        f"times as fast in the geometric mean of {len(best.values)} chains, "
        f"{min(best.values):.2f} to {max(best.values):.2f}; "
        f"{sum(v < 1 for v in best.values)} below 1.** {gpu}, {day}. The rules of fusion were "
        "written with these chains in view: [unseen chains](fusion-unseen.md) gain less.",
        tuple(rows), GAINS,
    )  # fmt: skip


def _cost_model() -> Lead:
    record = load(results("fusion") / "cost_model_fit.json")
    kernels = [k for k in record["kernels"] if "held out" in k]
    losses = [1 + k["held out"]["regret"] for k in kernels]
    taus = [k["held out"]["tau"] for k in kernels]
    first = [1 + k["today"]["regret"] for k in kernels]
    return Lead(
        f"**The plan that the cost model ranks first takes {100 * (fmean(losses) - 1):.1f} % more "
        f"time than the fastest measured plan, in the mean of {len(losses)} kernels, and "
        f"{100 * (max(losses) - 1):.0f} % at most; Kendall's tau between modelled and measured "
        f"times is {fmean(taus):.2f}.** Held out: fitted to the other half of the chains.",
        (_means("fitted to the other half", losses), _means("the model that ships", first)),
        Axis((1.0, 1.1, 1.2, 1.3, 1.5), "measured time of the plan ranked first / of the fastest "
             "plan", more="slower than the fastest plan →"),
    )  # fmt: skip


def _means(label: str, values: Sequence[float]) -> Series:
    return Series(label, tuple(values), fmean(values), f"{fmean(values):.3f}×")


def _coverage() -> Lead:
    record = load(results("fusion") / "coverage.json")
    totals = Counter(row["source"] for row in record["rows"])
    fused = Counter(r["source"] for r in record["rows"] if r["status"].startswith("fused"))
    rows = [
        _shares(name, 100 * fused[source] / totals[source], f"{fused[source]} of {totals[source]}")
        for source, name in _SOURCES.items()
    ]
    return Lead(
        f"**nostall fuses {fused['Core ATen']} of the {totals['Core ATen']} functional operators "
        f"of Core ATen, and {sum(fused.values())} of {sum(totals.values())} that a backend sees; "
        "the others stay with Inductor**, most of them another kind of computation, such as matrix "
        "products and convolutions.",
        tuple(rows),
        Axis((0, 25, 50, 75, 100), "share of the operators that are fused", "fused", " %", None,
             logarithmic=False),
    )  # fmt: skip


_SOURCES = {
    "Core ATen": "Core ATen",
    "Inductor": "Inductor's other decompositions",
    "passes": "Inductor's passes",
    "lists": "lists of tensors",
}
"""Field ``source`` of an operator -> its name."""


def _explorers() -> Lead:
    record = load(results("fusion") / "explorers.json")
    proven = [r for r in record["records"] if r["proven"]]
    rows = [
        _ratios(name, [r["us"][key] / r["optimum_us"] for r in proven])
        for key, name in (("explorer", "explore"), ("greedy", "greedy, as in Inductor"),
                          ("unfused", "unfused"))
    ]  # fmt: skip
    gaps = record["summary"]["gaps"]
    return Lead(
        f"**The explorer is within 3 % of the proven optimum in "
        f"{gaps['explorer']['within_3_percent']} of {len(proven)} regions, "
        f"{100 * gaps['explorer']['max']:.1f} % from it at worst; greedy fusion in "
        f"{gaps['greedy']['within_3_percent']}, {100 * gaps['greedy']['max']:.0f} % from it at "
        "worst.** Times are *modelled*.",
        tuple(rows),
        Axis((1, 1.5, 2, 3, 5, 10, 20), "modelled time / that of the proven optimum; a dot for "
             "each region", more="slower than the optimum →"),
    )  # fmt: skip


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
    return Lead(
        f"**The least distance at which a consumer reads the new value was measured for {kept:,} "
        f"of {len(rows):,} pairs of instructions; compilers issue closer than it in {above} of the "
        f"{len(seen):,} pairs that they leave unprotected.** "
        f"{content['gpu']['gpu'].removeprefix('NVIDIA ')}.",
        tuple(_shares(name, 100 * n / total, f"{n:,}") for name, n, total in counts),
        Axis((0, 25, 50, 75, 100), "share of the pairs", "pairs", " %", None, logarithmic=False),
    )  # fmt: skip


def _learners() -> Lead:
    found = load(results("learners") / "operators.json")
    accuracy = {name: row["known_accuracy"] for name, row in found["methods_test"].items()}
    best = max(accuracy, key=lambda name: accuracy[name])
    papers = " and ".join(f"{accuracy[name]:.3f}" for name in accuracy if name in _PAPERS)
    return Lead(
        f"**Kinds of training steps are told apart with an accuracy of {accuracy[best]:.3f} by a "
        f"plain {best}; the learners of the papers reach {papers}.** Generated models, CPU. On "
        "kernels without names the forest is ahead, too.",
        tuple(_shares(name, value, f"{value:.3f}") for name, value in accuracy.items()),
        Axis((0.9, 0.92, 0.94, 0.96, 0.98, 1.0), "accuracy on known kinds", "accuracy", "", None,
             logarithmic=False),
    )  # fmt: skip


_PAPERS = ("max-margin, fixed spectrum", "topics")
"""Learners of arXiv:1910.05250 and arXiv:1910.04420."""


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
    counted = ", ".join(f"`{name}` on {count}" for name, count in best.most_common())
    return Lead(
        f"**At {result['evaluations']:,} evaluations in the model, the largest median gain is that "
        f"of {counted} of {len(kernels)} kernels: learning is no clear gain over annealing, and "
        "takes more processor time.** *Modelled*, no speed-ups: the model ranks schedules no "
        "better than chance.",
        tuple(_ratios(n, ratios[n].values()) for n in names), MODELLED,
    )  # fmt: skip


def _modelled() -> Lead:
    records = load(results("sass") / "strategies_on_model.json")["records"]
    rows = [_ratios(name, _by_kernel(records, name), 3) for name in ("anneal", "random", "sip")]
    return Lead(
        f"**In the model, annealing finds {rows[0].text[:-1]} in the geometric mean of "
        f"{len(rows[0].values)} kernels at equal evaluations, random orders {rows[1].text[:-1]}, "
        f"and SIP's moves {rows[2].text[:-1]}.** These are no speed-ups: the model ranks schedules "
        "no better than chance.",
        tuple(rows), MODELLED,
    )  # fmt: skip


def _by_kernel(records: Sequence[Any], strategy: str) -> list[float]:
    found: dict[str, list[float]] = {}
    for row in records:
        if row["strategy"] == strategy and row["ratio"] is not None:
            found.setdefault(row["kernel"], []).append(row["ratio"])
    return [fmean(ratios) for ratios in found.values()]


def _workload() -> Lead:
    models = load(results("workload") / "fit.json")["models"]
    errors = {
        name: [abs(m[f"{name}_error"]["step"]) for m in models] for name in ("fitted", "flat")
    }
    texts = [
        f"{100 * median(found):.0f} % in the median and {100 * max(found):.0f} % at most"
        for found in errors.values()
    ]
    rows = [
        Series(label, tuple(1 + m[f"{name}_error"]["step"] for m in models), 1 + middle,
               f"{1 + middle:.2f}×")
        for name, label in (("fitted", "fitted operators"), ("flat", "flat 70 % of the peaks"))
        for middle in [median(m[f"{name}_error"]["step"] for m in models)]
    ]  # fmt: skip
    return Lead(
        f"**A training step modelled from the module with fitted operators is {texts[0]} off the "
        f"measured one; with 70 % of the peaks {texts[1]}.** {len(models)} models, H200.",
        tuple(rows),
        Axis((0.5, 0.6, 0.8, 1.0, 1.25), "modelled / measured time of a step; a dot for each model",
             "median", less="← too short", more="too long →"),
    )  # fmt: skip
