"""How well predictions of ``benchmarks.parallel.predicted_vs_measured`` agree with what was measured."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.parallel.gpu_plans import BASELINE, CHOSEN

Records = list[dict[str, Any]]
NO_TIME = "no time left"


def summary(records: Records) -> dict[str, Any]:
    """Over all points that ran, and for each model and kind of links."""
    ran = [r for r in records if "measured_s" in r]
    groups = {f"{r['model']} {r['links']}": [] for r in ran}
    for record in ran:
        groups[f"{record['model']} {record['links']}"].append(record)
    return {
        "points": len(ran),
        "failed": sum("error" in r and r["error"] != NO_TIME for r in records),
        "not_run": sum(r.get("error") == NO_TIME for r in records),
        **(_agreement(ran) if len(ran) > 1 else {}),
        "groups": {name: _group(found) for name, found in groups.items()},
    }


def _agreement(ran: Records) -> dict[str, float]:
    predicted = np.array([r["predicted_s"] for r in ran])
    measured = np.array([r["measured_s"] for r in ran])
    errors = np.abs(predicted / measured - 1)
    found = {
        "mape": float(errors.mean()),
        "worst_error": float(errors.max()),
        "worst_over_best": float(measured.max() / measured.min()),
    }
    if len(set(predicted)) > 1 and len(set(measured)) > 1:  # else there is no order to compare
        found["spearman"] = float(np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1])
    return found


def _group(ran: Records) -> dict[str, float]:
    """Regret: how much slower the plan with the best prediction is than the best measured."""
    best = min(r["measured_s"] for r in ran)
    chosen = min(ran, key=lambda r: r["predicted_s"])
    found = {"points": len(ran), "regret": chosen["measured_s"] / best - 1}
    if len(ran) > 1:
        found |= _agreement(ran)
    even = _named(ran, BASELINE)
    own = _named(ran, CHOSEN)
    if even and own:
        found["nostall_over_even_1f1b"] = even["measured_s"] / own["measured_s"]
    return found


def _named(ran: Records, name: str) -> dict[str, Any] | None:
    return next((r for r in ran if name in r["name"].split(" = ")), None)


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Ranks from 0; equal values share their mean."""
    return np.array([(values < v).sum() + ((values == v).sum() - 1) / 2 for v in values])


def show(records: Records, found: dict[str, Any]) -> None:
    print(f"\n{'model':6}{'links':6}{'plan':32}{'split':10}{'predicted':>10}{'measured':>10}")
    for r in records:
        measured = f"{r['measured_s'] * 1e3:8.2f}ms" if "measured_s" in r else "failed"
        if r.get("error") == NO_TIME:
            measured = "not run"
        predicted = f"{r['predicted_s'] * 1e3:8.2f}ms"
        print(f"{r['model']:6}{r['links']:6}{r['name'][:31]:32}{r['split'][:9]:10}"
              f"{predicted:>10}{measured:>10}")  # fmt: skip
    for name, values in {"all": found, **found["groups"]}.items():
        said = {k: round(v, 3) for k, v in values.items() if isinstance(v, float | int)}
        print(f"{name:12}", said)
