"""Figures in the sentences of ``docs/explanation``, written from committed results.

A figure is the text between ``<!-- =NAME -->`` and ``<!-- / -->``. The command
``python -m benchmarks page explanation`` writes all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from statistics import fmean, geometric_mean, median
from typing import Any

from benchmarks.front.levels import native_schedules
from benchmarks.harness.result_file import ROOT, load, results
from nostall.core.files.atomic import write_atomically

FOLDER = ROOT.parent / "docs" / "explanation"
_BEYOND = 0.005
"""Differences below this one count as none."""
_COARSE = "critical_path_alexnet"
Times = Mapping[str, Mapping[str, float]]
"""Batch -> method -> median time in microseconds."""
_FIGURE = re.compile(r"<!-- =([\w-]+) -->(.*?)<!-- / -->", re.DOTALL)


def filled(text: str, figures: Mapping[str, str]) -> str:
    """The text with the present figures.

    Raises KeyError if the text has a figure that ``figures`` lacks, or lacks one that it has.
    """
    if missing := figures.keys() - set(used(text)):
        raise KeyError(f"the page does not show {', '.join(sorted(missing))}")
    return _FIGURE.sub(lambda found: f"<!-- ={found[1]} -->{figures[found[1]]}<!-- / -->", text)


def used(text: str) -> list[str]:
    """Names of the figures of a text."""
    return [found[1] for found in _FIGURE.finditer(text)]


def write() -> None:
    """Write the figures of all pages."""
    for name, figures in PAGES.items():
        path = FOLDER / name
        write_atomically(path, filled(path.read_text("utf-8"), figures()).encode())


def cost_model() -> dict[str, str]:
    """Name -> text: the fit of the model of generated kernels."""
    fit = load(results("fusion") / "unseen_fit.json")
    before, after = (100 * fit["regret"][name]["mean"] for name in ("sources", "fitted"))
    machine = fit["figures"]["machine"]
    starts = load(results("fusion") / "program_start_rate.json")["measured"]
    return {
        "fit-size": f"{fit['plans']:,} plans of {fit['kernels']} kernels",
        "regret-before": f"{before:.1f} %",
        "regret-after": f"{after:.1f} %",
        "issued": f"{machine['issued']:.2f}",
        "program-start": f"{1e9 * machine['program_s']:.1f} ns",
        "program-start-alone": f"{min(median(row['ns_each']['early']) for row in starts):.2f} ns",
        "warp-start": f"{1e9 * machine['warp_s']:.2f} ns",
    }


def codegen() -> dict[str, str]:
    """Name -> text: outputs that are stored to leave L2 first."""
    chains = load(results("fusion") / "streamed_outputs.json")["chains"].values()
    losses = [
        {name: median(row["streamed"]) / median(row["kept"]) - 1 for name, row in times.items()}
        for times in (chain["samples_us"] for chain in chains)
    ]
    faster = sum(row["alone"] < -_BEYOND for row in losses)
    slower = sum(row["alone"] > _BEYOND for row in losses)
    both = max(max(row.values()) for row in losses if row["alone"] <= _BEYOND)
    return {
        "streamed": f"{faster} of {len(losses)} kernels faster and {slower} slower",
        "streamed-both": f"{100 * both:.1f} %",
    }


def measuring() -> dict[str, str]:
    """Name -> text."""
    return {"native-mean": f"{native_schedules().mean:.3f}"}


def pipeline_planners() -> dict[str, str]:
    """Name -> text."""
    merging = load(results("parallel") / "planning_time.json")["merging"]
    times = {row["cuts"]: row["modelled_iteration_s"] for row in merging}
    found = {
        f"merged-{cuts}": f"{100 * (times[cuts] / times[max(times)] - 1):.1f} %"
        for cuts in (50, 25)
    }
    for model in ("BERT-48", "GNMT-16"):
        rates = [
            f"{row['implied_gbytes_per_s']:.2f}"
            for row in load(results("parallel") / "dapple_tables.json")["implied_bandwidth"]
            if model in row["row"]
        ]
        found[f"implied-{model}"] = f"{', '.join(rates[:-1])} and {rates[-1]} GB/s"
    return found


def serving() -> dict[str, str]:
    """Name -> text."""
    joint, apart = (
        _median_times(run["times"])
        for run in load(results("serving") / "tall_variants_h200.json.gz")["runs"]
    )
    eight_warps = [_over_fa3(joint, name) for name in _methods(joint) if name.startswith("n")]
    serial = _over_fa3(joint, "n128s2-serial")
    eight_warps.remove(serial)
    forced = [_over_fa3(apart, name) for name in ("queue", "queue-s3", "lpt", "lpt-free")]
    shipped = [row["lpt-free-nopin"] / row["rule"] for row in apart.values() if "queue" in row]
    decode = apart["decode-128k (28, 4)"]
    turns = _over_fa3(apart, "lpt") / _over_fa3(apart, "lpt-free")
    return {
        "gluon-rule": f"{_over_fa3(apart, 'rule'):.2f}",
        "gluon-eight-warps": f"{min(eight_warps):.2f} to {max(eight_warps):.2f}",
        "gluon-serial": f"{serial:.2f}",
        "gluon-forced": f"{min(forced):.2f} to {max(forced):.2f}",
        "gluon-shipped": f"{_over_fa3(apart, 'lpt-free-nopin'):.2f}",
        "gluon-turns": f"{100 * abs(turns - 1):.0f} %",
        "gluon-over-rule": f"{min(shipped):.2f} to {max(shipped):.2f}",
        "reduction-old": f"{decode['rule, old reduction']:.0f} us",
        "reduction-new": f"{decode['rule']:.0f} us",
        "decodes": f"{1 / _over_fa3(apart, 'n64s3 w4x2 u2', kind='decode'):.2f}",
    }


def _median_times(times: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> Times:
    return {
        batch: {name: median(samples) for name, samples in row["samples_us"].items()}
        for batch, row in times.items()
    }


def _methods(times: Times) -> set[str]:
    return {name for row in times.values() for name in row}


def _over_fa3(times: Times, method: str, kind: str = "prefill") -> float:
    """Geometric mean of FlashAttention-3's time over a method's, on the batches of one kind."""
    words = ("prefill", "reuse") if kind == "prefill" else ("decode", "mixed", "trace")
    return geometric_mean(
        row["FA3"] / row[method]
        for batch, row in times.items()
        if batch.startswith(words) and method in row
    )


def sharding() -> dict[str, str]:
    """Name -> text."""
    return {**_planned(), **_searched(), **_measured()}


def _result(name: str) -> Any:
    return load(results("sharding") / name)


def _planned() -> dict[str, str]:
    correct, plan = _result("correctness.json")["summary"], _result("planning.json")["summary"]
    records = _result("planning.json")["records"]
    one_dimension = [r["planning_cpu_seconds"] for r in records if "x" not in r["mesh"]]
    large = _result("large.json")
    same = {
        _result(f"torch_versions_{version}.json")["same"]
        for version in ("2.11.0", "2.12.0", "2.13.0")
    }
    return {
        "correct-plans": f"{correct['plans']} plans",
        "gradient-error": f"{_up(correct['worst_gradient_error'])}",
        "instances": f"{plan['instances']} instances",
        "not-slower": "never slower" if not plan["worse_than_a_rule"]
        else f"slower in {plan['worse_than_a_rule']}",
        "best-rule": f"{plan['largest_gain_over_best_rule']:.2f} times",
        "bounded": f"{plan['bounded']} plans",
        "over-bound": f"{plan['median_over_bound']:.2f} times",
        "over-bound-most": f"{plan['largest_over_bound']:.1f} at most",
        "integral": f"{plan['integral']} of {plan['programs']} programs",
        "plan-cpu-one": f"{max(one_dimension):.1f} s",
        "plan-cpu": f"{plan['longest_planning_cpu_seconds']:.1f} s",
        "plan-elapsed": f"{plan['longest_planning_seconds']:.1f} s",
        "large": f"{large['operators']:,} operators in {large['classes']} classes: capture "
        f"{large['capture_seconds']:.0f} s, planning {large['planning_seconds']:.0f} s",
        "same": " and ".join(sorted(same)),
    }  # fmt: skip


def _searched() -> dict[str, str]:
    annealing, moves = _result("annealing.json"), _result("improvement.json")["records"]
    anneal = annealing["summary"]
    apart = max(gap for r in annealing["records"] for gap in r["gaps"])
    gaps = {
        method: [100 * r["gap"] for r in moves if r["method"] == method]
        for method in ("dqn", "random")
    }
    seconds = [r["cpu_seconds"] for r in moves if r["method"] == "annealing"]
    (t5,) = (
        r for r in _result("automap.json")["records"]
        if (r["model"], r["explorer"]) == ("t5", "automap-operator")
    )  # fmt: skip
    return {
        "anneal-runs": f"{anneal['runs']} runs on {anneal['instances']} instances",
        "anneal-within": f"all within {max(0.01, math.ceil(1e4 * apart) / 100):.2f} %",
        "anneal-cpu": f"{math.ceil(anneal['longest_cpu_seconds'])} s",
        "dqn-gap": f"{min(gaps['dqn']):.0f} to {max(gaps['dqn']):.0f} %",
        "random-gap": f"{min(gaps['random']):.0f} to {max(gaps['random']):.0f} %",
        "anneal-seconds": f"{min(seconds):.1f} to {max(seconds):.1f} s",
        "automap-t5": f"{t5['partitioned']} of {t5['dimensions']} in {t5['seconds']:.0f} s",
    }


def _measured() -> dict[str, str]:
    graphs, launched, busy = (
        _result(name)["summary"]["models"]
        for name in ("gpu_plans_2.json", "gpu_plans_4_launched.json", "gpu_plans_4_busy.json")
    )
    found = {}
    for where, models in (("graphs", graphs), ("launched", launched)):
        found[f"{where}-plans"] = f"{sum(m['plans'] for m in models.values())} plans"
        for name, model in models.items():
            found[f"{where}-{name}-tau"] = f"{model['tau']:.2f}"
            found[f"{where}-{name}-regret"] = f"{100 * model['regret']:.1f} %"
    peers = {
        f"{model}, {peer}": row["over_plan"]
        for model, rows in launched.items()
        for peer, row in rows["peers"].items()
    }
    sharded = [ratio for name, ratio in peers.items() if "DDP" not in name]
    return found | {
        "graphs-gpt-mape": f"{100 * graphs['gpt']['mape']:.0f} %",
        "graphs-classifier-mape": f"{100 * graphs['classifier']['mape']:.0f} %",
        "graphs-regret": f"{100 * max(m['regret'] for m in graphs.values()):.0f} %",
        "ddp-gpt-faster": f"{100 * (1 - peers['gpt, DDP']):.0f} %",
        "ddp-gpt": f"{peers['gpt, DDP']:.2f}",
        "ddp-classifier": f"{peers['classifier, DDP']:.2f}",
        "sharded-peers": f"{min(sharded):.2f} to {max(sharded):.1f}",
        "busy-regret": f"{1 + fmean(m['regret'] for m in busy.values()):.1f} times",
    }


def _up(value: float) -> str:
    """A bound in two digits, rounded upwards."""
    exponent = math.floor(math.log10(value))
    return f"{math.ceil(10 * value / 10**exponent) / 10:.1f}e{exponent}"


def verifier_evidence() -> dict[str, str]:
    """Name -> text."""
    found = load(results("sass") / "false_alarms_blind.json")["summary"]
    parts = [
        f"{refused} of {number} for {architecture}"
        for architecture, (number, refused) in sorted(
            found["by_architecture"].items(), key=lambda item: int(item[0].removeprefix("sm_"))
        )
    ]
    before = load(results("sass") / "false_alarms_before_repair.json")["summary"]["unseen"]
    tests = ("blind", "blind_2", "blind_4", "blind_5")
    later = (*tests[1:], "blind_3", *(f"{name}_after" for name in tests))
    return {
        **{name.replace("_", "-"): _refused(f"false_alarms_{name}.json") for name in later},
        "before-repair": f"{before['refused']} of {before['functions']:,}",
        "before-repair-share": f"{100 * before['refused'] / before['functions']:.2f} %",
        "blind": f"{found['refused']} of {found['functions']:,}",
        "blind-share": f"{100 * found['refused'] / found['functions']:.2f} %",
        "blind-architectures": f"{', '.join(parts[:-1])}, and {parts[-1]}",
    }


def _refused(name: str) -> str:
    """Functions that a test refused, of all."""
    found = load(results("sass") / name)["summary"]
    share = 100 * found["refused"] / found["functions"]
    return f"{found['refused']} of {found['functions']:,} ({share:.2f} %)"


def workload() -> dict[str, str]:
    """Name -> text."""
    found = {}
    for row in load(results("workload") / "slowdown.json")["leaving_one_of_all_out"]:
        fitted = row["fitted_on_others"]
        found[f"error-{row['model']}"] = f"{100 * fitted['mape']:.1f} %"
        found[f"covered-{row['model']}"] = f"{100 * fitted['covered_by_90']:.1f} %"
    bytes_errors = [
        -100 * error
        for model in load(results("workload") / "fit.json")["models"]
        for error in model["bytes_error"].values()
    ]
    tracelens = [
        100 * abs(difference)
        for record in load(results("workload") / "tracelens.json")["records"]
        for difference in record["difference_of_total"].values()
    ]
    ranks = load(results("workload") / "fit.json")
    alone = {row["model"]: row for row in ranks["exchanged"]}
    shares = [row["fitted_ms"] / row["measured_ms"] for row in alone.values()]
    apart, overlaps = _beside_hta()
    return found | {
        "without-waiting": f"{-100 * ranks['all_ranks']['fitted_error']:.0f} %",
        "exchanged": f"{min(shares):.1f} to {max(shares):.1f} times",
        "hta-named": f"{100 * max(apart.pop(_COARSE)):.1f} %",
        "hta": f"{100 * max(value for values in apart.values() for value in values):.1f} %",
        "hta-overlap": f"{max(overlaps):.1f} points",
        "bytes-error": f"{min(bytes_errors):.0f} to {max(bytes_errors):.0f} %",
        "tracelens": f"{max(tracelens):.1f} %",
    }


def _beside_hta() -> tuple[dict[str, list[float]], list[float]]:
    """Differences of times as shares of the span by trace, and of overlaps in points."""
    records = load(results("workload") / "hta.json")["records"]
    apart = {
        _COARSE if row["trace"].startswith(_COARSE) else row["trace"]:
        [abs(value) for value in row["difference_of_total"].values()]
        for row in records
    }  # fmt: skip
    overlaps = [
        100 * abs(row["nostall"]["overlap"] - row["hta"]["overlap"])
        for row in records
        if row["nostall"]["overlap"] is not None and row["hta"]["overlap"] is not None
    ]
    return apart, overlaps


PAGES: Mapping[str, Callable[[], dict[str, str]]] = {
    "codegen.md": codegen,
    "cost-model.md": cost_model,
    "measuring.md": measuring,
    "pipeline-planners.md": pipeline_planners,
    "serving.md": serving,
    "sharding.md": sharding,
    "verifier-evidence.md": verifier_evidence,
    "workload.md": workload,
}
"""Page -> its figures by name."""
