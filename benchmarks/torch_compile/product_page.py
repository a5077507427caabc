"""The section of ``docs/results/fusion-unseen.md`` on kernels of matrix products."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.template import render, source
from nostall.attach.torch_compile.measure.product_comparison import LEAST_GAIN
from nostall.core.measurement import Comparison


def section(path: Path, reducing_path: Path) -> str:
    """The section; ``reducing_path``: kernels that also reduce, which may not be measured."""
    text = render(__file__, _values(path))
    if not reducing_path.exists():
        return f"{text}\n\n{render(__file__, {}, 'not measured')}"
    return f"{text}\n\n{render(__file__, _values(reducing_path), 'reductions')}"


def _values(path: Path) -> dict[str, Any]:
    record = source(path)
    rows = [row(each) for each in record["products"] if "failed" not in each]
    failed = len(record["products"]) - len(rows)
    return {
        **record,
        "least_gain": LEAST_GAIN,
        "faster": sum(each["found"].low >= LEAST_GAIN for each in rows),
        "measured": rows,
        "missed": f"; {failed} failed" if failed else "",
    }


def row(each: Mapping[str, Any]) -> dict[str, Any]:
    """A product: the kernel beside cuBLAS with Inductor's kernels."""
    size, _, readers = each["product"].partition(" with ")
    notes = (note for note in each["configurations"] if note.endswith(" us"))
    fastest = next(notes).removeprefix("product ").rpartition(":")[0].split(", ")
    return {
        "size": size.replace(" bfloat16", ""),
        "readers": readers,
        "layers": [f"{name} ({count})" for name, count in each["models"].items()],
        "found": _compare(each["replayed"]),
        "looped": _compare(each["looped"]),
        "times": {name: statistics.median(times) for name, times in each["replayed"].items()},
        "fastest": [part for part in fastest if not part.startswith("groups")],
    }


def _compare(samples: Mapping[str, Any]) -> Comparison:
    return Comparison.from_samples(
        samples["inductor"], samples["product"], samples["null"], kind="measured"
    )
