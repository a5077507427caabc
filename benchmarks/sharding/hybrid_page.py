"""Section of ``docs/results/parallel.md``: pipelines of sharded stages measured on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.result_file import results
from benchmarks.harness.template import render, source
from benchmarks.sharding.page import agreement, plans_and_peers

Row = Mapping[str, Any]


def files() -> list[Path]:
    """Result files, one for each number of GPUs."""
    return sorted(results("sharding").glob("gpu_hybrids_*.json"))


def section() -> str:
    """The whole section."""
    records = [source(path) for path in files()]
    rows = [
        {**row, "all_tau": _tau(row), "hybrid_tau": _tau(row["hybrids"])}
        for record in records
        for row in agreement(record, file=record["file"])
    ]
    runs = "\n\n".join(render(__file__, _run(record), "run") for record in records)
    return render(__file__, {"agreement": rows, "runs": runs})


def _tau(group: Row) -> str | None:
    return None if group.get("tau") is None else f"{group['tau']:.2f} ({group['pairs']} pairs)"


def _run(record: Row) -> Row:
    """The fastest plans by model, errors of predictions by micro-batches, and all plans."""
    models = record["summary"]["models"]
    return {
        "gpus": record["sessions"][0]["about"]["gpus"],
        "best": "\n".join(render(__file__, _best(record, model), "best") for model in models),
        "medians": _errors(record["records"]),
        "measured": record["sessions"][0]["measured"],
        "plans": [
            {**r, "cuts": " ".join(str(stage[1]) for stage in r.get("stages", [])[:-1]) or None}
            for r in plans_and_peers(record)
        ],
    }


def _best(record: Row, model: str) -> Row:
    """The fastest hybrid of a model beside the fastest sharding and the peers."""
    own = [r for r in record["records"] if r["model"] == model]
    plans = [r for r in own if "predicted_s" in r]
    later = sum(r["session"] > 0 for r in own)
    return {
        "model": model,
        "hybrid": _fastest([r for r in plans if "stages" in r]),
        "sharding": _fastest([r for r in plans if "stages" not in r]),
        "peer": _peer(record["summary"]["models"][model]["peers"]),
        "later": f" {later} of its {len(own)} plans and peers ran in a second call."
        if later
        else "",
    }


def _fastest(plans: Sequence[Row]) -> Row:
    return min(plans, key=lambda r: r["measured_s"])


def _peer(peers: Mapping[str, Row]) -> str:
    if not peers:
        return "peers were not measured in this run"
    name = min(peers, key=lambda peer: peers[peer]["measured_s"])
    return f"the fastest peer ({name}) {1e3 * peers[name]['measured_s']:.1f} ms"


def _errors(records: Sequence[Row]) -> str:
    """By how much predictions of hybrids are too high, by micro-batches."""
    hybrids = [r for r in records if "stages" in r and "measured_s" in r]
    ratios: dict[int, list[float]] = {}
    for r in sorted(hybrids, key=lambda r: r["micro_batches"]):
        ratios.setdefault(r["micro_batches"], []).append(r["predicted_s"] / r["measured_s"])
    return ", ".join(f"{median(found):.2f} with {count}" for count, found in ratios.items())
