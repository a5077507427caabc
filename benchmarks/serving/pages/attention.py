"""Sections of ``docs/results/serving.md`` on attention: times, checks and the tables' builders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results

FOLDER = results("serving")
ATTENTION = FOLDER / "attention.json.gz"
CHECK = FOLDER / "kernel_check.json"
BUILD = FOLDER / "table_build.json.gz"
FLASHINFER = FOLDER / "attention_flashinfer.json.gz"
"""An earlier run with FlashInfer, before the tile of the reduction was chosen."""

Row = Mapping[str, Any]
PEERS = ("FA3", "vLLM Triton", "SDPA", "paper", "stages", "streams")
"""Kernels beside ours, by their names in the result file."""
HEAD = ("FA3", "vLLM's Triton", "SDPA, dense", "paper", "stages", "streams")
GROUPS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("verify", lambda kind: kind == "verify"),
    ("decode", lambda kind: kind == "decode"),
    ("prefill", lambda kind: kind == "prefill"),
    ("prefill and decode", lambda kind: kind == "mixed"),
    ("all", lambda kind: True),
)
"""Groups of batches, by kind."""
RULES = {"prefill": "tall"}
"""Name of the rule's plan among the candidates, where it is not ``rule``."""
PLANS = {"stages": "ours"}
"""Plan that a peer is compared with: stages are those of the fastest plan, all others the rule."""
BANDWIDTH = 4.8e12
"""Bytes/s of the H200's memory, nominal."""
BARS = (
    ("verify", "FA3", 1.20), ("decode", "FA3", 1.00), ("prefill and decode", "FA3", 1.20),
    ("prefill", "FA3", 0.85), ("all", "vLLM Triton", 1.50),
)  # fmt: skip
"""Requirements: least geometric mean of a peer's time over meta-attention's."""


def batch_times(row: Row) -> dict[str, float]:
    """Median time of each kernel on a batch, in us; ``rule`` is the plan of the fixed rules.

    ``streams`` is the fastest of the ways to run prefills beside all others.
    """
    times: dict[str, float] = {}
    rule = RULES.get(row.get("plan_kind", ""), "rule")
    for entry in row["entries"]:
        medians = {name: median(samples) for name, samples in entry["samples_us"].items()}
        if entry["final"]:
            times |= medians
        elif rule in medians:
            times["rule"] = medians[rule]
    beside = [time for name, time in times.items() if name == "streams" or name.startswith("tall ")]
    if beside:
        times["streams"] = min(beside)
    return times


def grouped(rows: Iterable[Row]) -> dict[str, list[dict[str, float]]]:
    """Times of the batches of each group."""
    kept = list(rows)
    return {
        title: [batch_times(row) for row in kept if belongs(row["kind"])]
        for title, belongs in GROUPS
    }


def ratio(group: Iterable[Mapping[str, float]], name: str) -> float | None:
    """Geometric mean of a peer's time over the rule's; None if no batch has both."""
    ours = PLANS.get(name, "rule")
    ratios = [times[name] / times[ours] for times in group if name in times and ours in times]
    return geometric_mean(ratios) if ratios else None


def best_flops(rows: Iterable[Row]) -> float:
    """The most FLOP/s of any kernel on any batch."""
    return max(
        row["bound"]["flops"] / (time * 1e-6) for row in rows for time in batch_times(row).values()
    )


def bound_us(row: Row, flops: float) -> float:
    """The longer of a batch's bytes at the memory's nominal rate and its FLOPs at a rate."""
    bound = row["bound"]
    return 1e6 * max(bound["bytes"] / BANDWIDTH, bound["flops"] / flops)


def attention() -> str:
    """Times of all kernels on all batches."""
    rows = load(ATTENTION)["results"]
    gpu = " and ".join(sorted({row["gpu"] for row in rows}))
    parts = [
        "## Attention of one layer",
        wrapped(
            f"Meta-attention on {gpu}, bf16, heads of 128, pages of 16; query heads / KV heads in "
            "the first column. The bound is the longer of the bytes at the memory's nominal rate "
            f"and the FLOPs at {best_flops(rows) / 1e12:.0f} TFLOP/s, the best rate of any kernel "
            "on any batch. Medians of CUDA graphs, taken in turns, each with caches that rotate; "
            "results were compared with fp64 first. *Ours* is the plan that ships: that of the "
            "fixed rules of `serving.attention.rules`. *Fastest plan* is the fastest of 6 to 10 "
            "plans on each batch, chosen in the same run, so it is an upper limit. *Paper*: two "
            "tiles and the snake order. *Stages*: the fastest plan, one launch a stage. "
            "*Streams*: prefills beside all others on two streams, the fastest of three ways. "
            "FA3 knows no trees: its time on verify-tree is that of causal verifies. (`python -m "
            f"benchmarks run serving.attention --rules`, {link(ATTENTION)}; sweep: "
            f"{link(FOLDER / 'attention_sweep_h200.json.gz')}; variants of the kernels: "
            f"{link(FOLDER / 'tall_variants_h200.json.gz')})"
        ),
        _batches(rows),
        wrapped(
            "Geometric means of the other kernel's time over that of the rule's plan, and of "
            "*stages* over that of the fastest plan (above 1: meta-attention is faster):"
        ),
        _ratios(rows),
        _bars(rows),
        _missed(rows),
        _flashinfer(load(FLASHINFER)["results"]),
    ]
    return "\n\n".join(parts)


