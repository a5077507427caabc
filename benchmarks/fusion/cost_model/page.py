"""Write docs/fusion_evaluator.md: the schedule model beside a GPU, and what each part is worth.

python -m benchmarks.fusion.cost_model.page

``fusion_evaluator.json`` is measured (``benchmarks.fusion.cost_model.evaluate``), and
``fusion_evaluator_fit.json`` says how today's model does on it
(``benchmarks.fusion.cost_model.fit --judge``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np

from benchmarks.fusion.cost_model.fit import FITTED, MEASURED
from benchmarks.fusion.cost_model.summary import FULL, ran, ratios, us
from benchmarks.harness.generated_regions import wrapped
from benchmarks.harness.rank_agreement import kendall
from benchmarks.harness.schema import RESULTS
from nostall.attach.torch_compile.options import RACED
from nostall.core.files import write_atomically
from nostall.fusion.codegen.autotune.autotuner import MAX_CANDIDATES
from nostall.fusion.codegen.autotune.candidates import MAX_SLOWDOWN

PAGE = RESULTS.parents[1] / "docs" / "fusion_evaluator.md"
TAU, REGRET = 0.7, 0.05
"""What was asked for: at least, at most."""
_COLUMNS = (
    *("chain", "plans", "tau", "held out", "regret", "raced"),
    *("first choice", "fastest measured"),
)
_RACES = (
    *("modelled best", "candidates, mean (most)", "not measured, mean"),
    *("regret, mean (largest)", "held out: regret, mean (largest)"),
)
_MEANS = ("figures", "tau, mean (median)", "regret, mean (median)", "median error, mean")
_WHO = {
    "before": "the model before, by which these plans were drawn",
    "today": "today's model, as it is",
    "held out": "today's model, fitted to the other half of the chains",
}
_TAUS = ("today", "held out")

Row = Mapping[str, Any]


def page(measured: Row, judged: Row) -> str:
    """The whole page."""
    chains, rows, told = measured["chains"], judged["kernels"], judged["summary"]
    gpus = ", ".join(sorted({f"{c['gpu']}, PyTorch {c['torch']}" for c in chains.values()}))
    head = (
        "Written by `python -m benchmarks.fusion.cost_model.page` from "
        "[these samples](../benchmarks/results/fusion_evaluator.json) "
        f"(`python -m benchmarks.fusion.cost_model.evaluate OUT`; {gpus}; {measured['date'][:10]}) and "
        "[what the model says of them](../benchmarks/results/fusion_evaluator_fit.json) "
        "(`python -m benchmarks.fusion.cost_model.fit --judge`). Plans of each kernel of the "
        "explorer's partition are CUDA graphs over copies of their memory larger than L2, replayed "
        "in turns. *Tau* is Kendall's tau-b between modelled and measured times of a kernel's "
        "plans, *regret* the measured time of the plan that the model likes best over that of the "
        "fastest one, less 1. *Held out*: fitted to half of the chains, judged on the other half, "
        "both ways round; chains of one function stay together. The form of the model was found "
        "with both halves in sight, only its figures were not. *As it is* its figures are those "
        "that were last fitted to all samples there were (`nostall.fusion.codegen.cost.gpu`)."
    )
    lines = ["# The schedule model beside a GPU\n", wrapped(head) + "\n"]
    lines += [wrapped(text) + "\n" for text in _verdict(told, measured, len(rows))]
    lines += [f"| {' | '.join(_MEANS)} |", "|" + "---|" * len(_MEANS)]
    lines += [_mean(_WHO[who], told[who]) for who in _WHO]
    lines += ["", f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    kernels = _kernels(chains, rows)
    lines += [_kernel(row, kernel) for row, kernel in zip(rows, kernels, strict=True)]
    lines += ["", wrapped(_across(rows, kernels)) + "\n"]
    lines += ["## What a race takes\n", *_races(told), ""]
    lines += ["## What each part is worth\n", *_ablation(chains)]
    return "\n".join(lines) + "\n"


def _verdict(told: Row, measured: Row, kernels: int) -> list[str]:
    """Whether the goals are met, by figures that were not fitted to the kernels judged."""
    held, summary = told["held out"], measured["summary"]
    tau, regret = held["tau"]["mean"], held["regret"]["mean"]
    reached = [
        f"tau {tau:.2f} ({'reached' if tau >= TAU else 'not reached'}: {TAU})",
        f"regret {100 * regret:.1f} % ({'reached' if regret <= REGRET else 'not reached'}: "
        f"{100 * REGRET:.0f} %)",
    ]
    found = [
        f"**Held out: {', '.join(reached)}**, the means over {kernels} kernels. Of "
        f"{summary['plans']} plans that ran {summary['wrong'] or 'none'} wrote something else than "
        "the first one of its kernel."
    ]
    if summary["plans_that_did_not_run"]:
        found.append(f"Plans that did not run: {summary['plans_that_did_not_run']} (see the file).")
    if left := summary["kernels"] - kernels:
        found.append(f"Left out, as their chains' graphs are others today: {left} kernels.")
    if measured["failed"]:
        found.append(f"Not measured: {', '.join(measured['failed'])} (the file says why).")
    return found


def _mean(name: str, who: Row) -> str:
    tau, regret, off = who["tau"], who["regret"], who["off"]
    cells = [
        f"{tau['mean']:.2f} ({tau['median']:.2f})",
        f"{100 * regret['mean']:.1f} % ({100 * regret['median']:.1f} %)",
        f"{100 * off['mean']:.0f} %",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _kernels(chains: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    """The measured kernels that were judged."""
    return [chains[row["chain"]]["kernels"][row["number"]] for row in rows]


def _kernel(row: Row, kernel: Row) -> str:
    times = {plan["plan"]: us(plan) for plan in ran(kernel)}
    best = min(times, key=lambda plan: times[plan])
    today = row["today"]
    taus = ["-" if row[who]["tau"] is None else f"{row[who]['tau']:.2f}" for who in _TAUS]
    cells = [
        row["chain"],
        str(row["plans"]),
        *taus,
        f"{100 * today['regret']:.1f} %",
        f"{100 * today['races'][str(MAX_CANDIDATES)]['regret']:.1f} %",
        f"{today['first']}: {times[today['first']]:.1f} us",
        f"{best}: {times[best]:.1f} us",
    ]
    return f"| {' | '.join(cells)} |"


def _across(rows: Sequence[Row], kernels: Sequence[Row]) -> str:
    """How the explorer's evaluators order different kernels, whose schedules they do not know."""
    best = np.array([min(map(us, ran(kernel))) for kernel in kernels])
    said = {
        "delta-evaluator": [kernel["modelled_us"]["delta"] for kernel in kernels],
        "latency-evaluator": [kernel["modelled_us"]["latency"] for kernel in kernels],
        "schedule model": [row["today"]["first_us"] for row in rows],
    }
    found = []
    for name, times in said.items():
        modelled = np.array(times)
        tau, off = kendall(modelled, best), float(np.median(np.abs(modelled / best - 1)))
        found.append(f"{name} tau {tau:.2f}, off by {100 * off:.0f} % in the median")
    return (
        "Across kernels, the modelled time of each (the explorer's evaluators as they were when it "
        "was measured; of the schedule model today's first choice) against the fastest measured "
        f"plan: {'; '.join(found)}."
    )


