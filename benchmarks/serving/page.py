"""Write ``docs/results/serving.md``: attention, linear layers and vLLM, as a GPU measured them.

python -m benchmarks page serving
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.serving.page_attention import attention, builders, checks
from nostall.core.files import write_atomically
from nostall.serving.simulate.step_costs import BUILT_IN

PAGE = PAGES / "serving.md"
FOLDER = results("serving")
GEMM = FOLDER / "gemm_h200.json.gz"
ENGINE = FOLDER / "vllm_engine.json"
SIMULATED = FOLDER / "simulated_engine.json"

Row = Mapping[str, Any]
RANGES = ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096))


def text() -> str:
    """The whole page."""
    return page(
        "Serving, measured",
        "python -m benchmarks page serving",
        [
            attention(),
            checks(),
            builders(),
            _gemm(load(GEMM)),
            _engine(load(ENGINE)),
            _simulated(load(SIMULATED)),
        ],
    )


def write() -> None:
    """Write the page."""
    write_atomically(PAGE, text().encode())


def linear_ratios() -> list[tuple[int, float]]:
    """(M, time of F.linear over that of the table) of each measured point."""
    return [
        (
            point["m"],
            median(point["samples_us"]["linear"]) / median(point["samples_us"]["deployed"]),
        )
        for point in load(GEMM)["points"]
    ]


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
