"""Sections of ``docs/results/serving.md`` on decodes that read shared prefixes once."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.harness.markdown import link
from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render, source
from benchmarks.serving.attention.prefix_forests import BANDWIDTH
from benchmarks.serving.engine.rollout_workloads import Workload, compare, parse_workload
from nostall.attach.rollouts.job import rate, rates, whole_rate
from nostall.core.measurement import Comparison

FOLDER = results("serving")
ROLLOUTS = tuple(FOLDER / f"rollouts_{name}_h200.json" for name in ("shared", "unshared", "slots"))
"""A workload of a later file replaces that of an earlier one. *slots*: more requests than slots."""
ENGINES = FOLDER / "rollouts_engines_h200.json"
"""Other engines beside FLASH_ATTN."""
FIXED_COST = FOLDER / "fixed_cost_h200.json.gz"
HOST_TIME, STRESS, SLEEP, SANITIZED, NGRAM = (
    FOLDER / f"{name}_h200.json"
    for name in ("host_time", "stress", "sleep", "sanitized_forests", "ngram")
)
FORESTS = FOLDER / "prefix_forests_h200.json.gz"
ELEMENT_BYTES = 2
"""Of a key or a value in bf16."""

Row = Mapping[str, Any]


def rollouts() -> str:
    """Token rates of vLLM with the plug-in beside FLASH_ATTN."""
    contents = [load(path) for path in ROLLOUTS]
    pairs = latest_pairs(contents)
    values = {
        "custom": _engine(contents[0], "CUSTOM"),
        "days": _days(contents),
        "files": [link(path) for path in ROLLOUTS],
        "rates": [_rollout_cells(*pair) for pair in pairs],
        "whole": _whole_generations(pairs),
        "steps": _steps(contents),
        "others": _others(),
        "host_time": _host_time(),
        "checks": _checks(),
    }
    return render(__file__, values)


def _engine(content: Row, name: str) -> Row | None:
    """The record of an engine; None if it was not measured."""
    return next((e for e in content["engines"] if e["engine"] == name), None)


def measured_pairs(content: Row, name: str = "CUSTOM") -> list[tuple[Row, Row]]:
    """The records of FLASH_ATTN and of another engine for each workload that both have run."""
    engines = [_engine(content, "FLASH_ATTN"), _engine(content, name)]
    if None in engines:
        return []
    base, other = ({r["workload"]: r for r in e["rounds"] if r["turns"]} for e in engines if e)
    return [(base[text], other[text]) for text in base if text in other]


def comparison(base: Row, custom: Row) -> Comparison:
    """CUSTOM's token rate over FLASH_ATTN's."""
    return compare(custom, base, is_ragged=parse_workload(base["workload"]).new is None)


def latest_pairs(contents: list[Row]) -> list[tuple[Row, Row]]:
    """The records of FLASH_ATTN and CUSTOM for each workload, from the last file that has it."""
    pairs = [pair for content in contents for pair in measured_pairs(content)]
    return list({base["workload"]: (base, custom) for base, custom in pairs}.values())


def _days(contents: list[Row]) -> str:
    """The first and the last day of the measurements."""
    days = sorted({str(content["date"])[:10] for content in contents})
    return " to ".join(dict.fromkeys((days[0], days[-1])))


def rollout_ratios(contents: list[Row]) -> list[tuple[Workload, float]]:
    """Each workload and CUSTOM's token rate over FLASH_ATTN's."""
    return [
        (parse_workload(base["workload"]), comparison(base, custom).ratio)
        for base, custom in latest_pairs(contents)
    ]


def _rollout_cells(base: Row, custom: Row) -> list[str]:
    found = comparison(base, custom)
    has_null = bool(custom.get("generations"))
    null = f"{found.null_low:.3f} to {found.null_high:.3f}" if has_null else "–"
    turns = custom["turns"]
    return [
        parse_workload(base["workload"]).name,
        f"{len(turns)} x {turns[0]['steps']}",
        *(f"{_rate(row):,.0f}" for row in (base, custom)),
        f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})",
        null,
        f"{_build_us(custom):.0f} ({_build_us(base):.0f})",
    ]


def _rate(row: Row) -> float:
    """Tokens a second: the median of the turns, or all tokens over all seconds."""
    if parse_workload(row["workload"]).new is not None:
        return median(rates(row))
    return rate(row["turns"])


def _build_us(row: Row) -> float:
    found = [about["build_us"] for about in row.get("generations", []) if "build_us" in about]
    return median(found) if found else float(row["build_us"])


def _whole_generations(pairs: list[tuple[Row, Row]]) -> str:
    """Token rates with the start and the end of the generations, and with their prompts."""
    rows = []
    for base, custom in pairs:
        whole, prompts = (
            [whole_rate(each, with_prompts=with_prompts) for each in (custom, base)]
            for with_prompts in (False, True)
        )
        if None not in whole + prompts:
            cells = [f"{ours:,.0f} ({ours / theirs:.2f})" for ours, theirs in (whole, prompts)]
            rows.append([parse_workload(base["workload"]).name, *cells])
    return render(__file__, {"rows": rows}, "whole generations") if rows else ""


def _steps(contents: list[Row]) -> str:
    """What the GPU does in a step."""
    rows = []
    for content in contents:
        for base, custom in measured_pairs(content):
            if all("busy_us" in row.get("profile", {}) for row in (base, custom)):
                cells = [cell for row in (base, custom) for cell in _step_cells(row, content)]
                rows.append([parse_workload(base["workload"]).name, *cells])
    return render(__file__, {"rows": rows}, "steps") if rows else ""


def _step_cells(row: Row, content: Row) -> list[str]:
    found, model = row["profile"], content["model"]
    busy_us, attention_us = (found[key] / found["steps"] for key in ("busy_us", "attention_us"))
    step_us = 1e3 * found["warm_step_ms"]
    values = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    bound_us = 1e6 * found["distinct_keys"] * values * ELEMENT_BYTES / BANDWIDTH["H200"]
    return [
        f"{step_us / 1e3:.2f}",
        f"{1 - busy_us / step_us:.0%}",
        f"{attention_us / busy_us:.0%}",
        f"{attention_us / bound_us:.2f}",
    ]


def _others() -> str:
    """Token rates of other engines beside FLASH_ATTN's."""
    content, rows = load(ENGINES), []
    for engine in content["engines"][1:]:
        for base, other in measured_pairs(content, engine["engine"]):
            found = comparison(base, other)
            name = parse_workload(base["workload"]).name
            ratio = f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
            rows.append([engine["engine"], name, f"{_rate(other):,.0f}", ratio])
    return render(__file__, {"file": link(ENGINES), "rows": rows}, "others")


