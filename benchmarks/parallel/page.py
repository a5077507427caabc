"""``docs/results/parallel.md``: pipeline and sharding plans against papers, optima and GPUs.

python -m benchmarks page parallel
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import results
from benchmarks.harness.template import render_page, source
from benchmarks.parallel.gpu.plans import PLANNED_POINTS, point_name
from benchmarks.parallel.message_page import section as messages
from benchmarks.parallel.peers.page import section as peers
from benchmarks.sharding.hybrid_page import section as hybrids
from benchmarks.sharding.page import section as shardings

PAGE = PAGES / "parallel.md"
FOLDER = results("parallel")
_QUANTILES = ("median", "q75", "q95", "max")
_WHEN_NEEDED = "2026-11-27T15:30"
"""Date of the first session whose receives within a server start when needed."""
Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    runs = {gpus: source(FOLDER / f"predicted_vs_measured_{gpus}.json") for gpus in (2, 4)}
    gap, planning = (
        source(FOLDER / f"{name}.json") for name in ("optimality_gap", "planning_time")
    )
    values = {
        "runs": [_run(gpus, record) for gpus, record in runs.items()],
        "groups": [
            {"gpus": gpus, "name": name, **group}
            for gpus, record in runs.items()
            for name, group in record["summary"]["groups"].items()
        ],
        **_ahead(runs),
        "messages": messages(),
        "peers": peers(),
        "shardings": shardings(),
        "hybrids": hybrids(),
        **_left(runs[4]["records"]),
        **_trained(),
        "killed": [
            {"run": run, **record}
            for run in map(source, sorted(FOLDER.glob("killed_rank_*.json")))
            for record in run["records"]
        ],
        "dapple": source(FOLDER / "dapple_tables.json"),
        "gap": gap,
        "gaps": _gaps(gap),
        "planning": planning,
        **_planning_times(planning["growth"]),
    }
    return render_page(__file__, PAGE, values)


def _run(gpus: int, record: Row) -> Row:
    """A file of measured iterations; one of several sessions names the card in each."""
    about = record["about"] if "about" in record else record["sessions"][0]["about"]
    return {
        **record,
        "gpus": gpus,
        "device": about["device"],
        "left": len(_points_left(record["records"])),
        "regrets": [group["regret"] for group in record["summary"]["groups"].values()],
    }


def _ahead(runs: Mapping[int, Row]) -> Row:
    """The points that were measured before receives started when needed, and the later ones."""
    counts: list[str] = []
    late: list[Row] = []
    for gpus, record in runs.items():
        sessions = record.get("sessions", [record])
        points = [
            r
            for r in record["records"]
            if "measured_s" in r and r["engine"] == "p2p" and r["split"] != str(gpus)
        ]
        early = [r for r in points if sessions[r.get("session", 0)]["date"] < _WHEN_NEEDED]
        late += [r for r in points if r not in early]
        models = " and ".join(dict.fromkeys(r["model"] for r in early))
        counts.append(f"{len(early)} of {len(points)} on {gpus} GPUs ({models})")
    orders, splits = (sorted({r[key] for r in late}) for key in ("policy", "split"))
    return {"early": counts, "late_orders": orders, "late_splits": splits}


def _points_left(records: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Model, links and name of the planned points that were not measured."""
    measured = {
        (r["model"], r["links"], name)
        for r in records
        if "measured_s" in r
        for name in r["name"].split(" = ")
    }
    planned = [
        (model, links, point_name(*setting))
        for (model, links), settings in PLANNED_POINTS.items()
        for setting in settings
    ]
    return [point for point in planned if point not in measured]


def _left(records: Sequence[Row]) -> Row:
    left = _points_left(records)
    points = "; ".join(f"{name}, {model}, {links} links" for model, links, name in left)
    planned = sum(map(len, PLANNED_POINTS.values()))
    return {"left_count": len(left), "planned_count": planned, "left_points": points}


def _trained() -> Row:
    """Runs of plans on gloo processes, with the differences of gradients."""

    def with_errors(name: str) -> dict[str, Any]:
        record = source(FOLDER / f"{name}.json")
        return {**record, "errors": [case["gradient_error"] for case in record["cases"]]}

    titan = with_errors("torchtitan")
    titan["ended"] = sum(not any(case["exit_codes"]) for case in titan["cases"])
    versions = ("2.11.0", "2.13.0")
    return {
        "torch_versions": [with_errors(f"torch_versions_{version}") for version in versions],
        "torchtitan": [titan],
    }


def _gaps(record: Row) -> list[Row]:
    """Each planner's distance from the optimum at :data:`_QUANTILES`."""
    free = record["free_summary"]
    name = f"`nostall`, optimum with free order ({free['proven']} proven by CP-SAT)"
    rows = [(f"`{planner}`", v["plans"], v) for planner, v in record["summary"].items()]
    rows.append((name, free["instances"], free["nostall_gap"]))
    return [
        {
            "planner": planner,
            "instances": instances,
            "distances": [abs(values[quantile]) for quantile in _QUANTILES],
        }
        for planner, instances, values in rows
    ]


def _planning_times(growth: Sequence[Row]) -> Row:
    """Seconds and speed-up by size and planner."""
    planners = list(dict.fromkeys(r["planner"] for r in growth))
    sizes = list(dict.fromkeys((r["layers"], r["gpus"]) for r in growth))
    cells = {
        (r["layers"], r["gpus"], r["planner"]):
        f"{r['planning_seconds']:.1f} s, {r['modelled_speedup']:.1f}x"
        for r in growth
    }  # fmt: skip
    rows = [
        {"size": f"{layers} × {gpus}", "times": [cells.get((layers, gpus, p)) for p in planners]}
        for layers, gpus in sizes
    ]
    return {"planners": [f"`{planner}`" for planner in planners], "planning_times": rows}