def _batches(rows: Sequence[Row]) -> str:
    lines, flops = [], best_flops(rows)
    for row in rows:
        times, bound = batch_times(row), bound_us(row, flops)
        peers = (f"{times[name]:.0f}" if name in times else "–" for name in PEERS)
        lines.append([
            f"{row['heads'][0]}/{row['heads'][1]}", row["batch"], f"{bound:.0f}",
            f"{times['rule']:.0f} ({times['rule'] / bound:.2f})", f"{times['ours']:.0f}", *peers,
        ])  # fmt: skip
    head = ("heads", "batch", "bound, us", "ours (over bound)", "fastest plan", *HEAD)
    return table(head, lines)


def _ratios(rows: Sequence[Row]) -> str:
    lines = []
    for title, group in grouped(rows).items():
        if group:
            values = [ratio(group, name) for name in PEERS]
            shown = ("–" if value is None else f"{value:.2f}" for value in values)
            lines.append([title, str(len(group)), *shown])
    return table(("batches", "number", *HEAD), lines)


def _bars(rows: Sequence[Row]) -> str:
    groups, flops = grouped(rows), best_flops(rows)
    lines = []
    for title, peer, least in BARS:
        value = ratio(groups[title], peer)
        if value is not None:
            lines.append([
                f"{title}: {peer} / ours", f"≥ {least:.2f}", f"{value:.2f}", _yes(value >= least),
            ])  # fmt: skip
    decodes = [row for row in rows if row["kind"] == "decode"]
    over = geometric_mean(batch_times(row)["rule"] / bound_us(row, flops) for row in decodes)
    lines.append(["decode: ours / bound", "≤ 1.15", f"{over:.2f}", _yes(over <= 1.15)])
    stages = 1 / (ratio(groups["prefill and decode"], "stages") or float("nan"))
    lines.append([
        "prefill and decode: fastest plan / stages", "≤ 0.85", f"{stages:.2f}",
        _yes(stages <= 0.85),
    ])  # fmt: skip
    slower = [
        times["vLLM Triton"] < times["rule"] for times in groups["all"] if "vLLM Triton" in times
    ]
    lines.append(
        ["batches slower than vLLM's Triton", "0", str(sum(slower)), _yes(not any(slower))]
    )
    head = ("requirement", "limit", "found", "met")
    return "The requirements that the work began with:\n\n" + table(head, lines)


def _missed(rows: Sequence[Row]) -> str:
    """Why figures miss their limits, what was tried, and what would be needed."""
    flops = best_flops(rows)
    decodes = [(batch_times(row)["rule"], bound_us(row, flops)) for row in rows
               if row["kind"] == "decode"]  # fmt: skip
    extra = [time - bound for time, bound in decodes]
    verifies = [row for row in rows if row["kind"] == "verify"]
    over = [geometric_mean(batch_times(row)[name] / bound_us(row, flops) for row in verifies)
            for name in ("rule", "FA3")]  # fmt: skip
    streams = ratio(grouped(rows)["prefill and decode"], "streams") or float("nan")
    points = (
        f"Verifies: our kernel takes {over[0]:.2f} times the bound and FlashAttention-3 "
        f"{over[1]:.2f}. Likely causes, not profiled: the softmax of short tiles does not overlap "
        "their products, and the splits are added by a launch of its own. Tried: other tiles, "
        "masks, splits, schedules, a dependent launch of the reduction, and the search for plans "
        "below. Needed: short tiles whose softmax overlaps the products, as the Gluon kernel has "
        "them for tiles of 128 rows.",
        f"Decodes over their bound: each of the {len(decodes)} batches takes {min(extra):.0f} to "
        f"{max(extra):.0f} us more than its bound, whatever the bound is, so that small batches "
        "miss the limit by most. The bound takes the memory's nominal rate. Tried: two and three "
        "programs on an SM, other splits, key tiles of 128, a reduction that loads 64 splits at "
        "once. Needed: a start, a tail and a reduction of a few us together.",
        "Prefills beside decodes: the Triton kernel runs the prefill's units, whose softmax does "
        "not overlap their products; prefills alone gain by the Gluon kernel, where it does "
        "([variants](../explanation/serving.md#tall-tiles-on-hopper)). Tried: units from both ends "
        "of the queue, two programs on an SM, two streams "
        f"({streams:.2f} of our time), and the Gluon kernel on a part of the SMs "
        "beside the decodes. Needed: a Gluon kernel that has short tiles too, in one launch.",
    )
    about = "Why limits are missed, what was tried, and what would be needed:"
    return "\n\n".join([about, *(_item(point) for point in points)])


