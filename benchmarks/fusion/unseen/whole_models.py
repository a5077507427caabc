"""Sections of the page of unseen chains: whole models as users write them, and optimiser steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import wrapped
from benchmarks.harness.result_file import load
from benchmarks.harness.template import render

LOOP_TARGET, GPU_TARGET, LEAST_MODEL = 1.05, 1.08, 0.99
METHODS = ("compile", "nostall")
CLOCKS = {"looped": "in a loop", "replayed": "on the GPU alone"}
COPY = "compile, again"
"""Name of a second copy of torch.compile's version."""
INDUCTOR_PREFIX = "triton_"
"""How the names of the kernels that Inductor writes begin."""
_REFUSALS = ("is off by", "stride", "accura", "layout", "differ from the reference")

Row = Mapping[str, Any]


def models_section(folder: Path) -> list[str]:
    """Whole models: ratios in a loop and on the GPU alone, kernels, seconds, refusals."""
    records = [load(path) for path in sorted(folder.glob("*.gain.json"))]
    complete = [record for record in records if record.get("complete")]
    values = {
        "gpus": "; ".join(sorted({f"{r['gpu']}, PyTorch {r['torch']}" for r in complete})),
        "sample": _sample_text(complete),
        "complete": len(complete),
        "measured": len(records),
        "means": " ".join(_mean_text(complete, clock) for clock in CLOCKS),
        "models": [_model_row(record) for record in complete],
        "carried": _carried(complete),
        "decomposed": _decomposed(complete),
        "shares": _shares(complete),
        "stored": [r["model"] for r in complete if _is_from_store(r)],
        "prologues": wrapped(prologue_text(complete)),
    }
    return [render(__file__, values)]


def _sample_text(complete: list[Any]) -> str:
    """What one sample in a loop is; records without its seconds have samples of one step."""
    seconds = [(r["model"], r["looped"].get("sample_seconds")) for r in complete]
    looped = sorted({f"{1e3 * s:.0f} ms" for _, s in seconds if s})
    single = [name for name, s in seconds if not s]
    texts = (
        [f"A sample in a loop has steps back to back for {' or '.join(looped)}."] if looped else []
    )
    if single:
        models = f"Those of {', '.join(single)}" if looped else "Samples in a loop"
        texts.append(
            f"{models} are one step from an idle GPU, so the host's time before the first launch "
            "counts."
        )
    return " ".join(texts)


def _model_row(record: Row) -> list[str]:
    graphs = record["graphs"].get("nostall", [])
    kept, stitched = (sum(graph[key] for graph in graphs) for key in ("left", "kernels"))
    launches = record.get("kernels", {})
    starts = record["starts_in_one_process"]
    chosen = starts["nostall"]
    return [
        record["model"],
        *(_interval(_compared(record, clock, "nostall")) for clock in CLOCKS),
        _interval(_compared(record, "looped", COPY)),
        f"{share:.0%}" if (share := inductor_share(record)) is not None else "–",
        f"{stitched} ({kept} left)",
        " / ".join(str(launches.get(name, {}).get("launches", "–")) for name in METHODS),
        _product_text(graphs),
        " / ".join(f"{starts[name]['first_s']:.0f}" for name in METHODS),
        f"{chosen['until_chosen_s']:.0f}" if chosen["chosen"] else "not chosen",
        str(sum(_is_refusal(graph) for graph in graphs)),
        record["date"][:16].replace("T", " "),
    ]


def _product_text(graphs: list[Any]) -> str:
    """Distinct kernels of products that were faster, of those measured; and whether they run."""
    if not any("products" in graph for graph in graphs):
        return "not measured"
    lines = [line for graph in graphs for line in graph["products"]]
    faster = sum("one kernel, measured" in line for line in lines)
    runs = any(graph["state"] == "stitched" for graph in graphs)
    return f"{faster} of {len(lines)} faster{'' if runs or not faster else ', not run'}"


def prologue_text(records: Sequence[Row]) -> str:
    """Ratios of kernels of products that compute their left operand, by what they compute."""
    gathered, computed = dict[str, list[float]](), dict[str, list[float]]()
    for record in records:
        for operators, ratio in _prologues(record):
            ratios = gathered if operators <= _GATHERING else computed
            ratios.setdefault(record["model"], []).append(ratio)
    if not (gathered and computed):
        return ""
    winners = [name for name, ratios in gathered.items() if max(ratios) > 1]
    return (
        "Kernels of products that compute their left operand, beside cuBLAS with Inductor's "
        f"kernels in front: those that gather the heads of an attention {_range(gathered)} (faster "
        f"in {', '.join(winners) or 'no model'}), those that compute gates, activations or norms "
        f"{_range(computed)}. The latter compute an operand again for each tile of columns. Only "
        "faster ones run."
    )


