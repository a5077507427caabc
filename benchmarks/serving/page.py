"""Write ``docs/results/serving.md``: attention, linear layers and vLLM, as a GPU measured them.

python -m benchmarks page serving
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.serving.gemm import cliffs
from benchmarks.serving.pages.attention import attention, builders, checks
from benchmarks.serving.pages.engine import engines, forced_tokens, simulated
from benchmarks.serving.pages.native import native
from benchmarks.serving.pages.prefixes import RANGES, best_candidates, plan_search, prefixes
from benchmarks.serving.pages.rollouts import forests, rollouts
from nostall.core.files.atomic import write_atomically
from nostall.core.measurement import Comparison

PAGE = PAGES / "serving.md"
FOLDER = results("serving")
GEMM = FOLDER / "gemm_h200.json.gz"
GEMM_TP8 = FOLDER / "gemm_tp8_h200.json.gz"

Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    return page(
        "Serving, measured",
        "python -m benchmarks page serving",
        [
            attention(),
            prefixes(),
            forests(),
            plan_search(),
            native(),
            checks(),
            builders(),
            _gemm(),
            engines(),
            rollouts(),
            forced_tokens(),
            simulated(),
        ],
    )


def write() -> None:
    """Write the page."""
    write_atomically(PAGE, text().encode())


def linear_ratios(path: Path = GEMM) -> list[tuple[int, float]]:
    """(M, time of F.linear over that of the table) of each measured point."""
    return [
        (
            point["m"],
            median(point["samples_us"]["linear"]) / median(point["samples_us"]["deployed"]),
        )
        for point in load(path)["points"]
    ]


def _gemm() -> str:
    content, slices = load(GEMM), load(GEMM_TP8)
    about = wrapped(
        f"Eight linear layers of Llama-3-8B and Qwen2.5-7B in bf16 on {content['gpu']}, with the "
        "tables that `nostall serving tune --minutes 1.5` filled on the same GPU. Where the table "
        f"has no faster row, F.linear runs. {_slower(content)} "
        f"(`python -m benchmarks run serving.gemm`, {link(GEMM)})"
    )
    about_slices = wrapped(
        "The layers of one of eight tensor-parallel GPUs, for Llama-3-70B and Qwen2.5-72B, on "
        f"{slices['gpu']} with tables of `--ranks 8 --minutes 1`: in this time the tuner reaches "
        f"M = 24 to 64, and F.linear runs above. {_slower(slices)} ({link(GEMM_TP8)})"
    )
    cliffs_about = wrapped(
        f"Cliffs, where some M up to 15 % larger is more than 5 % faster: {_cliffs(content)} of "
        f"F.linear and the table on the eight layers, {_cliffs(slices)} on the slices. The table "
        "does not remove them: it takes M rounded up only where its own point is faster by more "
        "than the noise."
    )
    parts = ["## Linear layers over M", about, _ranges(linear_ratios())]
    parts += [about_slices, _ranges(linear_ratios(GEMM_TP8)), cliffs_about, best_candidates()]
    return "\n\n".join(parts)


def _slower(content: Row) -> str:
    """How many points are slower than F.linear beyond the interval and the null."""
    slower = [
        (point, compared.ratio)
        for point in content["points"]
        if (compared := _compared(point)).verdict == "slower"
    ]
    count = f"{len(slower)} of {len(content['points'])} points are slower than F.linear beyond "
    if not slower:
        return f"{count}their interval and the null."
    own = [ratio for point, ratio in slower if point["entry"] != "Cublas"]
    plain = [ratio for point, ratio in slower if point["entry"] == "Cublas"]
    parts = [f"{len(plain)} of these run F.linear itself (least {min(plain):.3f})"] if plain else []
    parts += [f"{len(own)} run another kernel (least {min(own):.3f})"] if own else []
    return f"{count}their interval and the null: {', '.join(parts)}."


def _compared(point: Row) -> Comparison:
    samples = point["samples_us"]
    return Comparison.from_samples(
        samples["linear"], samples["deployed"], samples["null"], kind="measured", resamples=500
    )


def _ranges(ratios: Sequence[tuple[int, float]]) -> str:
    lines = []
    for low, high in (*RANGES, (1, 4096)):
        values = [ratio for m, ratio in ratios if low <= m <= high]
        lines.append([
            f"{low} to {high}", str(len(values)), f"{geometric_mean(values):.4f}",
            f"{min(values):.3f}", f"{max(values):.3f}",
        ])  # fmt: skip
    return table(("M", "points", "F.linear / table", "least", "largest"), lines)


def _cliffs(content: Row) -> str:
    counts = [len(cliffs(content["points"], what)) for what in ("linear", "deployed")]
    return f"{counts[0]} and {counts[1]} of {len(content['points'])} points"
