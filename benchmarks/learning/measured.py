"""Section of the learning page: learning strategies compared with annealing, measured on a GPU.

The result file is written by
``python -m benchmarks run sass.suite --strategy anneal sip cuasmrl ppo ppo-trained``.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean, median

from benchmarks.harness.result_file import results
from benchmarks.harness.schema import Record
from benchmarks.harness.template import render

RESULT = results("learning") / "on_gpu.json.gz"
TRAINED = (
    "nostall train --corpus examples/nvcc --corpus examples/gemm_leakyrelu.py:gemm_leakyrelu "
    "--corpus examples/softmax.py:softmax --rollouts 60 --out learned"
)
"""The command that trained the policy from which ``ppo-trained`` starts."""


def measured(records: Sequence[Record]) -> str:
    """The section: deployed ratios by kernel and strategy, and the interval of each run."""
    strategies = list(dict.fromkeys(r.strategy for r in records))
    kernels = list(dict.fromkeys(r.kernel for r in records))
    seconds = sorted({round(r.details["search_s"]) for r in records if r.strategy == "anneal"})
    values = {
        "gpus": " and ".join(sorted({f"{r.gpu} (driver {r.driver})" for r in records})),
        "day": f"{max(r.date for r in records):%Y-%m-%d}",
        "seeds": len({r.seed for r in records}),
        "seconds": " or ".join(map(str, seconds)),
        "file": RESULT,
        "nulls": [abs(b - 1) for r in records for b in (r.null_low, r.null_high) if b],
        "trained": TRAINED,
        "strategies": [f"`{strategy}`" for strategy in strategies],
        "ratios": [[kernel, *_cells(records, kernel, strategies)] for kernel in kernels],
        "means": [_mean(records, strategy) for strategy in strategies],
        "candidates": [
            median(r.candidates for r in records if r.strategy == strategy)
            for strategy in strategies
        ],
        "runs": [[kernel, *(_runs(records, kernel, s) for s in strategies)] for kernel in kernels],
    }
    return render(__file__, values)


def _select(records: Sequence[Record], kernel: str, strategy: str) -> list[Record]:
    runs = [r for r in records if (r.kernel, r.strategy) == (kernel, strategy)]
    return sorted(runs, key=lambda r: r.seed)


def _median_ratio(records: Sequence[Record], kernel: str, strategy: str) -> float | None:
    runs = _select(records, kernel, strategy)
    return median(r.deployed_ratio for r in runs) if runs else None


def _cells(records: Sequence[Record], kernel: str, strategies: Sequence[str]) -> list[str]:
    median_ratios = {s: _median_ratio(records, kernel, s) for s in strategies}
    best = max(m for m in median_ratios.values() if m is not None)
    return [_cell(_select(records, kernel, s), median_ratios[s], best) for s in strategies]


def _cell(runs: Sequence[Record], median_ratio: float | None, best: float) -> str:
    if median_ratio is None:
        return "–"
    ratios = [r.deployed_ratio for r in runs]
    ratio = f"**{median_ratio:.4f}**" if median_ratio == best > 1 else f"{median_ratio:.4f}"
    return f"{ratio} ({min(ratios):.4f}–{max(ratios):.4f})"


def _mean(records: Sequence[Record], strategy: str) -> float:
    kernels = dict.fromkeys(r.kernel for r in records)
    medians = [_median_ratio(records, kernel, strategy) for kernel in kernels]
    return geometric_mean(m for m in medians if m is not None)


def _runs(records: Sequence[Record], kernel: str, strategy: str) -> str:
    runs = [
        f"{r.ratio:.4f} [{r.ci_low:.4f}, {r.ci_high:.4f}]" if r.ratio is not None else r.failure
        for r in _select(records, kernel, strategy)
    ]
    return "<br>".join(runs) or "–"
