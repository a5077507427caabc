"""What does SmoothGEMM gain over F.linear, and how near is it to the best of all candidates?

    python -m benchmarks run serving.gemm --out FILE --budget-s 560 --tables FILE ...

For each layer and M, F.linear, its null and the deployed table are measured in one interleaved
series of CUDA graphs, with rotating weights. ``--best`` measures all candidates too (24 proposals
of cuBLASLt, Triton configurations, M rounded up). Tables come from ``nostall serving tune``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from nostall.core.measurement import Comparison
from nostall.serving.gemm.config import LinearShape, candidates
from nostall.serving.gemm.layers import MODELS
from nostall.serving.gemm.table import Cublas, Entry, GemmTable, LtAlgorithm, Padded, load_tables

ROWS = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 19, 23, 24, 27, 31, 32, 33, 40, 47, 48, 56, 63,
    64, 65, 72, 80, 95, 96, 97, 112, 127, 128, 129, 144, 161, 192, 193, 224, 255, 256, 257, 272,
    321, 384, 385, 448, 511, 512, 513, 640, 769, 896, 1023, 1024, 1025, 1537, 2047, 2048, 2049,
    3071, 4096,
)  # fmt: skip
"""The Ms: 65, of which 34 are odd."""
CLIFF_REACH, CLIFF = 1.15, 1.05
"""A cliff: some M up to 15 % larger is more than 5 % faster."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--tables", type=Path, nargs="*", default=[], help="tables of `tune`")
    parser.add_argument("--models", default="llama3-8b,qwen2.5-7b",
                        help="separated by commas; NAME:RANKS for one of RANKS GPUs")  # fmt: skip
    parser.add_argument("--point-s", type=float, default=0.15, help="seconds of one M")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="Ms, with commas")
    parser.add_argument("--budget-s", type=float, default=560.0, help="seconds in all")
    parser.add_argument("--best", action="store_true", help="measure all candidates too")


def main(options: argparse.Namespace) -> int:
    """Measure all layers; prints geometric means; returns 1 if there is no result."""
    from nostall.serving.errors import current_gpu
    from nostall.serving.gemm.gpu_layer import GpuLayer, library_versions
    from nostall.serving.gemm.linear import Scratch

    gpu, versions = current_gpu(), library_versions()
    tables: dict[LinearShape, GemmTable] = {}
    for path in options.tables:
        tables |= load_tables(path, gpu, versions)
    rows = [int(word) for word in options.rows.split(",")]
    layers = layers_of(options.models.split(","))
    end = time.monotonic() + options.budget_s
    scratch, points = Scratch.on("cuda"), []
    for index, (name, shape) in enumerate(layers.items()):
        until = time.monotonic() + (end - time.monotonic()) / (len(layers) - index)
        layer = GpuLayer.of(shape, max(rows), scratch)
        for m in rows:
            if time.monotonic() > until:
                print(f"out of time at {name} M={m}")
                break
            entry = tables[shape].entry(m) if shape in tables else Cublas()
            points.append({"layer": name, "m": m, **_point(layer, entry, m, options)})
        save(options.out, gpu=gpu, library_versions=versions, points=points)
    print(table(points))
    return 0 if points else 1


def layers_of(models: list[str]) -> dict[str, LinearShape]:
    """The layers of models, by name; ``NAME:RANKS`` names one of so many tensor-parallel GPUs."""
    layers = {}
    for word in models:
        model, _, ranks = word.partition(":")
        for name, shape in MODELS[model].layers(int(ranks or 1)).items():
            layers[f"{word}.{name}"] = shape
    return layers