def _item(text: str) -> str:
    """An item of a list, wrapped."""
    first, *others = wrapped(text).splitlines()
    return "\n".join([f"- {first}", *(f"  {line}" for line in others)])


def _flashinfer(rows: Sequence[Row]) -> str:
    shown = [
        f"{title} {value:.2f} ({len(group)} batches)"
        for title, group in grouped(rows).items()
        if (value := ratio(group, "FlashInfer")) is not None
    ]
    return wrapped(
        "FlashInfer 0.6.13 (BatchPrefill, its fa2 back end) ran in an earlier call on a GPU of the "
        f"same kind, on a part of the batches. Its time over meta-attention's: {', '.join(shown)}. "
        "In that call the reduction of verifies took 10 us more than above: its tile was chosen "
        f"between the calls ({link(FLASHINFER)}, {link(FOLDER / 'constants_h200.json')})."
    )


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "no"


def checks() -> str:
    """Correctness of the kernels, and memcheck."""
    rows = load(CHECK)["results"]
    lines = []
    for row in rows:
        error = "–" if row["largest_error"] is None else f"{row['largest_error']:.2f}"
        memory = str(row["memory_errors"]) if row["memcheck"] else "–"
        lines.append(
            [
                row["variant"],
                f"{row['cases']}/{row['planned']}",
                str(len(row["wrong"])),
                error,
                memory,
            ]
        )
    about = wrapped(
        "Seeded ragged batches: empty sequences, one token, odd lengths, lengths at the borders of "
        "pages and tiles, chunks behind a prefix, keys with and without splits. Every result is "
        "compared with fp64; the error is in units of the roundings of weights and results to the "
        "inputs' dtype (limit 1.1). Slots of the cache without a key hold NaN, and entries of the "
        "block table behind the last page name a page that does not exist. Each batch runs twice, "
        "and both results must be equal bit for bit. *Tables* compares the device's tables with "
        "the host's. Rows with memory errors ran under compute-sanitizer's memcheck, where each "
        "tensor is an allocation of its own. The reduction's tile and two constants of the "
        "device's builder were chosen after this run; the runs of the sections above and below "
        "compare the chosen forms with fp64 and with the host. (`python -m benchmarks run "
        f"serving.kernel_check`, {link(CHECK)})"
    )
    head = ("variant", "batches", "wrong", "largest error", "memory errors")
    return f"## Correctness\n\n{about}\n\n{table(head, lines)}"


def builders() -> str:
    """Times of the builders of the tables."""
    content = load(BUILD)
    lines = []
    for row in content["results"]:
        device = row["device"]
        lines.append([
            row["batch"], str(row["sequences"]), row["order"], str(row["capacity"]["units"]),
            f"{row['host']['p50_us']:.1f}", f"{row['host']['p99_us']:.1f}",
            f"{device['p50_us']:.1f}" if device else "–",
            _yes(device["bit_equal"]) if device else "–",
        ])  # fmt: skip
    about = wrapped(
        "Times of building the task tables of a batch, in us: on the host (one core of "
        f"{content['processor']}), and on {content['gpu']} in a CUDA graph of 20 builds. Wanted "
        "for 256 sequences were less than 50 us on the host at p99, and less than 10 us on the "
        f"device. (`python -m benchmarks run serving.table_build --device cuda`, {link(BUILD)})"
    )
    head = ("batch", "sequences", "order", "units", "host p50", "host p99", "device", "equal")
    missed = _late_builds(content["results"])
    return f"## Building the tables\n\n{about}\n\n{table(head, lines)}\n\n{missed}"


def _late_builds(rows: Sequence[Row]) -> str:
    """Which builds of 256 sequences and more miss the limits, and why."""
    large = [row for row in rows if row["sequences"] >= 256 and row["order"] != "lpt"]
    late = [row for row in large if row["host"]["p99_us"] >= 50]
    medians = [row["host"]["p50_us"] for row in large]
    slow = [row for row in large if row["device"] and row["device"]["p50_us"] >= 10]
    on_device = ", ".join(
        f"{row['batch']} {row['order']} ({row['device']['p50_us']:.1f} us)" for row in slow
    )
    return wrapped(
        f"Of {len(large)} rows with 256 sequences or more, without `lpt`, {len(late)} miss 50 us "
        f"at p99, and their medians are {min(medians):.0f} to {max(medians):.0f} us. Which rows "
        "miss it changes from run to run, so the tail is likely the machine's other work. "
        "Tried: arrays that are allocated once, sorting by classes. `lpt` keeps a heap of "
        "programs, whose work grows with the units. Needed: a core that is reserved for the "
        "builder, or the device's builder, which no core delays. It misses 10 us on "
        f"{on_device or 'no batch'}."
    )
