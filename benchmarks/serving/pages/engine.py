"""Sections of ``docs/results/serving.md`` on vLLM, and on the simulated engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
from nostall.serving.simulate.step_costs import BUILT_IN

FOLDER = results("serving")
ENGINE = FOLDER / "vllm_engine.json"
UNSPECULATED = FOLDER / "vllm_engine_unspeculated.json"
ALONE = FOLDER / "vllm_engine_alone.json"
SIMULATED = FOLDER / "simulated_engine.json"
FORCED = FOLDER / "forced_tokens_h200.json.gz"
FORCED_SHARED = FOLDER / "forced_shared_h200.json.gz"
"""The setting ``shared``; not there before it was measured."""

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
    content = load(ENGINE)
    found = current_rounds()
    about = next(record for record in content["engines"] if record["rounds"])
    intro = wrapped(
        f"vLLM {about['vllm']} on {about['gpu']}, CUDA graphs on, eight layers of the shape of "
        "Llama-3-8B with random weights, 300 requests a workload: slices of the Azure traces of "
        "2023 and generated lengths; all arrive at once, or at a rate (`@`). The engines of a row "
        "share one GPU and serve in turns; the rows of 7 and 15 speculated tokens are two GPUs of "
        "one machine, those without speculation are a later run. "
        "CUSTOM is the plug-in of that day: it served the decode steps on which its kernel was "
        "faster than FlashAttention-3, and left all others to it, those with speculative tokens "
        "included. It serves decodes beside prompts since, which is not in these rows. *With "
        "table*: also linear layers by a table of "
        "`nostall serving tune`. Tokens/s are the mean of two rounds (least to largest). "
        f"(`python -m benchmarks run serving.vllm_engine`, {link(ENGINE)}, {link(UNSPECULATED)})"
    )
    earlier = wrapped(
        "Without speculation there are two earlier runs, whose slices of the traces differ. In the "
        f"first CUSTOM served all decode steps, and each engine had a GPU of its own ({link(ALONE)}"
        "); in the second CUSTOM also had a table of linear layers, and an error of the benchmark "
        f"ended FLASH_ATTN ({link(ENGINE)}):"
    )
    equal = [
        row["equal_tokens"]
        for (_, _, engine), rows in found.items()
        for row in rows
        if engine != ORDER[0] and "equal_tokens" in row
    ]
    greedy = wrapped(
        f"Greedy tokens: in {sum(value == 1.0 for value in equal)} of {len(equal)} rounds that "
        "have one of FLASH_ATTN to compare with, the first 48 tokens of all 300 requests equal "
        "FLASH_ATTN's."
    )
    parts = [
        "## In vLLM", intro, _rates(found), _bars(found), "Latencies and the host's time:",
        _latencies(found), greedy, earlier, _earlier(),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _rates(found: Rates) -> str:
    lines = []
    for count, workload in dict.fromkeys((count, workload) for count, workload, _ in found):
        cells = []
        for engine in ORDER:
            rows = found.get((count, workload, engine))
            cells.append(_range(rows) if rows else "–")
        lines.append([str(count), workload, *cells])
    return table(("speculated", "workload", *ORDER), lines)


def _range(rows: Sequence[Row]) -> str:
    values = [row["output_tokens_per_s"] for row in rows]
    if len(values) == 1:
        return f"{values[0]:,.0f}"
    return f"{fmean(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _bars(found: Rates) -> str:
    lines = []
    for title, speculated, other, least in BARS:
        mean, lowest = token_ratio(found, speculated, other)
        is_met = "yes" if (lowest if title in NEVER_BELOW else mean) >= least else "no"
        # What of a gain vLLM has without nostall.
        alone = token_ratio(found, speculated, other, ORDER[0])
        without = "–" if other == ORDER[0] else f"{alone[0]:.3f}, least {alone[1]:.3f}"
        lines.append([title, f"≥ {least:.2f}", f"{mean:.3f}", f"{lowest:.3f}", is_met, without])
    about = wrapped(
        "Requirements, as the geometric mean of CUSTOM's tokens/s over another back end's (paced "
        "workloads left out). The plug-in gains most over TRITON_ATTN on prefill-heavy, which it "
        "leaves to FlashAttention-3; on decode-heavy all engines are within the noise. With "
        "speculation it serves no step, because its kernel is not faster on verifies: what "
        "differs from 1 over FLASH_ATTN is noise, for the two rounds of one engine differ by up "
        f"to {100 * spread(found):.0f} %. Tried: the plug-in on all decode steps, with a GPU for "
        "each engine (below), and tables of linear layers. Needed: a kernel that is faster than "
        "FlashAttention-3 on verifies and mixed batches; on decodes, attention is likely a small "
        "part of a step of this model."
    )
    head = ("CUSTOM", "limit", "mean", "least", "met", "FLASH_ATTN alone over the same")
    shown = table(head, lines)
    return "\n\n".join([about, shown, _slowest(found)])


def _slowest(found: Rates) -> str:
    """The workload on which CUSTOM is slowest beside FLASH_ATTN without speculation, and why."""
    names = ("FLASH_ATTN", "CUSTOM", "TRITON_ATTN")
    workloads = {workload for count, workload, _ in found if count == 0 and "@" not in workload}
    slowest = min(
        workloads, key=lambda w: rate(found[0, w, "CUSTOM"]) / rate(found[0, w, "FLASH_ATTN"])
    )
    rounds = {name: found[0, slowest, name] for name in names}
    rates = "; ".join(
        f"{name} " + " and ".join(f"{row['output_tokens_per_s']:,.0f}" for row in rows)
        for name, rows in rounds.items()
    )
    build = {name: fmean(row["build_us"] for row in rows) for name, rows in rounds.items()}
    more = build["CUSTOM"] - build["FLASH_ATTN"]
    steps = fmean(row["steps"] for row in rounds["CUSTOM"])
    share = more * 1e-6 * steps / fmean(row["seconds"] for row in rounds["CUSTOM"])
    last = [rounds[name][-1]["output_tokens_per_s"] for name in names]
    order = "ahead of" if last[1] > max(last[0], last[2]) else "not ahead of"
    return wrapped(
        f"Without speculation CUSTOM is slowest beside FLASH_ATTN on {slowest}, where the rounds "
        "of one engine, with requests of the same lengths, differ most (tokens/s: "
        f"{rates}); in the last round CUSTOM is {order} both. The plug-in's own part is the time "
        f"in which the host builds its tables: {more:.0f} us a step more than FLASH_ATTN's "
        f"metadata, at most {share:.1%} of the time if the GPU waits for all of it. Needed for "
        "that part: tables that the device's builder makes, which costs the host a launch."
    )


def _latencies(found: Rates) -> str:
    lines = []
    for (count, workload, engine), rows in sorted(
        found.items(), key=lambda item: (item[0][0], ORDER.index(item[0][2]))
    ):
        means = (
            fmean(row["ttft_s"]["p50"] for row in rows) * 1e3,
            fmean(row["ttft_s"]["p99"] for row in rows) * 1e3,
            fmean(row["tbt_s"]["p50"] for row in rows) * 1e3,
            fmean(row["tbt_s"]["p99"] for row in rows) * 1e3,
            fmean(row["build_us"] for row in rows),
        )
        shown = (f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in means)
        lines.append([str(count), engine, workload, *shown])
    head = ("speculated", "back end", "workload", "TTFT p50, ms", "p99", "TBT p50, ms", "p99",
            "metadata, host us a step")  # fmt: skip
    return table(head, lines)


def _earlier() -> str:
    lines = []
    for number, path in enumerate((ALONE, ENGINE), 1):
        for (count, workload, engine), rows in rounds_of(load(path)).items():
            if count == 0:
                lines.append([str(number), engine, workload, _range(rows)])
    return table(("run", "back end", "workload", "tokens/s"), lines)


def simulated() -> str:
    """The simulated engine beside the real one."""
    content = load(SIMULATED)
    names = {
        "output_tokens_per_s": "tokens/s", "ttft_p50_s": "TTFT p50", "tbt_p50_s": "TBT p50",
        "steps": "steps",
    }  # fmt: skip
    lines = [
        [row["workload"], *(f"{row['error'][name]:+.1%}" for name in names),
         f"{row['spread']['tbt_p50_s']:.2f}"]
        for row in content["rows"]
    ]  # fmt: skip
    lines.append(["mean absolute error", *(f"{content['mean_error'][n]:.1%}" for n in names), ""])
    about = wrapped(
        "`nostall serving simulate` on the same requests, *modelled* from measured steps of "
        f"another run ([JSON](../../src/nostall/serving/simulate/{BUILT_IN.name})), over the mean "
        f"of the rounds of {content['engine']} in run 2 above, minus one. The goal was a mean "
        "absolute error of 10 % or less for each figure. *Spread*: the longest TBT of the engine's "
        "rounds over the shortest. (`python -m benchmarks run serving.simulated_engine`, "
        f"{link(SIMULATED)})"
    )
    why = wrapped(
        "The time between tokens misses the goal for two reasons. vLLM schedules a step while the "
        "one before it runs, and the step costs were measured without that: where rounds repeat "
        "(code, prefill-heavy) the modelled steps take 1.5 to 2.4 ms more than the real ones. And "
        "on decode-heavy and conv the rounds of one engine differ by more than the goal. "
        "`serving.step_costs` times asynchronous steps now; this form has not run on a GPU."
    )
    head = ("workload", *names.values(), "spread of TBT")
    return f"## The simulated engine\n\n{about}\n\n{table(head, lines)}\n\n{why}"


SETTINGS = {
    "groups": "several cache groups of one spec",
    "full": "`cudagraph_mode=FULL` asked for",
    "manager-off": "hybrid cache manager off",
    "shared": "samples of shared prompts",
}
"""Settings of the forced tokens, in words."""


def forced_tokens() -> str:
    """Section on the log probabilities of forced tokens beside FLASH_ATTN's."""
    content = load(FORCED)
    settings, shared = content["results"], ""
    if FORCED_SHARED.exists():
        settings = {**settings, **load(FORCED_SHARED)["results"]}
        shared = (
            " Samples of shared prompts: with prefix caching; prefixes are read once in decodes, "
            f"beside new samples and beside prompts ({link(FORCED_SHARED)})."
        )
    engines = [row for setting in settings.values() for row in setting.values()]
    rows = [
        [
            SETTINGS[setting],
            f"nostall 8d3a6355, {name[5:]}"
            if name.startswith("old")
            else name.replace("new", "nostall"),
            *(f"{row['from_base'][key]:.4f}" for key in ("mean", "p99", "largest")),
            f"{row['from_base']['other_best']:.1%}",
        ]
        for setting, found in settings.items()
        for name, row in found.items()
        if name != "FLASH_ATTN"
    ]
    columns = ["setting", "engine", "mean", "99th percentile", "largest", "other best token"]
    first = engines[0]
    about = (
        f"{first['gpu']}, driver {first['driver']}, vLLM {first['vllm']} (V1 runner), "
        f"{content['date'][:10]}: the same {first['from_base']['tokens']:,} tokens are forced in "
        "each engine; a row has the absolute differences of their log probabilities from those of "
        "back end FLASH_ATTN in the same setting. *FLASH_ATTN eager* runs without CUDA graphs and "
        "so with other numbers of splits: its differences are those of rounding. 8d3a6355 is the "
        "version that did not build the tables of each cache group and of each captured step anew: "
        "it read pages of another group, and tables of an earlier step. With the manager off, vLLM "
        "0.25.1 kept layers with and without a window in two groups, so both versions are right "
        "there; groups that join them are tested on CPU tensors (`make test-vllm`)."
    )
    command = f"(`python -m benchmarks run serving.forced_tokens`, {link(FORCED)})"
    text = wrapped(f"{about}{shared} {command}")
    return "\n\n".join(["### The same tokens", text, table(columns, rows)])