def _point(layer: Any, entry: Entry, m: int, options: argparse.Namespace) -> dict[str, Any]:
    """Samples of one layer and M in microseconds; ``best`` is the fastest of all candidates."""
    from nostall.gpu.clock import ReplayClock

    clock = ReplayClock()
    copies = len(layer.weights)
    runs = [layer.run(Cublas(), m), layer.run(entry, m), layer.run(Cublas(), m)]
    samples = clock.samples("", runs, options.point_s)
    if entry == Cublas():
        # The same code: what a second capture of it differs by is noise, and is kept as null.
        samples = [samples[0], samples[0], samples[1]]
    names = ("linear", "deployed", "null")
    point: dict[str, Any] = {
        "entry": type(entry).__name__,
        "samples_us": {
            name: [1e6 * value / copies for value in values]
            for name, values in zip(names, samples, strict=True)
        },
    }
    if options.best:
        point["best"] = _best(layer, m)
    return point


def _best(layer: Any, m: int) -> dict[str, Any]:
    """The fastest candidate of one M, and its ratio to F.linear in the same series."""
    from nostall.gpu.clock import ReplayClock

    entries: list[Entry] = [Padded(multiple) for multiple in (8, 16, 64) if m % multiple]
    entries += [LtAlgorithm(algorithm) for algorithm in layer.algorithms(m)]
    entries += list(candidates(m, layer.shape, layer.sms)) if m <= 256 else []
    best, kind = 1.0, "Cublas"
    for start in range(0, len(entries), 8):
        runs = [layer.run(Cublas(), m)]
        kept = []
        for entry in entries[start : start + 8]:
            try:
                runs.append(layer.run(entry, m))
                kept.append(entry)
            except Exception as error:  # a candidate that cannot run here is not the best
                print(f"{entry} cannot run: {str(error)[:100]}")
        samples = ReplayClock().samples("", runs, 0.02 * len(runs))
        base = statistics.median(samples[0])
        for entry, values in zip(kept, samples[1:], strict=True):
            ratio = statistics.median(values) / base
            if ratio < best:
                best, kind = ratio, type(entry).__name__
    return {"ratio": best, "kind": kind}


def comparison(point: dict[str, Any]) -> Comparison:
    """F.linear against the deployed entry, with the null."""
    samples = point["samples_us"]
    return Comparison.from_samples(
        samples["linear"], samples["deployed"], samples["null"], kind="measured"
    )


def cliffs(points: list[dict[str, Any]], what: str) -> list[tuple[float, str, int]]:
    """Points for which a larger M of the same layer is more than 5 % faster."""
    found = []
    for point in points:
        time_us = statistics.median(point["samples_us"][what])
        larger = [
            statistics.median(other["samples_us"][what])
            for other in points
            if other["layer"] == point["layer"]
            and point["m"] < other["m"] <= point["m"] * CLIFF_REACH + 2
        ]
        if larger and time_us > CLIFF * min(larger):
            found.append((time_us / min(larger), point["layer"], point["m"]))
    return sorted(found, reverse=True)


def table(points: list[dict[str, Any]]) -> str:
    """Geometric means by range of M, the slowest points, and cliffs."""
    lines = []
    ratios = [(point, comparison(point)) for point in points]
    for low, high in ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096), (1, 4096)):
        chosen = [(p, c) for p, c in ratios if low <= p["m"] <= high]
        if not chosen:
            continue
        mean = math.exp(statistics.fmean(math.log(c.ratio) for _, c in chosen))
        slower = sum(c.verdict == "slower" for _, c in chosen)
        text = f"M {low:4}-{high:4}: {mean:.4f} x F.linear, {len(chosen)} points, {slower} slower"
        best = [1 / p["best"]["ratio"] for p, _ in chosen if "best" in p]
        if best:
            text += f"; best candidate {math.exp(statistics.fmean(map(math.log, best))):.4f} x"
        lines.append(text)
    for what in ("linear", "deployed"):
        found = cliffs(points, what)
        worst = ", ".join(f"{layer} M={m} {ratio:.2f}" for ratio, layer, m in found[:4])
        lines.append(f"cliffs of {what}: {len(found)} of {len(points)}; {worst}")
    return "\n".join(lines)