def _prologues(record: Row) -> Iterator[tuple[set[str], float]]:
    """The operators in front of each measured product, and its ratio."""
    for graph in record["graphs"]["nostall"]:
        for line in graph.get("products", []):
            before, _, behind = line.partition(" in front")
            if found := re.search(r"measured ([\d.]+) x", behind):
                operators = re.split(r" (?:with|behind it and) ", before)[-1]
                yield set(operators.split(", ")), float(found[1])


_GATHERING = {"copy", "cast"}
"""Operators that only move an operand."""


def _range(ratios: Mapping[str, list[float]]) -> str:
    every = [ratio for found in ratios.values() for ratio in found]
    return f"{min(every):.2f} to {max(every):.2f} ({len(every)} products)"


def _compared(record: Row, clock: str, name: str) -> Row | None:
    found: Row | None = record.get(clock, {}).get("compared", {}).get(name)
    return found


def _interval(found: Row | None) -> str:
    if found is None:
        return "–"
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def inductor_share(record: Row) -> float | None:
    """The part of the GPU's time in one step that Inductor's own kernels take."""
    kernels = record.get("kernels", {}).get("compile", {})
    if not kernels.get("busy_s"):
        return None
    own = sum(s for name, _, s in kernels["by_name"] if name.startswith(INDUCTOR_PREFIX))
    return float(own / kernels["busy_s"])


def _mean_text(complete: list[Any], clock: str) -> str:
    rows = [found for record in complete if (found := _compared(record, clock, "nostall"))]
    if not rows:
        return ""
    target = LOOP_TARGET if clock == "looped" else GPU_TARGET
    mean, least = geometric_mean(row["ratio"] for row in rows), min(rows, key=lambda r: r["ratio"])
    low, high = mean_interval(rows)
    return (
        f"Geometric mean {CLOCKS[clock]}: {mean:.3f} [{low:.3f}, {high:.3f}] (target {target}: "
        f"{_verdict(low, high, target)}); lowest {_interval(least)} (target {LEAST_MODEL}: "
        f"{_verdict(least['low'], least['high'], LEAST_MODEL)})."
    )


def mean_interval(rows: Sequence[Row]) -> tuple[float, float]:
    """The interval of a geometric mean of independent ratios with intervals.

    The squares of the half-widths of logarithms add up.
    """
    mean = geometric_mean(row["ratio"] for row in rows)
    below, above = (
        sqrt(sum(log(row["ratio"] / row[end]) ** 2 for row in rows)) / len(rows)
        for end in ("low", "high")
    )
    return mean * exp(-below), mean * exp(above)


def _verdict(low: float, high: float, target: float) -> str:
    """Whether a value meets a target; an interval that contains the target does not decide."""
    return "yes" if low >= target else "within the interval" if high >= target else "no"


def _carried(complete: Sequence[Row]) -> Row | None:
    """The mean on the GPU alone without the model that gains most; None for one model."""
    ratios = {
        r["model"]: f["ratio"] for r in complete if (f := _compared(r, "replayed", "nostall"))
    }
    if len(ratios) < 2:
        return None
    best = max(ratios, key=lambda name: ratios[name])
    return {
        "best": best,
        "ratio": ratios[best],
        "others": geometric_mean(ratio for name, ratio in ratios.items() if name != best),
        "mean": geometric_mean(ratios.values()),
    }


def decomposed_attention(record: Row) -> bool:
    """Whether torch.compile's version runs attention that PyTorch decomposed.

    Its decomposition has a softmax of its own (``_safe_softmax``), which Inductor names in kernels.
    """
    kernels = record.get("kernels", {}).get("compile", {}).get("by_name", [])
    return any("safe_softmax" in name for name, *_ in kernels)


def _decomposed(complete: Sequence[Row]) -> Row | None:
    """The steps whose attention PyTorch decomposes, and the means of the others; None without."""
    apart = [record for record in complete if decomposed_attention(record)]
    others = [record for record in complete if record not in apart]
    means = [
        f"{found:.3f} {clock}"
        for name, clock in CLOCKS.items()
        if (found := _mean_ratio(others, name)) is not None
    ]
    return apart and {
        "models": [r["model"] for r in apart],
        "restored": [r["model"] for r in apart if _runs_more_fused_attention(r)] or None,
        "others": len(others),
        "means": " and ".join(means),
    }


def _runs_more_fused_attention(record: Row) -> bool:
    """Whether nostall's version launches more kernels of fused attention than torch.compile's."""
    counts = {
        name: sum(n for kernel, n, _ in record["kernels"][name]["by_name"] if "sdpa" in kernel)
        for name in METHODS
    }
    return counts["nostall"] > counts["compile"]


