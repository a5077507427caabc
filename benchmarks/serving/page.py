"""Write ``docs/results/serving.md``: attention, linear layers and vLLM, as a GPU measured them.

python -m benchmarks page serving
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from nostall.core.files import write_atomically
from nostall.serving.simulate.step_costs import BUILT_IN

PAGE = PAGES / "serving.md"
FOLDER = results("serving")
ATTENTION = FOLDER / "attention_h200.json.gz"
VARIANTS = FOLDER / "tall_variants_h200.json.gz"
GEMM = FOLDER / "gemm_h200.json.gz"
ENGINE = FOLDER / "vllm_engine.json"
SIMULATED = FOLDER / "simulated_engine.json"

Row = Mapping[str, Any]
VARIANT_NAMES = ("lpt-free-nopin", "n64s3 w4x2 u2")
"""Variants of prefills and of decodes that the page shows."""
PEERS = ("FA3", "vLLM Triton", "SDPA", "paper", "stages", "streams")
"""Kernels beside ours, by their names in the result file."""
GROUPS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("verify", lambda kind: kind == "verify"),
    ("decode", lambda kind: kind == "decode"),
    ("decode and verify", lambda kind: kind == "decode and verify"),
    ("prefill", lambda kind: kind == "prefill"),
    ("prefill and decode", lambda kind: kind == "mixed"),
    ("all", lambda kind: True),
)
"""Groups of batches, by the kind of the rules."""
RANGES = ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096))


def text() -> str:
    """The whole page."""
    return page(
        "Serving, measured",
        "python -m benchmarks page serving",
        [
            _attention(load(ATTENTION)["results"]),
            _variants(load(VARIANTS)),
            _gemm(load(GEMM)),
            _engine(load(ENGINE)),
            _simulated(load(SIMULATED)),
        ],
    )


def write() -> None:
    """Write the page."""
    write_atomically(PAGE, text().encode())


def batch_times(row: Row) -> dict[str, float]:
    """Median time of each kernel on a batch, in us, from the final comparison."""
    times: dict[str, float] = {}
    for entry in row["entries"]:
        if entry["final"]:
            times |= {name: median(samples) for name, samples in entry["samples_us"].items()}
    return times


def attention_ratios() -> dict[str, float]:
    """Geometric mean over all batches of each peer's time over meta-attention's."""
    times = [batch_times(row) for row in load(ATTENTION)["results"]]
    return {name: geometric_mean(t[name] / t["ours"] for t in times if name in t) for name in PEERS}


def linear_ratios() -> list[tuple[int, float]]:
    """(M, time of F.linear over that of the table) of each measured point."""
    return [
        (
            point["m"],
            median(point["samples_us"]["linear"]) / median(point["samples_us"]["deployed"]),
        )
        for point in load(GEMM)["points"]
    ]


def _attention(rows: Sequence[Row]) -> str:
    gpu = " and ".join(sorted({row["gpu"] for row in rows}))
    parts = [
        "## Attention of one layer",
        wrapped(
            f"Meta-attention on {gpu}, bf16, heads of 128, pages of 16; query heads / KV heads in "
            "the first column. The bound is the longer of the bytes at 4.8 TB/s and the FLOPs at "
            "600 TFLOP/s. Medians of CUDA graphs, taken in turns, each with caches that rotate; "
            "results were compared with fp64 first. *Ours* is the fastest of 6 to 9 plans on each "
            "batch, chosen in the same run, so it is an upper limit for the fixed rules of "
            "`serving.attention.rules`. *Paper*: two tiles and the snake order. *Stages*: the "
            "same plan, one launch a stage. *Streams*: prefills beside all others, on two streams. "
            "FA3 knows no trees: its time on verify-tree is that of causal verifies. "
            "(`python -m benchmarks run "
            f"serving.attention --rules`, {link(ATTENTION)}; sweep: "
            f"{link(FOLDER / 'attention_sweep_h200.json.gz')})"
        ),
        _batches(rows),
        "Geometric means of the other kernel's time over meta-attention's (above 1: meta-attention "
        "is faster):",
        _ratios(rows),
    ]
    return "\n\n".join(parts)


def _batches(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        times, bound = batch_times(row), row["bound"]["us"]
        peers = (f"{times[name]:.0f}" if name in times else "–" for name in PEERS)
        lines.append([
            f"{row['heads'][0]}/{row['heads'][1]}", row["batch"], f"{bound:.0f}",
            f"{times['ours']:.0f} ({times['ours'] / bound:.2f})", *peers,
        ])  # fmt: skip
    head = ("heads", "batch", "bound, us", "ours (over bound)", "FA3", "vLLM's Triton",
            "SDPA, dense", "paper", "stages", "streams")  # fmt: skip
    return table(head, lines)


def _ratios(rows: Sequence[Row]) -> str:
    lines = []
    for title, belongs in GROUPS:
        group = [batch_times(row) for row in rows if belongs(row["kind"])]
        if group:
            lines.append([title, str(len(group)), *(_ratio(group, name) for name in PEERS)])
    head = ("batches", "number", "FA3", "vLLM's Triton", "SDPA, dense", "paper", "stages",
            "streams")  # fmt: skip
    return table(head, lines)


def _ratio(group: Iterable[Mapping[str, float]], name: str) -> str:
    ratios = [times[name] / times["ours"] for times in group if name in times]
    return f"{geometric_mean(ratios):.2f}" if ratios else "–"


def _variants(content: Row) -> str:
    lines = []
    for key, case in content["runs"][-1]["times"].items():
        times = {name: median(samples) for name, samples in case["samples_us"].items()}
        name, heads = key.split(" ", 1)
        variant = next((v for v in VARIANT_NAMES if v in times), None)
        if variant is not None:
            shown = (times["FA3"], times[variant], times["FA3"] / times[variant])
            old = times.get("rule, old reduction", times["rule"])
            lines.append([
                heads.strip("()").replace(", ", "/"), name, variant, f"{shown[0]:.0f}",
                f"{old:.0f}", f"{shown[1]:.0f}", f"{shown[2]:.2f}",
            ])  # fmt: skip
    about = wrapped(
        f"A later run on {content['gpu']}, medians in us. *Table's plan*: the rule behind the "
        "tables above. *lpt-free-nopin*: a Gluon kernel for prefills, checked in full with fp64; "
        "the committed form of it, which takes units from a queue, has not run on a GPU and is off "
        "([explanation](../explanation/serving.md#tall-tiles-on-hopper)). *n64s3 w4x2 u2*: the "
        f"rule for decodes now, with the parallel reduction. ({link(VARIANTS)})"
    )
    head = ("heads", "batch", "variant", "FA3", "table's plan", "variant's time", "FA3 / variant")
    return "\n\n".join(["## Variants of prefills and decodes", about, table(head, lines)])


def _gemm(content: Row) -> str:
    ratios = linear_ratios()
    lines = []
    for low, high in (*RANGES, (1, 4096)):
        values = [ratio for m, ratio in ratios if low <= m <= high]
        lines.append([
            f"{low} to {high}", str(len(values)), f"{geometric_mean(values):.4f}",
            f"{min(values):.3f}", f"{max(values):.3f}",
        ])  # fmt: skip
    head = ("M", "points", "F.linear / table", "least", "largest")
    about = wrapped(
        f"Eight linear layers of Llama-3-8B and Qwen2.5-7B in bf16 on {content['gpu']}, with the "
        "tables that `nostall serving tune --minutes 1.5` filled on the same GPU. Where the table "
        "has no faster row, F.linear runs. Points below 1 are within the noise or a loss of the "
        f"table. (`python -m benchmarks run serving.gemm`, {link(GEMM)})"
    )
    return f"## Linear layers over M\n\n{about}\n\n{table(head, lines)}"


def _engine(content: Row) -> str:
    lines = []
    for record in content["engines"]:
        for row in record["rounds"]:
            equal = row.get("equal_tokens")
            lines.append([
                record["engine"].partition(":")[0], str(record["speculate"]), row["workload"],
                f"{row['output_tokens_per_s']:,.0f}", f"{row['ttft_s']['p50'] * 1e3:.0f}",
                f"{row['ttft_s']['p99'] * 1e3:.0f}", f"{row['tbt_s']['p50'] * 1e3:.1f}",
                f"{row['tbt_s']['p99'] * 1e3:.1f}", "–" if equal is None else f"{equal:.0%}",
            ])  # fmt: skip
    head = ("back end", "speculated", "workload", "tokens/s", "TTFT p50, ms", "p99", "TBT p50, ms",
            "p99", "equal tokens")  # fmt: skip
    first = content["engines"][0]
    about = wrapped(
        f"vLLM {first['vllm']} on {first['gpu']}, CUDA graphs on, eight layers of the shape of "
        "Llama-3-8B with random weights, 300 requests a workload: slices of the Azure traces of "
        "2023 and generated lengths; all arrive at once, or at a rate (`@`). CUSTOM is the "
        "plug-in; in these runs it served all steps of decodes and of speculative tokens. Each row "
        "is one round. The GPUs of the machine had other work at the same time, and rounds of one "
        "engine differ by up to half: **no gain over FlashAttention is shown**, and with "
        "speculation the plug-in was slower in all workloads, so that by default it does not serve "
        "those steps. *Equal tokens*: share of the requests whose first 48 greedy tokens equal "
        f"FLASH_ATTN's. (`python -m benchmarks run serving.vllm_engine`, {link(ENGINE)})"
    )
    return f"## In vLLM\n\n{about}\n\n{table(head, lines)}"


def _simulated(content: Row) -> str:
    names = {
        "output_tokens_per_s": "tokens/s",
        "ttft_p50_s": "TTFT p50",
        "tbt_p50_s": "TBT p50",
        "steps": "steps",
    }
    lines = [
        [row["workload"], *(f"{row['error'][name]:+.1%}" for name in names)]
        for row in content["rows"]
    ]
    lines.append(["mean absolute error", *(f"{content['mean_error'][n]:.1%}" for n in names)])
    about = wrapped(
        "`nostall serving simulate` on the same requests, *modelled* from measured steps "
        f"([JSON](../../src/nostall/serving/simulate/{BUILT_IN.name})), over the mean of "
        "FLASH_ATTN's rounds "
        "above, minus one. The goal was a mean absolute error of 10 % or less for each figure. "
        "(`python -m benchmarks run serving.simulated_engine`, "
        f"{link(SIMULATED)})"
    )
    return f"## The simulated engine\n\n{about}\n\n{table(('workload', *names.values()), lines)}"
