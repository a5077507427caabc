"""Figures of ``docs/explanation/sharding.md``."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from benchmarks.harness.result_file import load, results

_VERSIONS = ("2.11.0", "2.12.0", "2.13.0")


def figures() -> dict[str, str]:
    """Name -> text."""
    return {**_planned(), **_searched(), **_measured()}


def _result(name: str) -> Any:
    return load(results("sharding") / name)


def _planned() -> dict[str, str]:
    correct, plan = _result("correctness.json")["summary"], _result("planning.json")["summary"]
    records = _result("planning.json")["records"]
    one_dimension = [r["planning_cpu_seconds"] for r in records if "x" not in r["mesh"]]
    large = _result("large.json")
    same = {_result(f"torch_versions_{version}.json")["same"] for version in _VERSIONS}
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
