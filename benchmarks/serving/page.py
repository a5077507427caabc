"""``docs/results/serving.md``: attention, linear layers and vLLM, as a GPU measured them.

python -m benchmarks page serving
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render_page, source
from benchmarks.serving.gemm import cliffs
from benchmarks.serving.pages.attention import attention, builders, checks
from benchmarks.serving.pages.engine import engines, forced_tokens, simulated
from benchmarks.serving.pages.native import native
from benchmarks.serving.pages.prefixes import RANGES, best_candidates, plan_search, prefixes
from benchmarks.serving.pages.rollouts import fixed_cost, forests, rollouts
from nostall.core.measurement import Comparison

PAGE = PAGES / "serving.md"
FOLDER = results("serving")
GEMM = FOLDER / "gemm_h200.json.gz"
GEMM_TP8 = FOLDER / "gemm_tp8_h200.json.gz"

Row = Mapping[str, Any]
_SECTIONS = (
    attention, prefixes, forests, fixed_cost, plan_search, native, checks, builders,
    best_candidates, engines, rollouts, forced_tokens, simulated,
)  # fmt: skip


def text() -> str:
    """The whole page."""
    values = {section.__name__: section() for section in _SECTIONS}
    tables = {"gemm": _gemm(GEMM), "slices": _gemm(GEMM_TP8)}
    return render_page(__file__, PAGE, values | tables)


def linear_ratios(path: Path = GEMM) -> list[tuple[int, float]]:
    """(M, time of F.linear over that of the table) of each measured point."""
    return [(point["m"], _over_table(point)) for point in load(path)["points"]]


def _over_table(point: Row) -> float:
    times_us = point["samples_us"]
    return median(times_us["linear"]) / median(times_us["deployed"])


def _gemm(path: Path) -> Row:
    """A file of linear layers, with the ratios by range of M."""
    content = source(path)
    points = content["points"]
    ranges = []
    for low, high in (*RANGES, (1, 4096)):
        values = [_over_table(point) for point in points if low <= point["m"] <= high]
        ranges.append({"low": low, "high": high, "ratios": values})
    return {
        **content,
        "slower": _slower(points),
        "ranges": ranges,
        "cliffs": [len(cliffs(points, what)) for what in ("linear", "deployed")],
    }


def _slower(points: Iterable[Row]) -> str:
    """How many points are slower than F.linear beyond the interval and the null."""
    found = [(point, _compared(point)) for point in points]
    slower = [(point, beside.ratio) for point, beside in found if beside.verdict == "slower"]
    count = f"{len(slower)} of {len(found)} points are slower than F.linear beyond "
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