def _races(told: Row) -> list[str]:
    """Races played back, by how many of the modelled best plans take part."""
    said = (
        "A race has the best plan of every scheme and so many of the best plans of all, *modelled* "
        f"(none that would take {MAX_SLOWDOWN:g} times as long as the first choice). Played back from "
        "the same samples: candidates that were not measured are left out (they may be faster than "
        "all that are known), the first choice is its own null, and what wins is not measured a "
        f"second time. *Raced* in the table above is the regret of {MAX_CANDIDATES}, which a `Racer` "
        f"takes; the torch.compile backend takes {RACED}. How many they are was chosen by this "
        "table. Plans that read early what rows share race besides; there are no samples of them."
    )
    lines = [wrapped(said) + "\n", f"| {' | '.join(_RACES)} |", "|" + "---|" * len(_RACES)]
    today, held = told["today"]["races"], told["held out"]["races"]
    for most, race in today.items():
        count = race["candidates"]
        cells = [f"{count['mean']:.1f} ({count['most']})", f"{race['unknown']['mean']:.1f}"]
        cells += [_regret(race["regret"]), _regret(held[most]["regret"])]
        lines.append(f"| {most} | {' | '.join(cells)} |")
    return lines


def _regret(spread: Row) -> str:
    return f"{100 * spread['mean']:.1f} % ({100 * spread['most']:.1f} %)"


def _ablation(chains: Mapping[str, Any]) -> list[str]:
    """Every variant against the whole compiler, and the chains where they differ."""
    found = {name: ratios(chain["ablation"]) for name, chain in chains.items()}
    names = list(next(iter(found.values())))
    said = (
        f"Time of a variant / that of *{FULL}*, measured side by side; above 1 the part that is "
        "missing was worth that. Partitions: the explorer's, the greedy one (by bytes saved), and "
        "one grown along producers (`cover`). *First*: the modelled first choice of every kernel, "
        "*raced*: chosen by measurement, by the race as it was then. Exactly 1.000 where the "
        "kernels are the same."
    )
    lines = [wrapped(said) + "\n", f"| chain | {' | '.join(names)} |"]
    lines += ["|" + "---|" * (len(names) + 1)]
    for chain, told in found.items():
        if any(ratio != 1.0 for ratio in told.values()):
            lines.append(_ratios(chain, [told[name] for name in names]))
    same = sum(all(ratio == 1.0 for ratio in told.values()) for told in found.values())
    means = [geometric_mean(told[name] for told in found.values()) for name in names]
    lines.append(_ratios(f"**geometric mean of {len(found)}** ({same} not shown: all 1)", means))
    return lines


def _ratios(name: str, values: Sequence[float]) -> str:
    return f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |"


def main() -> int:
    missing = [path.name for path in (MEASURED, FITTED) if not path.exists()]
    if missing:
        print(
            f"no {' and no '.join(missing)}; the text above says what makes them", file=sys.stderr
        )
        return 2
    text = page(json.loads(MEASURED.read_text()), json.loads(FITTED.read_text()))
    write_atomically(PAGE, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
