"""Sections of the page of unseen chains: whole models as users write them, and optimiser steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load

LOOP_TARGET, GPU_TARGET, LEAST_MODEL = 1.05, 1.08, 0.99
METHODS = ("compile", "nostall")
CLOCKS = {"looped": "in a loop", "replayed": "on the GPU alone"}
COPY = "compile, again"
"""Name of a second copy of torch.compile's version."""
INDUCTOR_PREFIX = "triton_"
"""How the names of the kernels that Inductor writes begin."""
_REFUSALS = ("is off by", "stride", "accura", "layout", "differ from the reference")

Row = Mapping[str, Any]


def sections(fusion: Path, models: Path) -> list[str]:
    """Both sections, as far as there are results."""
    parts = []
    if models.is_dir():
        parts += ["## Whole models, as users write them", *models_section(models)]
    steps = fusion / "optimizer_steps.json"
    if steps.exists():
        parts += ["## Optimiser steps", *optimizer_section(steps)]
    plans = fusion / "list_plans.json"
    if plans.exists():
        parts += plans_section(plans)
    return parts


def models_section(folder: Path) -> list[str]:
    """Whole models: ratios in a loop and on the GPU alone, kernels, seconds, refusals."""
    records = [load(path) for path in sorted(folder.glob("*.gain.json"))]
    complete = [record for record in records if record.get("complete")]
    cards = sorted({f"{r['gpu']}, PyTorch {r['torch']}" for r in complete})
    about = (
        "`python -m benchmarks run torch_compile.user_models --zoo users` on "
        f"{'; '.join(cards) or 'no GPU yet'}: a ratio is torch.compile's time over that of "
        'backend="nostall", interleaved, with its interval. *Copy*: the ratio of a second copy of '
        f"torch.compile's version in a loop. {_sample_text(complete)} *Share*: the part of the "
        "GPU's time that the kernels take that Inductor writes, which are all that stitched "
        "kernels can replace, without products. Two columns have both: torch.compile / nostall. "
        "The baseline is torch.compile's default mode alone. *Product kernels*: distinct products "
        "that were measured as one kernel with their readers; models without this were measured "
        "before such kernels existed. The committed folder has one JSON for each model."
    )
    head = ["model", *CLOCKS.values(), "copy", "share", "stitched kernels", "launches of a step"]
    head += ["product kernels", "first step, s", "until chosen, s"]
    head += ["graphs kept for accuracy or layout", "measured (UTC)"]
    rows = [_model_row(record) for record in complete]
    texts = [f"{len(complete)} of {len(records)} measured models are complete."]
    texts += [text for clock in CLOCKS if (text := _mean_text(complete, clock))]
    parts = [wrapped(about), wrapped(" ".join(texts)), table(head, rows) if rows else ""]
    writers = (_carried_text, _attention_text, _share_text, _stored_text, prologue_text)
    ends = [write(complete) for write in writers] if complete else []
    return [*parts, *(wrapped(text) for text in ends if text)]


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


def _carried_text(complete: list[Any]) -> str:
    """What the mean on the GPU alone is without the model that gains most; empty for one model."""
    ratios = {
        r["model"]: f["ratio"] for r in complete if (f := _compared(r, "replayed", "nostall"))
    }
    if len(ratios) < 2:
        return ""
    best = max(ratios, key=lambda name: ratios[name])
    others = geometric_mean(ratio for name, ratio in ratios.items() if name != best)
    return (
        f"One model carries the mean on the GPU alone: {best} ({ratios[best]:.2f}). Without it the "
        f"mean is {others:.3f}, not {geometric_mean(ratios.values()):.3f}."
    )


def decomposed_attention(record: Row) -> bool:
    """Whether torch.compile's version runs attention that PyTorch decomposed.

    Its decomposition has a softmax of its own (``_safe_softmax``), which Inductor names in kernels.
    """
    kernels = record.get("kernels", {}).get("compile", {}).get("by_name", [])
    return any("safe_softmax" in name for name, *_ in kernels)


def _attention_text(complete: list[Any]) -> str:
    apart = [record for record in complete if decomposed_attention(record)]
    if not apart:
        return ""
    restored = [record["model"] for record in apart if _runs_more_fused_attention(record)]
    others = [record for record in complete if record not in apart]
    means = [
        f"{found:.3f} {clock}"
        for name, clock in CLOCKS.items()
        if (found := _mean_ratio(others, name)) is not None
    ]
    return (
        f"In {len(apart)} of the {len(complete)} steps ({', '.join(r['model'] for r in apart)}) "
        "PyTorch decomposes attention into products and a softmax for torch.compile. In "
        f"{', '.join(restored) or 'none'} nostall's version runs fused attention in its place, in "
        "the others the decomposed one. The geometric mean of the other "
        f"{len(others)} steps, in which both run fused attention, is {' and '.join(means)}."
    )


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


