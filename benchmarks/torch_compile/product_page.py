"""The section of ``docs/results/fusion-unseen.md`` on kernels of matrix products."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load
from nostall.attach.torch_compile.measure.product_comparison import LEAST_GAIN
from nostall.core.measurement import Comparison

HEAD = [
    "rows x columns x depth",
    "readers",
    "models (layers)",
    "ratio",
    "in a loop",
    "Inductor, us",
    "kernel, us",
    "products alone, us",
    "fastest tile",
]


def sections(path: Path) -> list[str]:
    """The section; empty without results."""
    if not path.exists():
        return []
    record = load(path)
    measured = [each for each in record["products"] if "failed" not in each]
    faster = [each for each in measured if compare(each, "replayed").low >= LEAST_GAIN]
    failed = len(record["products"]) - len(measured)
    missed = f"; {failed} failed" if failed else ""
    text = (
        f"`python -m benchmarks run torch_compile.product_kernels` on {record['gpu']}, PyTorch "
        f"{record['torch']}, {record['date'][:10]} ({link(path)}). Products of the user models "
        "with the elementwise operators that read them. A ratio is the time of cuBLAS with "
        "Inductor's kernels over that of one Triton kernel, as replayed CUDA graphs, interleaved. "
        "Both versions contain the operators behind them that Inductor fuses. *Products alone*: "
        "cuBLAS without the readers. The backend inserts a kernel whose interval is above "
        f"{LEAST_GAIN}: {len(faster)} of the {len(measured)} products below, of "
        f"{record['distinct']} distinct ones in the traced models{missed}. Those that could save "
        "the most bytes were measured first."
    )
    return ["## Matrix products with their readers", wrapped(text), table(HEAD, map(row, measured))]


def compare(each: Mapping[str, Any], how: str) -> Comparison:
    """The kernel beside cuBLAS with Inductor's kernels."""
    samples = each[how]
    return Comparison.from_samples(
        samples["inductor"], samples["product"], samples["null"], kind="measured"
    )


def row(each: Mapping[str, Any]) -> list[str]:
    """The cells of one product."""
    size, _, readers = each["product"].partition(" with ")
    found, looped = compare(each, "replayed"), compare(each, "looped")
    times = {name: 1e6 * statistics.median(values) for name, values in each["replayed"].items()}
    notes = (note for note in each["configurations"] if note.endswith(" us"))
    fastest = next(notes).removeprefix("product ").rpartition(":")[0].split(", ")
    return [
        size.replace(" bfloat16", ""),
        readers,
        ", ".join(f"{name} ({count})" for name, count in each["models"].items()),
        f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]",
        f"{looped.ratio:.3f}",
        *(f"{times[name]:.0f}" for name in ("inductor", "product", "cublas alone")),
        ", ".join(part for part in fastest if not part.startswith("groups")),
    ]