def _mean_ratio(records: Sequence[Row], clock: str) -> float | None:
    ratios = [f["ratio"] for r in records if (f := _compared(r, clock, "nostall"))]
    return geometric_mean(ratios) if ratios else None


def looped_mean_of_fused_attention(records: Sequence[Row]) -> float | None:
    """The mean in a loop of the steps whose attention torch.compile does not decompose."""
    return _mean_ratio([r for r in records if not decomposed_attention(r)], "looped")


def _is_from_store(record: Row) -> bool:
    """Whether a step began with a selection of an earlier run."""
    return any(graph.get("from_store") for graph in record["graphs"].get("nostall", []))


def _shares(complete: Sequence[Row]) -> Row:
    """Parts of the GPU's time that Inductor's own kernels take, and ratios of a second copy."""
    shares = [share for record in complete if (share := inductor_share(record)) is not None]
    copies = [f["ratio"] for record in complete if (f := _compared(record, "looped", COPY))]
    usual = median(shares)
    needed = usual / (usual - (1 - 1 / GPU_TARGET))
    return {"own": shares, "target": GPU_TARGET, "needed": needed, "copies": copies}


def _is_refusal(graph: Row) -> bool:
    """Whether a graph stays with Inductor's version because of its accuracy or layout."""
    return graph["state"] == "inductor" and any(word in graph["reason"] for word in _REFUSALS)


def optimizer_section(path: Path) -> str:
    """Optimiser steps: times beside those of a copy of as many bytes."""
    record, rows = load(path), []
    for case, found in record["cases"].items():
        clock = found.get("replayed") or found.get("looped")
        if clock is None:
            continue  # the time was up before the methods were timed
        for name, samples in clock["samples_s"].items():
            time_s = median(samples)
            rows.append({
                "step": case,
                "method": name,
                "time_s": time_s,
                "share": median(found["copy"]) / time_s if "copy" in found else None,
                "launches": found.get("kernels", {}).get(name, {}).get("launches"),
                "apart": found["apart"].get(name) if isinstance(found["apart"], dict) else None,
            })  # fmt: skip
    values = {"methods": _list_text(record), "steps": rows, "file": path}
    return render(__file__, {**record, **values}, "optimizer")


def _list_text(record: Row) -> str:
    """What the methods are; results without ``stitched`` were measured without such kernels."""
    cases = [case for case in record["cases"].values() if "looped" in case]
    every = {name for case in cases for name in case["looped"]["samples_s"]}
    if not every:
        return ""
    if "stitched" not in every:
        return (
            "These steps were measured without kernels over lists: `nostall` ran Inductor's "
            "version of all calls. Steps with such kernels were not measured yet."
        )
    return (
        "`stitched` has kernels over lists; the least ratio of torch.compile's time over its "
        f"time, with its interval, is {_least_ratio(cases, 'replayed')} as CUDA graphs and "
        f"{_least_ratio(cases, 'looped')} in a loop, where the host launches each kernel (the "
        f"null there lies in {_null(cases, 'looped')}). Clipping and AdamW are two graphs, because "
        "PyTorch's `step` breaks the graph, unless a row says that they are one."
    )


def _least_ratio(cases: list[Any], clock: str) -> str:
    """The smallest ratio of a case's stitched version by a clock, with its interval."""
    rows = [case[clock]["compared"]["stitched"] for case in cases if clock in case]
    return _interval(min(rows, key=lambda row: row["ratio"], default=None))


def _null(cases: list[Any], clock: str) -> str:
    """The interval of all nulls of a clock: a second copy of torch.compile's version."""
    rows = [case[clock]["compared"]["stitched"] for case in cases if clock in case]
    low, high = min(row["null_low"] for row in rows), max(row["null_high"] for row in rows)
    return f"[{low:.3f}, {high:.3f}]"


def plans_section(path: Path) -> str:
    """Times of plans of kernels over lists, beside those of the plan that ran."""
    record, rows = load(path), []
    for name, found in record["plans"].items():
        block, warps = ("norm_block", "norm_warps") if name == "norms" else ("block", "num_warps")
        for plan, samples in found["samples_s"].items():
            numbers = dict(re.findall(r"(\w+)=(\d+)", plan))
            rows.append({
                "kernels": name,
                "block": numbers[block],
                "warps": numbers[warps],
                "programs": numbers["norm_programs"] if name == "norms" else None,
                "time_s": median(samples),
                "ratio": "1" if plan == found["base"] else _interval(found["compared"].get(plan)),
            })  # fmt: skip
    return render(__file__, {**record, "file": path, "rows": rows}, "plans")