def _stored_text(complete: list[Any]) -> str:
    """Steps that began with a selection of an earlier run; empty without any."""
    names = [
        record["model"]
        for record in complete
        if any(graph.get("from_store") for graph in record["graphs"].get("nostall", []))
    ]
    return (
        f"Of {', '.join(names)} an earlier run had selected the version: their seconds until "
        "chosen are those of a later start, and their products were not measured again."
        if names
        else ""
    )


def _share_text(complete: list[Any]) -> str:
    shares = [share for record in complete if (share := inductor_share(record)) is not None]
    usual = median(shares)
    needed = usual / (usual - (1 - 1 / GPU_TARGET))
    copies = [f["ratio"] for record in complete if (f := _compared(record, "looped", COPY))]
    texts = [
        f"Inductor's own kernels take {min(shares):.0%} to {max(shares):.0%} of the GPU's time, in "
        f"the median {usual:.0%}; matrix products, attention and copies take the rest. With that "
        f"share {GPU_TARGET} on the GPU alone needs kernels that are {needed:.1f} times as fast as "
        "all of Inductor's. Where a stitched version is not faster as a whole, Inductor's runs: "
        "the ratio on the GPU alone is then 1 but for noise."
    ]
    if copies:
        texts.append(
            f"A second copy of torch.compile's version alone is between {min(copies):.3f} and "
            f"{max(copies):.3f} in a loop."
        )
    return " ".join(texts)


def _is_refusal(graph: Row) -> bool:
    """Whether a graph stays with Inductor's version because of its accuracy or layout."""
    return graph["state"] == "inductor" and any(word in graph["reason"] for word in _REFUSALS)


def optimizer_section(path: Path) -> list[str]:
    """Optimiser steps: times beside those of a copy of as many bytes."""
    record, rows = load(path), []
    for case, found in record["cases"].items():
        clock = found.get("replayed") or found.get("looped")
        if clock is None:
            continue  # the time was up before the methods were timed
        copy = median(found["copy"]) if "copy" in found else None
        for name, samples in clock["samples_s"].items():
            time = median(samples)
            launches = found.get("kernels", {}).get(name, {}).get("launches", "–")
            share = f"{copy / time:.0%}" if copy else "–"
            apart = found["apart"].get(name) if isinstance(found["apart"], dict) else None
            exact = (
                [f"{apart['largest']:.1e}", f"{apart['share_equal']:.0%}"] if apart else ["–"] * 2
            )
            rows.append([case, name, f"{1e6 * time:.1f}", share, str(launches), *exact])
    source = f"Measured on {record['gpu']}, PyTorch {record['torch']}, {record['date'][:10]}"
    text = (
        "Steps of the parameters of a GPT-2 of four layers in fp32 unless a row says otherwise, as "
        "CUDA graphs. The share is the time of a copy of as many bytes as the step must move at "
        f"least, over the step's. {_list_text(record)} *Largest difference* of an element from "
        "eager PyTorch after three steps, and the share of elements that are *equal* bit for bit: "
        "the versions contract and order operations otherwise than eager PyTorch."
    )
    head = ["step", "method", "us", "share of a copy's speed", "launches"]
    head += ["largest difference", "equal"]
    return [wrapped(f"{source} ({link(path)})."), wrapped(text), table(head, rows)]


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


def plans_section(path: Path) -> list[str]:
    """Times of plans of kernels over lists, beside those of the plan that ran."""
    record, rows = load(path), []
    for name, found in record["plans"].items():
        for plan, samples in found["samples_s"].items():
            numbers = dict(re.findall(r"(\w+)=(\d+)", plan))
            block, warps = (
                ("norm_block", "norm_warps") if name == "norms" else ("block", "num_warps")
            )
            programs = numbers["norm_programs"] if name == "norms" else "–"
            ratio = _interval(found["compared"].get(plan)) if plan != found["base"] else "1"
            time = f"{1e6 * median(samples):.1f}"
            rows.append([name, numbers[block], numbers[warps], programs, time, ratio])
    text = (
        f"Plans of kernels over lists, measured on {record['gpu']}, PyTorch {record['torch']}, "
        f"{record['date'][:10]} ({link(path)}): AdamW and the norms of the same parameters, "
        "without the rest of a step. A ratio is the time of the plan with the ratio 1 over that of "
        "the row; the steps above were measured with that plan, the default."
    )
    head = ["kernels", "block", "warps", "programs", "us", "ratio"]
    return [wrapped(text), table(head, rows)]
