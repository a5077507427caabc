"""Section of ``docs/results/parallel.md``: sharding plans measured on GPUs, beside peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.sharding.gpu_results import PLANNER

Row = Mapping[str, Any]
PATH = results("sharding") / "gpu_plans_4.json"
FIT = results("sharding") / "processor_fit.json"
BUSY = results("sharding") / "gpu_plans_4_busy.json"


def section() -> str:
    """The whole section."""
    record = load(PATH)
    about, groups = record["sessions"][0]["about"], record["summary"]["models"]
    intro = wrapped(
        f"Forward and backward pass on {about['gpus']} {about['device'].removeprefix('NVIDIA ')}, "
        f"torch {about['torch']} (`python -m benchmarks run sharding.gpu_plans`, {link(PATH)}): "
        "plans of rules, of mixed rules and of the planner on one and two mesh dimensions, and "
        "PyTorch's DDP, FSDP2 and tensor parallelism written by hand. Predictions use collectives "
        "and rates that the same run measured. Tau is Kendall's, among pairs of plans whose "
        "intervals of 95 % do not overlap. Regret is that of the planner's plan with the best "
        f"prediction, against the fastest plan. All {record['summary']['plans']} plans have the "
        f"loss and gradients of one process within {_worst(record['records']):.1g} (bfloat16, "
        "norm of the difference over the norm)."
    )
    head = ("model", "plans", "pairs", "tau", "regret", "MAPE", "planner's plan", "fastest plan")
    rows = [
        [name, str(g["plans"]), str(g["pairs"]), f"{g['tau']:.2f}", f"{100 * g['regret']:.1f} %",
         f"{100 * g['mape']:.0f} %", g["chosen"], g["fastest"]]
        for name, g in groups.items()
    ]  # fmt: skip
    parts = [f"## Sharding plans on GPUs\n\n{intro}", table(head, rows), _peers(groups)]
    parts += [_explained(record["records"]), _plans(record["records"]), _busy()]
    return "\n\n".join(parts)


def _busy() -> str:
    """The run with rates of the whole step, on a host whose processors other work used."""
    record = load(BUSY)
    measured, group = record["sessions"][0]["measured"], record["summary"]["models"]["gpt"]
    plans = [r for r in record["records"] if "predicted_s" in r]
    (alone,) = (r for r in plans if not r["collectives"])
    explained = load(FIT)
    best = explained["best"]
    text = wrapped(
        f"A second run of the GPT ({link(BUSY)}) has other rules for torch 2.11 (the first run's "
        "layer norms were replicated, because nostall misread DTensor's rules of it), "
        "the sustained rate of matrix products, the share of their speed that these lose beside a "
        f"collective (measured: {100 * measured['contention']:.0f} %) and collectives with "
        "priority. Other work used the host's processors beside it, and time was up before the "
        "classifier and the plans on 2 GPUs. Without collectives, the prediction is "
        f"{100 * (alone['predicted_s'] / alone['measured_s'] - 1):+.0f} %. With them it fails: tau "
        f"{group['tau']:.2f}, regret {100 * group['regret']:.0f} %, and DDP takes "
        f"{group['peers']['DDP']['over_plan']:.2f} times as long as the planner's plan. "
        f"The processor is the likely cause, not a proven one: with "
        f"{best['launch_us']} µs for each operator and "
        f"{best['send_us']} µs for each collective, fitted to these {explained['plans']} plans, "
        f"the same model has an error of {100 * best['mape']:.1f} % and a tau of {best['tau']:.2f} "
        f"(`python -m benchmarks run sharding.processor_fit`, {link(FIT)}). The run had measured "
        f"{1e6 * measured['launch_s']:.0f} and {1e6 * measured['send_s']:.0f} µs, with an addition "
        "and with collectives that follow each other. "
        "The benchmark measures both by launching two plans; no GPU has run with that. Collectives "
        "with priority were not tried apart. Two and eight GPUs were not measured: "
        "`python -m benchmarks run sharding.gpu_plans --gpus 8 --out OUT.json` does it where eight "
        "are lent."
    )
    return f"{text}\n\n{_plans(record['records'])}"


def _worst(records: Sequence[Row]) -> float:
    return max(r["gradient_error"] for r in records if "gradient_error" in r)


def _peers(groups: Mapping[str, Row]) -> str:
    names = dict.fromkeys(name for group in groups.values() for name in group["peers"])
    rows = [[name, *(_over(group["peers"][name]) for group in groups.values())] for name in names]
    before = "Time of each peer over that of the planner's plan (above 1: the plan is faster):"
    return f"{before}\n\n{table(('peer', *groups), rows)}"


def _over(peer: Row) -> str:
    return f"**{peer['over_plan']:.2f}**" if peer["loses"] else f"{peer['over_plan']:.2f}"


def _explained(records: Sequence[Row]) -> str:
    """Least squares of the measured times on the parts of the model, in relative errors."""
    rows = []
    for name in dict.fromkeys(r["model"] for r in records):
        plans = [r for r in records if r["model"] == name and "predicted_s" in r]
        alone = [r["measured_s"] / r["operators_s"] for r in plans if not r["collectives"]]
        factors, error = fit(plans)
        rows.append([name, f"{alone[0]:.2f}", f"{factors[0]:.2f}", f"{factors[1]:.2f}",
                     f"{factors[2] * 1e3:.2f} ms", f"{100 * error:.1f} %"])  # fmt: skip
    text = wrapped(
        "Why predictions of this run are too low, in hindsight: measured time fitted to operators, "
        "collectives and number of collectives of the model. Without a collective, a plan takes "
        "1.2 times its modelled operators: the rate of matrix products was measured in a run of "
        "milliseconds, above what the GPU sustains. Each collective of the GPT adds 0.2 ms, "
        "whatever its size: the processor starts each of them alone. The large collectives of the "
        "classifier hide little behind its matrix products, so its plan on 2x2, which counts on "
        "that, was chosen wrongly."
    )
    head = ("model", "measured / modelled without collectives", "operators x", "collectives x",
            "per collective", "mean error of the fit")  # fmt: skip
    return f"{text}\n\n{table(head, rows)}"


def fit(plans: Sequence[Row]) -> tuple[list[float], float]:
    """Factors of operators and collectives, seconds a collective; mean relative error."""
    measured = np.array([r["measured_s"] for r in plans])
    parts = np.array(
        [[r["operators_s"], r["collectives_s"], sum(r["collectives"].values())] for r in plans]
    )
    factors, *_ = np.linalg.lstsq(parts / measured[:, None], np.ones(len(plans)), rcond=None)
    error = np.abs(parts @ factors / measured - 1).mean()
    return [float(factor) for factor in factors], float(error)


def _plans(records: Sequence[Row]) -> str:
    rows = []
    for r in sorted(records, key=lambda r: (r["model"] != "gpt", r["measured_s"])):
        low, high = (f"{1e3 * v:.2f}" for v in r["interval_s"])
        predicted = f"{1e3 * r['predicted_s']:.2f}" if "predicted_s" in r else "–"
        name = f"**{r['plan']}**" if r["plan"] == PLANNER else r["plan"]
        rows.append([r["model"], r["mesh"] or "peer", name, predicted,
                     f"{1e3 * r['measured_s']:.2f}", f"{low} to {high}"])  # fmt: skip
    head = ("model", "mesh", "plan", "predicted, ms", "measured, ms", "interval, ms")
    return table(head, rows)
