"""Result file of ``benchmarks.sharding.gpu.plans``, and the agreement of its predictions."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.harness.result_file import head
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_atomically

PLANNER = "sharding"
"""Name of the planner's plans; the one with the least predicted time is its choice."""
SLOWER = 0.03
"""Share by which the planner's best plan may be slower than a peer beyond the intervals."""
Record = dict[str, Any]


@dataclass
class Results:
    """Records of earlier sessions and of this one; rank 0 alone writes the file."""

    path: Path
    tiny: bool
    sessions: list[Record] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, tiny: bool) -> Results:
        """Load the file if it exists.  Raises BadInput if its models have another size."""
        results = cls(path, tiny)
        if path.exists():
            body = json.loads(path.read_text(encoding="utf-8"))
            if body["tiny"] != tiny:
                raise BadInput(f"{path} is a run of models of another size; give another --out")
            results.sessions = body["sessions"]
            results.records = [r for r in body["records"] if "measured_s" in r]
        return results

    def has(self, record: Record) -> bool:
        """Whether a plan was measured."""
        return any(_key(r) == _key(record) and "measured_s" in r for r in self.records)

    def begin(self, about: Record, measured: Record) -> None:
        """Start a new session; later records belong to it."""
        self.sessions.append({**head(), "about": about, "measured": measured})

    def put(self, record: Record) -> None:
        """Add a record; it replaces that of the same plan."""
        self.records = [r for r in self.records if _key(r) != _key(record)]
        self.records.append({"session": len(self.sessions) - 1, **record})

    def write(self) -> None:
        """Write the file if this is rank 0."""
        if dist.get_rank() != 0:
            return
        body = {
            "kind": "measured",
            "tiny": self.tiny,
            "sessions": self.sessions,
            "summary": summary(self.records),
            "records": self.records,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, (json.dumps(body, indent=1) + "\n").encode())


def _key(record: Record) -> tuple[str, str, str]:
    return record["model"], record["mesh"], record["plan"]


def interval(seconds: Sequence[float]) -> Record:
    """Median of steps with its interval of 95 % by order statistics (David and Nagaraja 2003)."""
    ordered, count = sorted(seconds), len(seconds)
    half = 0.98 * math.sqrt(count)  # 1.96 standard deviations of a binomial with p = 1/2
    low, high = max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half))
    return {
        "measured_s": statistics.median(ordered),
        "interval_s": [ordered[low], ordered[high]],
        "steps": count,
    }


def summary(records: Sequence[Record]) -> Record:
    """Agreement by model: error, Kendall's tau, regret, and the planner's plan beside the peers."""
    measured = [r for r in records if "measured_s" in r]
    names = dict.fromkeys(r["model"] for r in measured)
    groups = {name: _group([r for r in measured if r["model"] == name]) for name in names}
    plans = [r for r in measured if "predicted_s" in r]
    return {
        "plans": len(plans),
        "peers": len(measured) - len(plans),
        "failed": sum("error" in r for r in records),
        "models": groups,
    }


def _group(records: Sequence[Record]) -> Record:
    plans = [r for r in records if "predicted_s" in r]
    peers = [r for r in records if "predicted_s" not in r]
    result: Record = {"plans": len(plans)}
    if plans:
        best = min(plans, key=lambda r: r["measured_s"])
        own = [r for r in plans if r["plan"] == PLANNER]
        chosen = min(own or plans, key=lambda r: r["predicted_s"])
        result |= {
            **_agreement(plans),
            "slowest_over_fastest": max(r["measured_s"] for r in plans) / best["measured_s"],
            "regret": chosen["measured_s"] / best["measured_s"] - 1,
            "chosen": f"{chosen['plan']} on {chosen['mesh']}",
            "fastest": f"{best['plan']} on {best['mesh']}",
            "hybrids": _agreement([r for r in plans if "stages" in r]),
            "peers": {peer["plan"]: _against(chosen, peer) for peer in peers},
        }
    return result


def _agreement(plans: Sequence[Record]) -> Record:
    """Number of plans, errors of their predictions, and tau; only the number if there are none."""
    if not plans:
        return {"plans": 0}
    errors = [abs(r["predicted_s"] / r["measured_s"] - 1) for r in plans]
    mape, worst = statistics.fmean(errors), max(errors)
    return {"plans": len(plans), "mape": mape, "worst_error": worst, **tau(plans)}


def tau(plans: Sequence[Record]) -> Record:
    """Kendall's tau among the pairs of plans whose intervals do not overlap, and their number."""
    agree = pairs = 0
    for a, b in combinations(plans, 2):
        (low_a, high_a), (low_b, high_b) = a["interval_s"], b["interval_s"]
        if high_a < low_b or high_b < low_a:
            pairs += 1
            order = (a["predicted_s"] - b["predicted_s"]) * (a["measured_s"] - b["measured_s"])
            agree += (order > 0) - (order < 0)
    return {"tau": agree / pairs if pairs else None, "pairs": pairs}


def _against(chosen: Record, peer: Record) -> Record:
    """How a plan compares with a peer; it loses if it is slower by more beyond the intervals."""
    return {
        "measured_s": peer["measured_s"],
        "over_plan": peer["measured_s"] / chosen["measured_s"],
        "loses": chosen["interval_s"][0] > peer["interval_s"][1] * (1 + SLOWER),
    }


def print_table(records: Sequence[Record], found: Record) -> None:
    """One line for each record, then the summary."""
    print(f"{'model':11}{'mesh':5}{'plan':30}{'predicted':>10}{'measured':>10}  interval")
    for r in records:
        head = f"{r['model']:11}{r['mesh']:5}{r['plan'][:29]:30}"
        if "measured_s" not in r:
            print(f"{head} {r['error'][:80]}")
            continue
        predicted = f"{r['predicted_s'] * 1e3:8.2f}ms" if "predicted_s" in r else ""
        low, high = (f"{v * 1e3:.2f}" for v in r["interval_s"])
        print(f"{head}{predicted:>10}{r['measured_s'] * 1e3:8.2f}ms  {low}-{high}"
              f"  {r.get('gradient_error', math.nan):.1e}")  # fmt: skip
    print(json.dumps({k: v for k, v in found.items() if k != "models"}))
    for name, group in found["models"].items():
        print(name, json.dumps(_rounded(group)))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