def _host_time() -> str:
    """The host's time to build the metadata of a step, with nothing beside it."""
    content = load(HOST_TIME)
    names = list(content["results"][0]["builders"])
    results = []
    for case in content["results"]:
        found = [case["builders"][name] for name in names]
        times_us = [f"{x['p50_us']:.0f} ({x['p95_us']:.0f})" for x in found]
        results.append({"name": case["name"], "times_us": times_us})
    values = {"file": link(HOST_TIME), "names": names, "results": results}
    return render(__file__, {**content, **values}, "host time")


def _checks() -> str:
    """What vLLM with the plug-in survived."""
    stress, sleep, sanitized = (load(path)["summary"] for path in (STRESS, SLEEP, SANITIZED))
    phases = load(SLEEP)["engines"]["CUSTOM"]["result"].values()
    speculated = {**load(NGRAM)["summary"], "file": link(NGRAM)} if NGRAM.exists() else {}
    values = {
        "stress": stress,
        "shared": stress["plug_in"]["shared prefixes"],
        "equal": all(sleep["CUSTOM"].values()),
        "slept": max(p["counts"]["shared prefixes"]["with shared prefixes"] for p in phases),
        "sanitized": sanitized,
        "errors": sum(sanitized["memory_errors"]) if sanitized["sanitizer"] else "not counted",
        "files": [link(path) for path in (STRESS, SLEEP, SANITIZED)],
        # Not yet measured on a GPU.
        "speculated": render(__file__, speculated, "n-gram") if speculated else "",
    }
    return render(__file__, values, "checks")


def fixed_cost() -> str:
    """What a decode step costs beside reading its keys."""
    content = source(FIXED_COST)
    both = {
        has: [row for row in content["rows"] if row["has_prefixes"] is has] for has in (False, True)
    }
    rows = [{**row, "rest_us": row["us"]["whole"] - row["parts"]["bytes"]} for row in both[True]]
    values = {
        "rows": rows,
        "starts": sorted(row["parts"]["start"] for row in content["rows"]),
        "dependent": sorted(row["us"]["whole"] - row["us"]["dependent"] for row in rows),
        "units": sorted(row["us"]["whole"] - row["us"]["units"] for row in rows),
        "plain": next(r for r in both[False] if (r["sequences"], r["keys"]) == (64, 2048)),
        "shared": next(r for r in both[True] if (r["sequences"], r["keys"]) == (64, 2048)),
    }
    return render(__file__, {**content, **values}, "fixed cost")


def forests() -> str:
    """Times of the attention kernel that reads shared prefixes once, beside FlashAttention-3."""
    content = source(FORESTS)
    rows = []
    for row in content["results"]:
        took = {name: median(samples) for name, samples in row["samples_us"].items()}
        rows.append({
            **row,
            "took": took,
            "over_fa3": took["FA3"] / took["ours"],
            "over_bound": took["ours"] / row["bound_us"],
            "error": row["rms_error"]["ours"] / row["rms_error"]["FA3"],
        })  # fmt: skip
    return render(__file__, {**content, "rows": rows}, "forests")
