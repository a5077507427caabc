"""Agreement of predicted with measured times of ``benchmarks.parallel.predicted_vs_measured``."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.parallel.gpu.plans import BASELINE, CHOSEN

Records = list[dict[str, Any]]
NO_TIME = "no time left"


def summary(records: Records) -> dict[str, Any]:
    """Agreement over all measured points, and for each model and kind of links."""
    measured = [r for r in records if "measured_s" in r]
    groups = {f"{r['model']} {r['links']}": [] for r in measured}
    for record in measured:
        groups[f"{record['model']} {record['links']}"].append(record)
    return {
        "points": len(measured),
        "failed": sum("error" in r and r["error"] != NO_TIME for r in records),
        "not_run": sum(r.get("error") == NO_TIME for r in records),
        **(_agreement(measured) if len(measured) > 1 else {}),
        "groups": {name: _group(group) for name, group in groups.items()},
    }


def _agreement(records: Records) -> dict[str, float]:
    predicted = np.array([r["predicted_s"] for r in records])
    measured = np.array([r["measured_s"] for r in records])
    errors = np.abs(predicted / measured - 1)
    agreement = {
        "mape": float(errors.mean()),
        "worst_error": float(errors.max()),
        "worst_over_best": float(measured.max() / measured.min()),
    }
    if len(set(predicted)) > 1 and len(set(measured)) > 1:  # otherwise there is no order to compare
        agreement["spearman"] = float(np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1])
    return agreement


def _group(records: Records) -> dict[str, float]:
    """Agreement, and regret: how much slower the plan with the best prediction is than the best."""
    best = min(r["measured_s"] for r in records)
    chosen = min(records, key=lambda r: r["predicted_s"])
    group = {"points": len(records), "regret": chosen["measured_s"] / best - 1}
    if len(records) > 1:
        group |= _agreement(records)
    baseline = _find_plan(records, BASELINE)
    chosen_plan = _find_plan(records, CHOSEN)
    if baseline and chosen_plan:
        group["nostall_over_even_1f1b"] = baseline["measured_s"] / chosen_plan["measured_s"]
    return group


def _find_plan(records: Records, name: str) -> dict[str, Any] | None:
    return next((r for r in records if name in r["name"].split(" = ")), None)


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Ranks from 0; equal values have their mean rank."""
    return np.array([(values < v).sum() + ((values == v).sum() - 1) / 2 for v in values])


def print_summary(records: Records, summary: dict[str, Any]) -> None:
    print(f"\n{'model':6}{'links':6}{'plan':32}{'split':10}{'predicted':>10}{'measured':>10}")
    for r in records:
        measured = f"{r['measured_s'] * 1e3:8.2f}ms" if "measured_s" in r else "failed"
        if r.get("error") == NO_TIME:
            measured = "not run"
        predicted = f"{r['predicted_s'] * 1e3:8.2f}ms"
        print(f"{r['model']:6}{r['links']:6}{r['name'][:31]:32}{r['split'][:9]:10}"
              f"{predicted:>10}{measured:>10}")  # fmt: skip
    for name, values in {"all": summary, **summary["groups"]}.items():
        rounded = {k: round(v, 3) for k, v in values.items() if isinstance(v, float | int)}
        print(f"{name:12}", rounded)
