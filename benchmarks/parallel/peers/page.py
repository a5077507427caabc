"""Section of ``docs/results/parallel.md``: captured plans beside PyTorch's engines."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render

Row = Mapping[str, Any]
FILE = results("parallel") / "peers_2.json"
REPRICED = results("parallel") / "repriced_2.json"
_COMPILED = ("compiled", "compiled and captured")
WANTED = tuple(
    f"{arm}, {mode}"
    for arm, modes in (
        ("fsdp2", _COMPILED), ("tp", _COMPILED),
        *((f"candidate {engine}", _COMPILED[1:]) for engine in ("ddp", "fsdp2", "tp")),
    )
    for mode in modes
)  # fmt: skip
"""Arms that are set up last and may lack the time."""


def section() -> str:
    """The whole section."""
    content = load(FILE)
    rows = []
    for model, own in content["summary"].items():
        if not own:
            continue
        arms = _medians(content["models"][model])
        rows.append({"model": model, **own, "chosen_ms": arms[own["chosen"]],
                     "peer_ms": arms[own["fastest_peer"]], **_extra(own)})  # fmt: skip
    models = [row["model"] for row in rows]
    predictions = content.get("predictions") or {}
    regrets = predictions.get("regrets", {})
    repriced = load(REPRICED) if REPRICED.exists() else {}
    values = {
        "repriced": repriced,
        "repriced_file": REPRICED,
        "engines": repriced.get("predictions", {}).get("plans", []),
        "predictions": predictions,
        "plans": predictions.get("plans", []),
        "regrets": ", ".join(f"{model} {100 * value:.1f} %" for model, value in regrets.items()),
        "own": [row for row in rows if "peer_over_plan" in row],
        "file": FILE,
        "device": content["device"],
        "date": content["date"],
        "gpus": content["gpus"],
        "rows": rows,
        "launched": [
            r["launched_over_chosen"]["ratio"] for r in rows if "launched_over_chosen" in r
        ],
        "models": models,
        "arms": _table(content, models),
        "missing": [
            {"model": model, "arms": "; ".join(own)}
            for model in models
            if (own := [a for a in WANTED if a not in _medians(content["models"][model])])
        ],
        "notes": [
            {"model": model, "arm": name(arm), "note": note}
            for model in content["models"]
            for arm in content["models"][model]["arms"]
            for note in arm.get("notes", [])
        ],
        "failures": [
            {"model": model, "arm": name(arm), "error": arm["error"].split(";")[0][:110]}
            for model in content["models"]
            for arm in content["models"][model]["arms"]
            if "error" in arm
        ],
    }
    return render(__file__, values)


def name(arm: Row) -> str:
    """An arm with its mode."""
    return f"{arm['arm']}, {arm['mode']}"


def _medians(model: Row) -> dict[str, float]:
    return {name(arm): median(arm["ms"]) for arm in model["arms"] if arm.get("ms")}


def _extra(own: Row) -> Row:
    """Ratios that a model may lack."""
    return {
        short: f"{own[key]['ratio']:.2f}" if key in own else None
        for short, key in (("launched", "launched_over_chosen"), ("bound", "bound_over_chosen"))
    }


def _table(content: Row, models: list[str]) -> dict[str, list[str | None]]:
    """Medians in ms by arm, for each model."""
    columns = [_medians(content["models"][model]) for model in models]
    arms = dict.fromkeys(arm for column in columns for arm in column)
    return {
        arm: [f"{column[arm]:.2f}" if arm in column else None for column in columns] for arm in arms
    }
