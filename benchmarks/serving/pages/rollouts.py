"""Sections of ``docs/results/serving.md`` on decodes that read shared prefixes once."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.serving.attention.prefix_forests import BANDWIDTH
from nostall.attach.rollouts.rates import compare, rate, rate_with_prompts, rates, whole_rate
from nostall.attach.rollouts.workload import Workload, parse_workload
from nostall.core.measurement import Comparison

FOLDER = results("serving")
ROLLOUTS = tuple(
    path
    for name in ("shared", "unshared", "slots")
    if (path := FOLDER / f"rollouts_{name}_h200.json").exists()
)
"""A workload of a later file replaces that of an earlier one. *slots*: more requests than slots,
not there before they were measured."""
ENGINES = FOLDER / "rollouts_engines_h200.json"
"""Other engines beside FLASH_ATTN; not there before they were measured."""
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
    custom = _engine(contents[0], "CUSTOM")
    about = (
        f"{custom['gpu']}, {_days(contents)}, vLLM {custom['vllm']} (V2 runner, its own "
        "graphs, asynchronous scheduling, prefix caching on), Llama-3-8B's shape with random "
        "weights. All samples of all prompts decode at once; their prompts are cached before the "
        "clock starts. FLASH_ATTN and CUSTOM (nostall, default choice) hold the GPU in turns. A "
        "ratio is the median of the turns' pairs with its 95 % bootstrap interval; of requests "
        "that end at different steps it is all tokens over all seconds. *Null*: the interval of "
        "both engines' turns over their own turns of an equal generation. *Build*: the host's "
        "time to build the metadata of a step, FLASH_ATTN's in brackets. (`python -m benchmarks "
        f"run serving.rollouts`, {', '.join(map(link, ROLLOUTS))})"
    )
    columns = (
        "prompts x samples, shared + new tokens", "turns of steps", "FLASH_ATTN, tokens/s",
        "CUSTOM, tokens/s", "ratio (interval)", "null", "build, us",
    )  # fmt: skip
    parts = [wrapped(about), table(columns, [_rollout_cells(*pair) for pair in pairs])]
    parts += [_whole_generations(pairs), _steps(contents), _others(), _host_time(), _checks()]
    return "\n\n".join(["### Shared prompts", *filter(None, parts)])


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
        whole, prompts = ([f(custom), f(base)] for f in (whole_rate, rate_with_prompts))
        if None not in whole + prompts:
            cells = [f"{ours:,.0f} ({ours / theirs:.2f})" for ours, theirs in (whole, prompts)]
            rows.append([parse_workload(base["workload"]).name, *cells])
    if not rows:
        return ""
    about = (
        "Whole generations, from the first token to the last, and the first one with the time in "
        "which its prompts are computed: CUSTOM's tokens/s (over FLASH_ATTN's)."
    )
    columns = ("prompts x samples, shared + new tokens", "whole", "with prompts")
    return "\n\n".join([wrapped(about), table(columns, rows)])


def _steps(contents: list[Row]) -> str:
    """What the GPU does in a step."""
    rows = []
    for content in contents:
        for base, custom in measured_pairs(content):
            if all("busy_us" in row.get("profile", {}) for row in (base, custom)):
                cells = [cell for row in (base, custom) for cell in _step_cells(row, content)]
                rows.append([parse_workload(base["workload"]).name, *cells])
    if not rows:
        return ""
    about = (
        "Steps at the start of a generation: the time of a step without a profiler, the share of "
        "it in which the GPU runs nothing (from the kernels of eight profiled steps), and the "
        "share of attention in the time of the kernels; FLASH_ATTN, then CUSTOM. *Over bound*: the "
        "time of attention over that of reading each key and value once at the memory's nominal "
        "rate. An idle share below 0: the profiler lengthens kernels by more than the GPU idles."
    )
    columns = ("prompts x samples, shared + new tokens", "FLASH_ATTN: step, ms", "idle",
               "attention", "over bound", "CUSTOM: step, ms", "idle", "attention",
               "over bound")  # fmt: skip
    return "\n\n".join([wrapped(about), table(columns, rows)])


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
    if not ENGINES.exists():
        return ""
    content, rows = load(ENGINES), []
    for engine in content["engines"][1:]:
        for base, other in measured_pairs(content, engine["engine"]):
            found = comparison(base, other)
            name = parse_workload(base["workload"]).name
            ratio = f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
            rows.append([engine["engine"], name, f"{_rate(other):,.0f}", ratio])
    about = (
        "Other engines in the same way. TRITON_ATTN: vLLM's Triton kernel; CASCADE: FLASH_ATTN "
        f"with cascade attention, V1: CUSTOM, both in the V1 model runner. ({link(ENGINES)})"
    )
    columns = ("engine", "prompts x samples, shared + new tokens", "tokens/s", "over FLASH_ATTN")
    return "\n\n".join([wrapped(about), table(columns, rows)])


def _host_time() -> str:
    """The host's time to build the metadata of a step, with nothing beside it."""
    content = load(HOST_TIME)
    names = list(content["results"][0]["builders"])
    about = (
        "The host's time to build the metadata of a decode step, us (median, in brackets the 95th "
        "percentile), while no model runs. *CUSTOM all* also serves small steps; *Triton* launches "
        f"by Triton's own launcher. {content['gpu']}, {content['date'][:10]}. (`python -m "
        f"benchmarks run serving.host_time`, {link(HOST_TIME)})"
    )
    rows = []
    for case in content["results"]:
        found = [case["builders"][name] for name in names]
        rows.append([case["name"], *(f"{x['p50_us']:.0f} ({x['p95_us']:.0f})" for x in found)])
    return "\n\n".join([wrapped(about), table(("prompts x samples", *names), rows)])


