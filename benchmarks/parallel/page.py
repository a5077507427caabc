"""``docs/results/parallel.md``: pipeline and sharding plans against papers, optima and GPUs.

python -m benchmarks page parallel
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.parallel.gpu.plans import PLANNED_POINTS, point_name
from benchmarks.parallel.message_page import section as messages
from benchmarks.sharding.hybrid_page import section as hybrids
from benchmarks.sharding.page import section as shardings
from nostall.core.files.atomic import write_atomically

PAGE = PAGES / "parallel.md"
FOLDER = results("parallel")
_QUANTILES = ("median", "q75", "q95", "max")
_WHEN_NEEDED = "2026-11-27T15:30"
"""Date of the first session whose receives within a server start when needed."""
_EIGHT = (
    "parallel.predicted_vs_measured",
    "parallel.pass_times",
    "parallel.killed_rank",
    "sharding.gpu_plans",
    "sharding.gpu_hybrids",
)
"""Benchmarks that take any number of GPUs."""
Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    return page(
        "Pipeline and sharding plans",
        "python -m benchmarks page parallel",
        [
            _measured(),
            shardings(),
            hybrids(),
            _missing(),
            _engines(),
            _killed(),
            _dapple(),
            _optimality(),
            _planning_time(),
        ],
    )


def write() -> None:
    write_atomically(PAGE, text().encode())


def _measured() -> str:
    intro = wrapped(
        "Predicted against *measured* iteration times of plans by several planners and orders, a "
        "chain of unequal layers and a GPT, also with links slowed down by emulation (`python -m "
        "benchmarks run parallel.predicted_vs_measured`). MAPE is the mean absolute error in per "
        "cent. Regret is the measured time of the plan with the best prediction over that of the "
        "best measured plan of its group, less 1."
    )
    rows, groups = [], []
    for gpus in (2, 4):
        path = FOLDER / f"predicted_vs_measured_{gpus}.json"
        record = load(path)
        summary = record["summary"]
        regret = max(group["regret"] for group in summary["groups"].values())
        rows.append([
            f"{gpus} {_device(record)} ({link(path)})",
            str(summary["points"]), str(len(_left(record["records"]))),
            f"{summary['worst_over_best']:.1f}",
            f"{100 * summary['mape']:.1f} %", f"{100 * summary['worst_error']:.1f} %",
            f"{summary['spearman']:.2f}", f"{100 * regret:.1f} %",
        ])  # fmt: skip
        groups += [_group(gpus, name, group) for name, group in summary["groups"].items()]
    head = ("GPUs", "points", "not measured", "slowest / fastest", "MAPE", "worst error",
            "rank correlation", "worst regret")  # fmt: skip
    group_head = ("group", "points", "MAPE", "worst error", "rank correlation",
                  "speed-up over even 1F1B")  # fmt: skip
    parts = ["## Predicted and measured iterations", intro, table(head, rows)]
    return "\n\n".join([*parts, table(group_head, groups), _ahead(), messages()])


def _ahead() -> str:
    """The points that were measured before receives started when needed."""
    counts: list[str] = []
    late: list[Row] = []
    for gpus in (2, 4):
        record = load(FOLDER / f"predicted_vs_measured_{gpus}.json")
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
    orders, splits = (", ".join(sorted({r[key] for r in late})) for key in ("policy", "split"))
    return wrapped(
        "Points of pipelines that were measured with receives one operation ahead, see below: "
        f"{', '.join(counts)}. With receives when needed, GPUs ran the orders {orders} of the "
        f"split {splits}; other orders and replicated stages ran with them on gloo only."
    )


def _left(records: Sequence[Row]) -> list[tuple[str, str, str]]:
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


def _missing() -> str:
    """What was not measured, from the result files, with the commands that measure it."""
    left = _left(load(FOLDER / "predicted_vs_measured_4.json")["records"])
    points = "; ".join(f"{name}, {model}, {links} links" for model, links, name in left)
    text = wrapped(
        f"On four GPUs, {len(left)} of {_planned_count()} combinations of planner and order were "
        f"not measured, because the time of the machine was up ({points}). `python -m benchmarks "
        "run parallel.predicted_vs_measured --gpus 4 --out "
        "benchmarks/parallel/results/predicted_vs_measured_4.json` measures them and keeps the "
        "others."
    )
    eight = wrapped(
        "Nothing was measured on eight GPUs of one host, because no such machine was available. "
        "On one, these commands do it, each in a file of its own:"
    )
    commands = "\n".join(
        f"python -m benchmarks run {name} --gpus 8 --out OUT.json" for name in _EIGHT
    )
    return f"## Not measured\n\n{text}\n\n{eight}\n\n```\n{commands}\n```"


def _planned_count() -> int:
    return sum(map(len, PLANNED_POINTS.values()))


def _killed() -> str:
    """A run of which one rank is killed."""
    rows = []
    for path in sorted(FOLDER.glob("killed_rank_*.json")):
        record = load(path)
        rows += [
            [f"{record['gpus']} x {record['device']} ({link(path)})", r["planner"],
             str(r["exit_code"]), f"{r['seconds_after_kill']:.1f} s", str(r["processes_left"])]
            for r in record["records"]
        ]  # fmt: skip
    text = wrapped(
        "`nostall launch`, of which the last rank is killed in its fourth step (`parallel."
        "killed_rank`; the deadline is 60 s):"
    )
    head = ("ranks", "planner", "exit code", "ends after", "processes left")
    return f"## A rank that is killed\n\n{text}\n\n{table(head, rows)}"


def _device(record: Row) -> str:
    """The card; a file of several sessions names it in each."""
    about = record["about"] if "about" in record else record["sessions"][0]["about"]
    return str(about["device"]).removeprefix("NVIDIA ")


def _group(gpus: int, name: str, group: Row) -> list[str]:
    gain = group.get("nostall_over_even_1f1b")
    return [
        f"{gpus} GPUs, {name} links",
        str(group["points"]),
        f"{100 * group['mape']:.1f} %",
        f"{100 * group['worst_error']:.1f} %",
        "–" if group["spearman"] is None else f"{group['spearman']:.2f}",
        "–" if gain is None else f"{gain:.2f}",
    ]


def _engines() -> str:
    rows = []
    for name in ("torch_versions_2.11.0", "torch_versions_2.13.0"):
        path = FOLDER / f"{name}.json"
        record = load(path)
        worst = max(case["gradient_error"] for case in record["cases"])
        rows.append([f"every kind of plan, torch {record['about']['torch']}", record["same"],
                     f"{worst:.1g}", link(path)])  # fmt: skip
    path = FOLDER / "torchtitan.json"
    record = load(path)
    cases = record["cases"]
    same = sum(not any(case["exit_codes"]) for case in cases)
    rows.append([f"exported plans in torchtitan {record['about']['torchtitan']}'s loader",
                 f"{same} of {len(cases)}", f"{max(case['gradient_error'] for case in cases):.1g}",
                 link(path)])  # fmt: skip
    intro = wrapped(
        "Plans trained in double precision on gloo processes without a GPU, losses and gradients "
        "compared with training in one process (`parallel.torch_versions`, `parallel.torchtitan`)."
    )
    head = ("plans", "equal", "largest difference of gradients", "file")
    return f"## Training by a plan\n\n{intro}\n\n{table(head, rows)}"


def _dapple() -> str:
    path = FOLDER / "dapple_tables.json"
    record = load(path)
    matching = record["matching"]
    intro = wrapped(
        "Published rows of DAPPLE (arXiv:2007.01045) with the authors' profiles, which are not "
        "part of this repository (`python -m benchmarks run parallel.dapple_tables`, "
        f"{link(path)}). All times are *modelled*, with one set of constants "
        "(`examples/clusters/dapple-*.toml`). A plan matches if the published one costs at most 2 "
        "% more than the best: *simulated*, against what `dapple` finds and against data "
        "parallelism with a replica's samples in one pass; *formula*, by the paper's latency L "
        "(equations 1 and 2) among the shapes that its tables print. A modelled speed-up matches "
        f"within 10 % of the published measurement. Matching: {matching['plan_matches']} plans "
        f"simulated, {matching['plan_matches_by_formula']} by formula, "
        f"{matching['speedup_matches']} speed-ups. The deviations are explained on the page about "
        "the [planners](../explanation/pipeline-planners.md#dapples-published-rows)."
    )
    head = ("row", "published plan", "best simulated", "published / best", "simulated", "formula",
            "modelled speed-up of the published plan", "published speed-up",
            "speed-up matches")  # fmt: skip
    parts = ["## DAPPLE's published rows", intro, table(head, map(_dapple_row, record["rows"]))]
    ratios = [[r["profile"], r["split"], f"{r['modelled_pb_over_pa']:.2f}",
               f"{r['published_pb_over_pa']:.2f}"] for r in record["pb_over_pa"]]  # fmt: skip
    parts += ["Order PB over order PA on configuration A (table 3):",
              table(("profile", "split", "modelled", "published"), ratios)]  # fmt: skip
    parts += ["Memory of BERT-48 in two stages on configuration B (table 5), mean of both GPUs:",
              table(_MEMORY_HEAD, map(_memory_row, record["memory"]))]  # fmt: skip
    scaling = [[str(r["gpus"]), str(r["modelled_layers"]), str(r["published_layers"]),
                _yes(r["matches"])] for r in record["scaling"]]  # fmt: skip
    parts += ["Layers of the largest BERT with re-computation on GPUs of 16 GB (table 7):",
              table(("GPUs", "modelled", "published", "within 10 %"), scaling)]  # fmt: skip
    return "\n\n".join(parts)


_MEMORY_HEAD = ("order", "re-computation", "micro-batches", "modelled GB", "published GB",
                "memory matches", "modelled samples/s", "published samples/s",
                "speed matches")  # fmt: skip


def _yes(matches: bool | None) -> str:
    return "–" if matches is None else "yes" if matches else "**no**"


def _value(number: float | None, digits: int = 1) -> str:
    return "–" if number is None else f"{number:.{digits}f}"


def _dapple_row(row: Row) -> list[str]:
    return [
        row["row"],
        row.get("published") or "not printed",
        str(row["ours"]),
        _value(row.get("published_plan_over_best"), 3),
        _yes(row.get("plan_matches")),
        _yes(row.get("plan_matches_by_formula")),
        _value(row.get("modelled_speedup_of_published")),
        _value(row.get("published_speedup")),
        _yes(row.get("speedup_matches")),
    ]


def _memory_row(row: Row) -> list[str]:
    fits = "" if row["modelled_fits"] else " (does not fit)"
    published = row.get("published_gb")
    return [
        row["order"],
        "yes" if row["recompute"] else "no",
        str(row["micro_batches"]),
        f"{row['modelled_gb']:.1f}{fits}",
        "out of memory" if published is None else f"{published:.1f}",
        _yes(row.get("memory_matches")),
        _value(row.get("modelled_samples_per_s")),
        _value(row.get("published_samples_per_s"), 2),
        _yes(row.get("speed_matches")),
    ]


def _optimality() -> str:
    path = FOLDER / "optimality_gap.json"
    record = load(path)
    free = record["free_summary"]
    intro = wrapped(
        "*Modelled* gap of each planner to the exhaustive optimum over cuts, mappings and five "
        "orders in the same simulator, on random instances of at most 8 layers, 4 GPUs and 8 "
        f"micro-batches (`python -m benchmarks run parallel.optimality_gap`, {link(path)}). "
        "`nostall` may also change how many micro-batches a stage holds, so its gap can be below "
        "0."
    )
    rows = [[f"`{planner}`", str(values["plans"]), *_gaps(values)]
            for planner, values in record["summary"].items()]  # fmt: skip
    rows.append([f"`nostall`, optimum with free order ({free['proven']} proven by CP-SAT)",
                 str(free["instances"]), *_gaps(free["nostall_gap"])])  # fmt: skip
    uneven = record["uneven_summary"]
    ratio, gain = uneven["dapple_over_spp"], uneven["spp_over_nostall"]
    after = wrapped(
        f"On {len(record['uneven'])} instances of 16 to 32 layers on 8 GPUs whose links all "
        f"differ, `spp` beats `dapple` in {uneven['spp_wins']}, loses in {uneven['dapple_wins']} "
        f"and ties in {uneven['ties']}. `dapple` takes {ratio['min']:.2f} to {ratio['max']:.2f} "
        f"times as long as `spp` (median {ratio['median']:.2f}); `spp` takes {gain['min']:.2f} to "
        f"{gain['max']:.2f} times as long as `nostall` (median {gain['median']:.2f})."
    )
    head = ("planner", "instances", "median", "75 %", "95 %", "worst")
    return "\n\n".join(["## Distance from the optimum", intro, table(head, rows), after])


def _gaps(values: Row) -> Iterable[str]:
    return (f"{100 * abs(values[q]):.1f} %" for q in _QUANTILES)


def _planning_time() -> str:
    path = FOLDER / "planning_time.json"
    record = load(path)
    planners = list(dict.fromkeys(r["planner"] for r in record["growth"]))
    sizes = list(dict.fromkeys((r["layers"], r["gpus"]) for r in record["growth"]))
    cells = {(r["layers"], r["gpus"], r["planner"]): r for r in record["growth"]}
    rows = [
        [f"{layers} × {gpus}", *(_plan_time(cells.get((layers, gpus, p))) for p in planners)]
        for layers, gpus in sizes
    ]
    intro = wrapped(
        "Seconds of planning, *measured* on one core of a shared machine after compilation, and "
        "the *modelled* speed-up of the plan (`python -m benchmarks run parallel.planning_time`, "
        f"{link(path)}). `dapple` merges layers above 400, above 40 on more than 16 GPUs."
    )
    head = ("layers × GPUs", *(f"`{planner}`" for planner in planners))
    return f"## Planning time\n\n{intro}\n\n{table(head, rows)}"


def _plan_time(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{row['planning_seconds']:.1f} s, {row['modelled_speedup']:.1f}x"
