"""Sections of ``docs/results/serving.md`` on vLLM, and on the simulated engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render, source
from nostall.serving.simulate.step_costs import BUILT_IN

FOLDER = results("serving")
ENGINE = FOLDER / "vllm_engine.json"
UNSPECULATED = FOLDER / "vllm_engine_unspeculated.json"
ALONE = FOLDER / "vllm_engine_alone.json"
SIMULATED = FOLDER / "simulated_engine.json"
FORCED = FOLDER / "forced_tokens_h200.json.gz"
FORCED_TP = FOLDER / "forced_tp_h200.json.gz"
FORCED_SHARED = FOLDER / "forced_shared_h200.json.gz"
"""The setting ``shared``."""

Row = Mapping[str, Any]
ORDER = ("FLASH_ATTN", "CUSTOM", "CUSTOM with table", "TRITON_ATTN")
"""Engines in the order of the tables' columns."""
BARS = (
    ("over TRITON_ATTN, no speculation", 0, "TRITON_ATTN", 1.30),
    ("over TRITON_ATTN, 7 and 15 tokens", None, "TRITON_ATTN", 1.30),
    ("over FLASH_ATTN, no speculation", 0, "FLASH_ATTN", 0.98),
    ("over FLASH_ATTN, 7 and 15 tokens", None, "FLASH_ATTN", 1.03),
)
"""Requirements: least geometric mean of CUSTOM's token rate over another back end's."""
NEVER_BELOW = ("over FLASH_ATTN, no speculation",)
"""Requirements that each workload must meet."""

Rates = dict[tuple[int, str, str], list[Row]]
"""(speculated tokens, workload, engine) -> rounds."""


def name_of(record: Row) -> str:
    """The engine's name in the tables."""
    backend, _, *served = record["engine"].split(":")
    return f"{backend} with table" if "linear" in served else str(backend)


def rounds_of(content: Row) -> Rates:
    """All rounds by speculation, workload and engine."""
    found: Rates = {}
    for record in content["engines"]:
        for row in record["rounds"]:
            key = (record["speculate"], row["workload"], name_of(record))
            found.setdefault(key, []).append(row)
    return found


def current_rounds() -> Rates:
    """The rounds with speculation, and those without it of the later run."""
    speculated = {key: rows for key, rows in rounds_of(load(ENGINE)).items() if key[0]}
    return rounds_of(load(UNSPECULATED)) | speculated


def rate(rows: Sequence[Row]) -> float:
    """Mean token rate of rounds."""
    return fmean(row["output_tokens_per_s"] for row in rows)


def token_ratio(
    found: Rates, speculated: int | None, other: str, ours: str = "CUSTOM"
) -> tuple[float, float]:
    """Geometric mean and least of an engine's token rate over another one's.

    Workloads whose arrivals are paced are left out. ``speculated`` None: 7 and 15 tokens.
    """
    ratios = [
        rate(rows) / rate(found[count, workload, other])
        for (count, workload, engine), rows in found.items()
        if engine == ours and "@" not in workload and (count, workload, other) in found
        and (count == speculated if speculated is not None else count > 0)
    ]  # fmt: skip
    return (geometric_mean(ratios), min(ratios)) if ratios else (float("nan"), float("nan"))


def spread(found: Rates) -> float:
    """By how much the token rates of the rounds of one engine differ at most."""
    rates = [[row["output_tokens_per_s"] for row in rows] for rows in found.values()]
    return max(max(values) / min(values) - 1 for values in rates)


def engines() -> str:
    """vLLM with the plug-in and with its own back ends."""
    found = current_rounds()
    equal = [
        row["equal_tokens"]
        for (_, _, engine), rows in found.items()
        for row in rows
        if engine != ORDER[0] and "equal_tokens" in row
    ]
    values = {
        "about": next(record for record in load(ENGINE)["engines"] if record["rounds"]),
        "engine_file": ENGINE,
        "unspeculated_file": UNSPECULATED,
        "engines": ORDER,
        "rates": [
            {
                "speculated": count,
                "workload": workload,
                "rates": [_range(found.get((count, workload, engine))) for engine in ORDER],
            }
            for count, workload in dict.fromkeys(key[:2] for key in found)
        ],
        "spread": spread(found),
        "bars": [_bar(found, *bar) for bar in BARS],
        "slowest": _slowest(found),
        "latencies": [
            {"speculated": count, "engine": engine, "workload": workload, "means": _means(rows)}
            for (count, workload, engine), rows in sorted(
                found.items(), key=lambda item: (item[0][0], ORDER.index(item[0][2]))
            )
        ],
        "equal": equal,
        "all_equal": sum(value == 1.0 for value in equal),
        "alone_file": ALONE,
        "earlier": [
            {"run": run, "engine": engine, "workload": workload, "rate": _range(rows)}
            for run, path in enumerate((ALONE, ENGINE), 1)
            for (count, workload, engine), rows in rounds_of(load(path)).items()
            if count == 0
        ],
    }
    return render(__file__, values)


