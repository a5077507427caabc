"""``docs/results/fusion.md``: choices beside the proven optimum, correctness, cost on the host.

python -m benchmarks page fusion
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import results
from benchmarks.harness.template import render_page, source

PAGE = PAGES / "fusion.md"
FOLDER = results("fusion")
_PLANS = {
    "explorer": "`explore`",
    "annealed": "`explore`, then `refined`",
    "beam": "beam search of `explore` alone",
    "greedy": "`greedy`",
    "unfused": "unfused",
}
_CHECKS = {
    "random_graphs_h200": "random graphs",
    "random_graphs_interpreted": "random graphs",
    "shared_memory_rows_h200": "wide rows in shared memory",
    "multi_pass_rows_h200": "rows that are read several times",
    "opinfo_h200": "operator samples (OpInfo), operators",
    "opinfo_interpreted": "operator samples (OpInfo), operators",
}
"""Result file -> inputs of the kernels that were compared with fp64."""

Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    explorers = source(FOLDER / "explorers.json")
    values = {
        "explorers": explorers,
        "gaps": {name: explorers["summary"]["gaps"][key] for key, name in _PLANS.items()},
        "partitions": list(_PLANS.values()),
        "unproven": [
            {**record, "times_us": [record["us"][key] for key in _PLANS]}
            for record in explorers["records"]
            if not record["proven"]
        ],
        "checks": [_check(name, inputs) for name, inputs in _CHECKS.items()],
        "launch": _dependent_launch(),
        "functions": source(FOLDER / "all_fp32_values_h200.json"),
        "host_costs": [
            {"call": call, "host": record["gpu"] or "no GPU (the launch does nothing)", **times_us}
            for record in (
                source(FOLDER / f"{name}.json") for name in ("host_cost_h200", "host_cost")
            )
            for call, times_us in record["calls"].items()
        ],
    }
    return render_page(__file__, PAGE, values)


def _check(name: str, inputs: str) -> Row:
    """What a comparison with fp64 counted."""
    record = source(FOLDER / f"{name}.json")
    counts = {**record.get("seen", {}), **record}
    wrong = [*record["wrong"], *(record.get("wrong with dropout") or [])]
    return {
        "inputs": inputs,
        "where": record["gpu"] or f"Triton's interpreter, torch {record['torch']}",
        **{key: _number(counts[key]) for key in ("graphs", "kernels")},
        "wrong": len(wrong),
        "file": record["file"],
    }


def _number(counted: Any) -> int:
    return counted if isinstance(counted, int) else len(counted)


def _dependent_launch() -> Row:
    record = source(FOLDER / "dependent_launch.json")
    by_kind = record["rounds that differ, by what is between"].values()
    return {
        **record,
        "differing": sum(sum(kind.values()) for kind in by_kind),
        "without_wait": sum(record["rounds that differ without the wait"].values()),
        "rounds_without_wait": 2 * record["rounds"],
    }
