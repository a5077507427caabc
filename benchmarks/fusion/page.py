"""``docs/results/fusion.md``: explorers against the proven optimum, correctness, cost on the host.

python -m benchmarks page fusion
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from nostall.core.files.atomic import write_atomically

PAGE = PAGES / "fusion.md"
FOLDER = results("fusion")
_PLANS = {
    "explorer": "`explore`",
    "annealed": "`explore`, then `refined`",
    "beam": "beam search of `explore` alone",
    "greedy": "`greedy`",
    "unfused": "unfused",
}


def text() -> str:
    """The whole page."""
    return page(
        "Fusion: explorers and correctness",
        "python -m benchmarks page fusion",
        [_explorers(), _correctness(), _functions(), _host_cost()],
    )


def write() -> None:
    write_atomically(PAGE, text().encode())


def _explorers() -> str:
    path = FOLDER / "explorers.json"
    record = load(path)
    intro = wrapped(
        "Regions of BERT, GPT, Llama MLP, ResNet, DIEN, Conformer and LSTM parts, norms, softmax, "
        "cross-entropy, quantisation and pooling, forward and backward (`python -m benchmarks run "
        f"fusion.explorers`, {link(path)}). The gap is the *modelled* time of a partition over "
        "that of the proven optimum, less 1, by the delta-evaluator, for partitions into connected "
        "patterns (before kernel packing)."
    )
    rest = "Regions without a proven optimum, modelled us:"
    size = "Time of the explorer by size of the graph:"
    return "\n\n".join([
        "## Explorers against the optimum", intro, gaps(record["summary"], record["columns"]),
        rest, unproven(record["records"]), size, growth(record["growth"]),
    ])  # fmt: skip


def gaps(summary: Mapping[str, Any], columns: int) -> str:
    """Number of regions, and each planner's gap to the optimum."""
    proven = summary["proven"]
    intro = wrapped(
        f"{summary['regions']} different regions of 5 to 60 operators. The optimum of {proven} is "
        f"proven; {summary['not_proven']} have more than {columns:,} legal patterns or exceeded "
        f"the solver's time. In {summary['several_kernels']} of the {proven} the optimum has "
        "several kernels."
    )
    rows = []
    for key, name in _PLANS.items():
        gap = summary["gaps"][key]
        values = [f"{gap[at]:.2%}" for at in ("mean", "median", "q90", "max")]
        rows.append((name, f"{gap['within_3_percent']} of {proven}", *values))
    head = ("partition", "within 3 %", "mean", "median", "90 % of regions", "worst")
    return f"{intro}\n\n{table(head, rows)}"


def unproven(records: Iterable[Mapping[str, Any]]) -> str:
    """Modelled microseconds of regions without a proven optimum."""
    rows = [
        (r["name"], str(r["operators"]), *(f"{r['us'][key]:.1f}" for key in _PLANS))
        for r in records
        if not r["proven"]
    ]
    return table(("region", "operators", *_PLANS.values()), rows)


def growth(records: Iterable[Mapping[str, Any]]) -> str:
    """Seconds of the explorer by size."""
    rows = [
        (
            r["name"],
            f"{r['nodes']:,}",
            f"{r['operators']:,}",
            f"{r['processor_seconds']:.2f} s",
            f"{r['wall_seconds']:.2f} s",
            str(r["kernels"]),
        )
        for r in records
    ]
    return table(("graph", "nodes", "operators", "processor", "wall", "kernels"), rows)


def _correctness() -> str:
    intro = (
        "Kernels of random graphs and of PyTorch's operator samples (OpInfo), compared with fp64. "
        "A result counts as wrong if it is further from fp64 than its dtype and operators explain."
    )
    rows = []
    for name, what in (
        ("random_graphs_h200", "random graphs"),
        ("random_graphs_interpreted", "random graphs"),
    ):
        record = load(FOLDER / f"{name}.json")
        seen, wrong = record["seen"], record["wrong"] + (record["wrong with dropout"] or [])
        rows.append([what, _where(record), f"{seen['graphs']}", f"{seen['kernels']}",
                     str(len(wrong)), link(FOLDER / f"{name}.json")])  # fmt: skip
    for name, what in (
        ("shared_memory_rows_h200", "wide rows in shared memory"),
        ("multi_pass_rows_h200", "rows that are read several times"),
    ):
        record = load(FOLDER / f"{name}.json")
        rows.append([what, _where(record), str(record["graphs"]), str(record["kernels"]),
                     str(len(record["wrong"])), link(FOLDER / f"{name}.json")])  # fmt: skip
    for name in ("opinfo_h200", "opinfo_interpreted"):
        record = load(FOLDER / f"{name}.json")
        rows.append(["operator samples (OpInfo), operators", _where(record),
                     str(len(record["graphs"])), str(len(record["kernels"])),
                     str(len(record["wrong"])), link(FOLDER / f"{name}.json")])  # fmt: skip
    head = ("inputs", "run on", "graphs", "kernels", "wrong", "file")
    launch = load(FOLDER / "dependent_launch.json")
    differing = sum(sum(kind.values()) for kind in
                    launch["rounds that differ, by what is between"].values())  # fmt: skip
    after = wrapped(
        "Programmatic dependent launch: kernels that start before the kernel in front of them ends "
        f"gave other results in {differing} rounds of {launch['rounds']} for each kind of "
        "neighbour, and in "
        f"{sum(launch['rounds that differ without the wait'].values())} of {2 * launch['rounds']} "
        "rounds in which the wait was left out on purpose "
        f"({link(FOLDER / 'dependent_launch.json')})."
    )
    return "\n\n".join(["## Correctness", wrapped(intro), table(head, rows), after])


def _where(record: Mapping[str, Any]) -> str:
    return record["gpu"] or f"Triton's interpreter, torch {record['torch']}"


def _functions() -> str:
    path = FOLDER / "all_fp32_values_h200.json"
    record = load(path)
    intro = wrapped(
        f"Functions at every finite fp32 value on {record['gpu']}, compared with fp64 (`python -m "
        f"benchmarks run fusion.all_fp32_values`, {link(path)})."
    )
    rows = [
        [name, f"{values['numbers']:,}", f"{values['largest error']:.2g}", f"{values['at']:.3g}",
         f"{values['allowed']:.0g}", str(len(values["wrong"]))]
        for name, values in record["done"].items()
    ]  # fmt: skip
    head = ("function", "values", "largest error", "at", "allowed", "wrong")
    return f"### Functions\n\n{intro}\n\n{table(head, rows)}"


def _host_cost() -> str:
    rows = []
    for name in ("host_cost_h200", "host_cost"):
        path = FOLDER / f"{name}.json"
        record = load(path)
        for call, us in record["calls"].items():
            cells = [f"{us[key]:.1f}" if key in us else "–" for key in _WAYS]
            rows.append([call, record["gpu"] or "no GPU (the launch does nothing)", *cells])
    intro = wrapped(
        "Microseconds of one call on the host: called directly by Inductor's code, through "
        "PyTorch's dispatcher, the memory of the results alone, and Triton's own launch alone "
        "(`python -m benchmarks run fusion.host_cost`)."
    )
    head = ("tensors", "host of", *_WAYS.values())
    return f"## Cost of a call on the host\n\n{intro}\n\n{table(head, rows)}"


_WAYS = {
    "direct": "direct",
    "operator": "dispatcher",
    "memory": "memory of results",
    "triton": "Triton's launch",
}