def _range(rows: Sequence[Row] | None) -> str | None:
    """Mean token rate of rounds with the least and the largest."""
    if not rows:
        return None
    values = [row["output_tokens_per_s"] for row in rows]
    if len(values) == 1:
        return f"{values[0]:,.0f}"
    return f"{fmean(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _bar(found: Rates, title: str, speculated: int | None, other: str, limit: float) -> Row:
    """A requirement, and what of the gain vLLM has without nostall."""
    mean, least = token_ratio(found, speculated, other)
    alone, least_alone = token_ratio(found, speculated, other, ORDER[0])
    return {
        "title": title,
        "limit": limit,
        "mean": mean,
        "least": least,
        "met": (least if title in NEVER_BELOW else mean) >= limit,
        "alone": None if other == ORDER[0] else f"{alone:.3f}, least {least_alone:.3f}",
    }


def _slowest(found: Rates) -> Row:
    """The workload on which CUSTOM is slowest beside FLASH_ATTN without speculation, and why."""
    names = ("FLASH_ATTN", "CUSTOM", "TRITON_ATTN")
    workloads = {workload for count, workload, _ in found if count == 0 and "@" not in workload}
    slowest = min(
        workloads, key=lambda w: rate(found[0, w, "CUSTOM"]) / rate(found[0, w, "FLASH_ATTN"])
    )
    rounds = {name: found[0, slowest, name] for name in names}
    build = {name: fmean(row["build_us"] for row in rows) for name, rows in rounds.items()}
    more_us = build["CUSTOM"] - build["FLASH_ATTN"]
    steps, seconds = (fmean(row[key] for row in rounds["CUSTOM"]) for key in ("steps", "seconds"))
    last = [rounds[name][-1]["output_tokens_per_s"] for name in names]
    return {
        "workload": slowest,
        "rates": "; ".join(
            f"{name} " + " and ".join(f"{row['output_tokens_per_s']:,.0f}" for row in rows)
            for name, rows in rounds.items()
        ),
        "ahead": last[1] > max(last[0], last[2]),
        "more_us": more_us,
        "share": more_us * 1e-6 * steps / seconds,
    }


def _means(rows: Sequence[Row]) -> list[str]:
    """Mean latencies in milliseconds, and the host's microseconds a step."""
    means = [
        1e3 * fmean(row[kind][quantile] for row in rows)
        for kind in ("ttft_s", "tbt_s")
        for quantile in ("p50", "p99")
    ]
    means.append(fmean(row["build_us"] for row in rows))
    return [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in means]


def simulated() -> str:
    """The simulated engine beside the real one."""
    return render(__file__, {**source(SIMULATED), "built_in": BUILT_IN.name}, "simulated")


SETTINGS = {
    "groups": "several cache groups of one spec",
    "full": "`cudagraph_mode=FULL` asked for",
    "manager-off": "hybrid cache manager off",
    "shared": "samples of shared prompts",
    "fp8": "the same, cache of fp8; beside 16 bits",
    "tp": "the same, tensor parallelism over two GPUs",
}
"""Settings of the forced tokens, in words."""


def forced_tokens() -> str:
    """Section on the log probabilities of forced tokens beside FLASH_ATTN's."""
    content = load(FORCED)
    later = [load(path) for path in (FORCED_SHARED, FORCED_TP)]
    settings = {**content["results"]}
    for each in later:
        settings |= each["results"]
    values = {
        "first": next(iter(next(iter(settings.values())).values())),
        "date": content["date"],
        "shared_file": FORCED_SHARED,
        "tp_file": FORCED_TP,
        "forced_file": FORCED,
        "rows": [
            {**row, "setting": SETTINGS[setting], "engine": _version(name)}
            for setting, found in settings.items()
            for name, row in found.items()
            if name != "FLASH_ATTN"
        ],
    }
    return render(__file__, values, "forced tokens")


def _version(engine: str) -> str:
    """An engine of the forced tokens in words."""
    if engine.startswith("old"):
        return f"nostall 8d3a6355, {engine[5:]}"
    return engine.replace("new", "nostall")