def _checks() -> str:
    """What vLLM with the plug-in survived."""
    stress, sleep, sanitized = (load(path)["summary"] for path in (STRESS, SLEEP, SANITIZED))
    shared = stress["plug_in"]["shared prefixes"]
    errors = sum(sanitized["memory_errors"]) if sanitized["sanitizer"] else "not counted"
    phases = load(SLEEP)["engines"]["CUSTOM"]["result"]
    slept = max(phase["counts"]["shared prefixes"]["with shared prefixes"]
                for phase in phases.values())  # fmt: skip
    speculated = ""
    if NGRAM.exists():
        found = load(NGRAM)["summary"]
        verifies = found["plug_in"]["served"].get("verify", 0)
        speculated = (
            f" n-gram speculation, all steps served: {verifies:,} steps of verifies; "
            f"{found['compared']:,} log probabilities of {found['repeated']} requests repeated "
            f"alone without speculation differ by {found['median_difference']:.4f} in the median "
            f"and {found['largest_difference']:.3f} at most ({link(NGRAM)})."
        )
    return wrapped(
        f"Stress: {stress['added']:,} requests arrived, {stress['aborted']:,} were aborted, "
        f"{stress['finished']:,} ended with all their tokens, {len(stress['problems'])} problems; "
        f"{shared['with shared prefixes']:,} of {stress['steps']:,} steps read shared prefixes "
        f"once. Of {stress['repeated']} requests repeated alone with FLASH_ATTN, "
        f"{stress['compared']:,} log probabilities before the first different token differ by "
        f"{stress['median_difference']:.4f} in the median and {stress['largest_difference']:.3f} "
        f"at most. Sleep: tokens after sleep of level 1 and 2 are "
        f"{'equal' if all(sleep['CUSTOM'].values()) else 'NOT equal'}; {slept} steps of this check "
        f"had shared prefixes that pay. compute-sanitizer: {sanitized['checked']} random forests, "
        f"{sanitized['grouped']} with groups, {sanitized['wrong']} wrong, memory errors: {errors}. "
        f"({', '.join(map(link, (STRESS, SLEEP, SANITIZED)))}){speculated}"
    )


def forests() -> str:
    """Times of the attention kernel that reads shared prefixes once, beside FlashAttention-3."""
    content = load(FORESTS)
    checked, first = content["forests"], content["results"][0]
    about = (
        f"One layer of Llama-3-8B's shape at a decode step on {first['gpu']}, "
        f"{content['date'][:10]}, bf16, pages of 16, times in us (medians). The tables are built "
        "on the device from the block table. *Bound* reads each key once at the memory's nominal "
        "rate. *Ours* is the plan of the rules; FA3 / ours is below 1 for few sequences, which the "
        "plug-in leaves to FlashAttention. *Tables* is the time to build the tables of a step, "
        f"once for all layers. Before, {checked['checked']} random forests of five shapes, "
        f"{checked['grouped']} with groups, were compared with fp64: {len(checked['wrong'])} "
        f"wrong. (`python -m benchmarks run serving.prefix_forests`, {link(FORESTS)})"
    )
    columns = ("prompts x samples, shared + own keys", "bound", "FA3", "ours", "FA3 / ours",
               "ours / bound", "tables", "RMS error of ours / of FA3")  # fmt: skip
    rows = []
    for row in content["results"]:
        took = {name: median(samples) for name, samples in row["samples_us"].items()}
        error = row["rms_error"]
        rows.append(
            [
                row["name"], f"{row['bound_us']:.1f}", f"{took['FA3']:.1f}", f"{took['ours']:.1f}",
                f"{took['FA3'] / took['ours']:.2f}", f"{took['ours'] / row['bound_us']:.2f}",
                f"{took['tables']:.1f}", f"{error['ours'] / error['FA3']:.3f}",
            ]
        )  # fmt: skip
    return "\n\n".join(["## Prefixes from block tables", wrapped(about), table(columns, rows)])
