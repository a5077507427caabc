"""Section of ``docs/results/parallel.md``: pipelines of sharded stages measured on GPUs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.sharding.gpu.results import PLANNER

Row = Mapping[str, Any]


def files() -> list[Path]:
    """Result files, one for each number of GPUs."""
    return sorted(results("sharding").glob("gpu_hybrids_*.json"))


def section() -> str:
    """The whole section."""
    intro = wrapped(
        "Hybrids: pipelines of two, four and eight micro-batches whose stages are sharded, in the "
        "order 1F1B, beside shardings of the whole batch and the same peers (`python -m benchmarks "
        "run sharding.gpu_hybrids`). Models, rates and steps are those of the section above; the "
        "processor launches all plans operator by operator, as `nostall launch` does. Tau counts "
        "hybrids and shardings together, then hybrids alone; regret is that of the plan with the "
        "best prediction among the planner's hybrids and shardings."
    )
    head = ("GPUs", "model", "hybrids", "plans", "tau", "tau of hybrids", "regret", "MAPE",
            "planner's plan", "fastest plan", "gradients within")  # fmt: skip
    rows = [row for path in files() for row in _agreement(path)]
    parts = ["## Pipelines of sharded stages on GPUs", intro, table(head, rows)]
    details = (part(path) for path in files() for part in (_best, _errors, _plans))
    return "\n\n".join([*parts, *details])


def _agreement(path: Path) -> list[list[str]]:
    record = load(path)
    about = record["sessions"][0]["about"]
    label = f"{about['gpus']} {about['device'].removeprefix('NVIDIA ')} ({link(path)})"
    rows = []
    for name, group in record["summary"]["models"].items():
        own = [r for r in record["records"] if r["model"] == name]
        worst = max(r["gradient_error"] for r in own if "gradient_error" in r)
        hybrids = group["hybrids"]
        rows.append([
            label, name, str(hybrids["plans"]), str(group["plans"]), _tau(group), _tau(hybrids),
            f"{100 * group['regret']:.1f} %", f"{100 * group['mape']:.1f} %", group["chosen"],
            group["fastest"], f"{worst:.1g}",
        ])  # fmt: skip
    return rows


def _tau(group: Row) -> str:
    return "–" if group.get("tau") is None else f"{group['tau']:.2f} ({group['pairs']} pairs)"


def _best(path: Path) -> str:
    """The fastest hybrid of each model beside the fastest sharding and the peers."""
    record = load(path)
    sentences = []
    for name, group in record["summary"]["models"].items():
        plans = [r for r in record["records"] if r["model"] == name and "predicted_s" in r]
        hybrid = _fastest([r for r in plans if "stages" in r])
        sharding = _fastest([r for r in plans if "stages" not in r])
        sentences.append(
            f"{name}: the fastest hybrid ({hybrid['plan']} on {hybrid['mesh']}) takes "
            f"{_ms(hybrid)} ms, modelled {1e3 * hybrid['predicted_s']:.1f}; the fastest sharding "
            f"({sharding['plan']} on {sharding['mesh']}) {_ms(sharding)} ms; {_peer(group)}."
            f"{_calls([r for r in record['records'] if r['model'] == name])}"
        )
    gpus = record["sessions"][0]["about"]["gpus"]
    return "\n".join([f"On {gpus} GPUs:\n", *map(_item, sentences)])


def _item(sentence: str) -> str:
    first, *others = wrapped(f"- {sentence}").split("\n")
    return "\n".join([first, *(f"  {line}" for line in others)])


def _calls(records: Sequence[Row]) -> str:
    """How many plans and peers ran in a later call than the first one."""
    later = sum(r["session"] > 0 for r in records)
    return f" {later} of its {len(records)} plans and peers ran in a second call." if later else ""


def _peer(group: Row) -> str:
    """The fastest peer."""
    if not group["peers"]:
        return "peers were not measured in this run"
    name = min(group["peers"], key=lambda p: group["peers"][p]["measured_s"])
    return f"the fastest peer ({name}) {_ms(group['peers'][name])} ms"


def _errors(path: Path) -> str:
    """By how much predictions of hybrids are too high, by micro-batches."""
    record = load(path)
    hybrids = [r for r in record["records"] if "stages" in r and "measured_s" in r]
    measured = record["sessions"][0]["measured"]
    counts = sorted({r["micro_batches"] for r in hybrids})
    ratios = {
        count: statistics.median(
            r["predicted_s"] / r["measured_s"] for r in hybrids if r["micro_batches"] == count
        )
        for count in counts
    }
    medians = ", ".join(f"{ratio:.2f} with {count}" for count, ratio in ratios.items())
    return wrapped(
        f"Predicted over measured times of hybrids are, in the median, {medians} micro-batches. "
        "The likely reason is the processor: predictions take "
        f"{1e6 * measured['launch_s']:.0f} µs for each operator and "
        f"{1e3 * measured['send_s']:.2f} ms for each collective, measured by launching two plans "
        "of the whole batch, and the more micro-batches, the more operators and collectives."
    )


def _fastest(plans: Sequence[Row]) -> Row:
    return min(plans, key=lambda r: r["measured_s"])


def _ms(record: Row) -> str:
    return f"{1e3 * record['measured_s']:.1f}"


def _plans(path: Path) -> str:
    """All plans and peers of a run."""
    rows, record = [], load(path)
    records = [r for r in record["records"] if "measured_s" in r]
    for r in sorted(records, key=lambda r: (r["model"] != "gpt", r["measured_s"])):
        low, high = (f"{1e3 * v:.2f}" for v in r["interval_s"])
        predicted = f"{1e3 * r['predicted_s']:.2f}" if "predicted_s" in r else "–"
        name = f"**{r['plan']}**" if r["plan"] == PLANNER else r["plan"]
        cuts = " ".join(str(stage[1]) for stage in r.get("stages", [])[:-1]) or "–"
        rows.append([r["model"], r["mesh"] or "peer", cuts, name, predicted,
                     f"{1e3 * r['measured_s']:.2f}", f"{low} to {high}"])  # fmt: skip
    head = ("model", "stages or mesh", "cuts before layers", "plan", "predicted, ms",
            "measured, ms", "interval, ms")  # fmt: skip
    gpus = record["sessions"][0]["about"]["gpus"]
    return f"All plans and peers on {gpus} GPUs:\n\n{table(head, rows)}"
