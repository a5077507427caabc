"""Fit of efficiencies to the measurements of ``benchmarks.workload.gpu``, and prediction errors.

    python -m benchmarks run workload.fit benchmarks/workload/results/gpu.json \\
        --out benchmarks/workload/results/fit.json --preset h200-measured \\
        --ranks tests/unit/workload/h200/ddp_rank?.json.gz

The efficiencies are fitted to single operators, copies and AllReduces, and can be written as a
hardware preset.  The steps of whole models are predicted from their modules and compared with their
profiles; nothing is fitted to them.  The traces of all ranks separate the transfer of a collective
from waiting for the other ranks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.workload.feature_records import from_record
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_atomically
from nostall.workload import Architecture, Hardware, Job, load_hardware, model_step
from nostall.workload.hardware.description import EfficiencyCurve, OperatorTimeModel
from nostall.workload.jobs.record import Operator, OperatorKind, Resource
from nostall.workload.model.breakdown import ring_allreduce_bytes
from nostall.workload.modules import job_from_features
from nostall.workload.timeline.collectives import match_collectives
from nostall.workload.traces.ranks import read_ranks

BASE = "h200-dgx"
"""Preset whose rates the fitted hardware has."""
PRECISION = "bf16"
BUCKET_BYTES = 25 * 2**20
"""Default bucket size of DistributedDataParallel."""
MAX_OTHER_KINDS = 0.1
"""Cases with a larger share of bytes from operators of another kind are not fitted."""
PARTS = ("data", "compute", "memory")


@dataclass(frozen=True, slots=True)
class EfficiencyFit:
    """A curve fitted to measurements, and its relative errors on them."""

    curve: EfficiencyCurve
    mean_error: float
    worst_error: float
    points: int
    """Number of measurements."""


def fit_efficiency(
    amounts: Sequence[float], seconds: Sequence[float], peak: float
) -> EfficiencyFit:
    """Fit overhead and share to measured (amount, seconds) pairs by relative least squares.

    Errors are relative because measurements span decades and their noise grows with them.  If the
    unconstrained optimum has overhead < 0 or share > 1, the best point on those boundaries is used.
    Raises :class:`~nostall.core.errors.BadInput` for fewer than two different amounts, or values
    that are not positive.
    """
    size = np.asarray(amounts, dtype=np.float64)
    time = np.asarray(seconds, dtype=np.float64)
    if size.shape != time.shape or len(np.unique(size)) < 2:
        raise BadInput(
            f"cannot fit an efficiency to {size.size} amounts and {time.size} times; needed are "
            "equal numbers of both and at least two different amounts; measure more sizes"
        )
    if not (np.all(size > 0) and np.all(time > 0) and np.all(np.isfinite(size + time))):
        raise BadInput(
            "cannot fit an efficiency to amounts or times that are not positive numbers; remove "
            "those measurements"
        )
    best = min(
        _boundary_optima(size, time, peak), key=lambda c: _squared_error(c, size, time, peak)
    )
    errors = np.abs(_seconds(best, size, peak) / time - 1)
    return EfficiencyFit(best, float(errors.mean()), float(errors.max()), len(size))


def _boundary_optima(size: np.ndarray, time: np.ndarray, peak: float) -> list[EfficiencyCurve]:
    """The unconstrained optimum if it is valid, and the optima on both boundaries."""
    rows = np.stack([1 / time, size / time], axis=1)
    overhead, slope = np.linalg.lstsq(rows, np.ones(len(size)), rcond=None)[0]
    curves = []
    if overhead >= 0 and slope * peak >= 1:
        curves.append(EfficiencyCurve(float(1 / (slope * peak)), float(overhead)))
    relative_size = size / time
    slope_without_overhead = float(relative_size.sum() / (relative_size**2).sum())
    curves.append(EfficiencyCurve(min(1.0, 1 / (slope_without_overhead * peak))))
    inverse_time = 1 / time
    rest = 1 - relative_size / peak
    overhead_at_peak = float((inverse_time * rest).sum() / (inverse_time**2).sum())
    curves.append(EfficiencyCurve(1.0, max(0.0, overhead_at_peak)))
    return curves


def _seconds(curve: EfficiencyCurve, size: np.ndarray, peak: float) -> np.ndarray:
    return curve.overhead + size / (curve.share * peak)


def _squared_error(
    curve: EfficiencyCurve, size: np.ndarray, time: np.ndarray, peak: float
) -> float:
    return float(((_seconds(curve, size, peak) / time - 1) ** 2).sum())


@dataclass(frozen=True, slots=True)
class OperatorTimeFit:
    """A time model fitted to measured calls, and its relative errors on them."""

    time_model: OperatorTimeModel
    mean_error: float
    worst_error: float
    points: int
    """Number of measurements."""


def fit_operator_time(
    operators: Sequence[Operator], seconds: Sequence[float], peak_flops: float, peak_memory: float
) -> OperatorTimeFit:
    """Fit the time model of one operator kind by relative least squares with factors >= 0.

    Errors are relative because sizes span decades.  The optimum with factors >= 0 is the
    unconstrained optimum of a subset of the factors, so all seven subsets are tried.  Raises
    :class:`~nostall.core.errors.BadInput` for fewer than two different operators, or times that are
    not positive.
    """
    time = np.asarray(seconds, dtype=np.float64)
    rows = np.array(
        [[o.calls, o.flops / peak_flops, o.bytes_moved / peak_memory] for o in operators],
        dtype=np.float64,
    ).reshape(-1, 3)
    if len(rows) != len(time) or len(np.unique(rows, axis=0)) < 2:
        raise BadInput(
            f"cannot fit a time model to {len(rows)} operators and {len(time)} times; needed are "
            "equal numbers of both and at least two different operators; measure more sizes"
        )
    if not (np.all(time > 0) and np.all(np.isfinite(time))):
        raise BadInput(
            "cannot fit a time model to times that are not positive numbers; remove those "
            "measurements"
        )
    relative = rows / time[:, None]
    best = min(_subset_optima(relative), key=lambda c: float(((relative @ c - 1) ** 2).sum()))
    errors = np.abs(relative @ best - 1)
    time_model = OperatorTimeModel(*(float(v) for v in best))
    return OperatorTimeFit(time_model, float(errors.mean()), float(errors.max()), len(time))


def _subset_optima(relative: np.ndarray) -> list[np.ndarray]:
    """The unconstrained optimum of each subset of factors, if all of its factors are >= 0."""
    used = [column for column in range(3) if relative[:, column].any()]
    candidates = []
    for count in range(1, len(used) + 1):
        for subset in map(list, combinations(used, count)):
            values = np.linalg.lstsq(relative[:, subset], np.ones(len(relative)), rcond=None)[0]
            if (values >= 0).all():
                factors = np.zeros(3)
                factors[subset] = values
                candidates.append(factors)
    return candidates


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("measured", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", help="write a preset of this name to the package")
    parser.add_argument(
        "--ranks", type=Path, nargs="*", help="traces of one step of a model, one per rank"
    )


def main(options: argparse.Namespace) -> None:
    body = json.loads(options.measured.read_text())
    measured = {name: part for name, part in body["steps"].items() if "failed" not in part}
    failed = {name: part["failed"] for name, part in body["steps"].items() if "failed" in part}
    flat = load_hardware(BASE)
    operator_fits = fit_operators(measured["operators"]["operators"], flat)
    link_fits = fit_links(measured, flat)
    fitted = with_fits(flat, operator_fits, link_fits)
    models = [
        compare_step(part, flat, fitted, measured.get(f"counters {part['model']}"))
        for name, part in measured.items()
        if name.startswith("model ")
    ]
    ranks = measured.get("ranks", {"models": [], "world": 1})
    exchanges = [compare_exchange(m, ranks["world"], flat, fitted) for m in ranks["models"]]
    all_ranks = compare_transfer(options.ranks, fitted) if options.ranks else None
    if options.preset:
        date, device = body["date"][:10], body["about"]["device"]
        source = f"fitted to {options.measured.name} ({date}, {device})"
        write_preset(options.preset, fitted, tuple(link_fits), source)
    save(
        options.out,
        about=body["about"],
        measured_on=body["date"],
        failed=failed,
        operators={kind.value: _operator_record(fit) for kind, fit in operator_fits.items()},
        links={resource.value: _link_record(fit) for resource, fit in link_fits.items()},
        models=models,
        exchanged=exchanges,
        **({"all_ranks": all_ranks} if all_ranks else {}),
    )
    print_errors(models, exchanges)
    print(all_ranks)


def fit_operators(
    records: Sequence[Mapping[str, Any]], hardware: Hardware
) -> dict[OperatorKind, OperatorTimeFit]:
    """A time model for each kind of operator that was measured."""
    fits = {}
    for kind in OperatorKind:
        rows = [
            r for r in records if r["kind"] == kind and r["share_of_other_kinds"] <= MAX_OTHER_KINDS
        ]
        if len(rows) < 2:
            continue
        fits[kind] = fit_operator_time(
            [Operator(kind, r["case"], r["calls"], r["flops"], r["bytes"]) for r in rows],
            [r["seconds"] for r in rows],
            hardware.rate(Resource.COMPUTE, PRECISION),
            hardware.memory,
        )
    return fits


def fit_links(measured: Mapping[str, Any], hardware: Hardware) -> dict[Resource, EfficiencyFit]:
    """Efficiency of PCIe from copies to the GPU, and of NVLink from AllReduces if measured."""
    copies = measured["operators"]["copies_to_gpu"]
    sizes, seconds = [c["bytes"] for c in copies], [c["seconds"] for c in copies]
    fits = {Resource.PCIE: fit_efficiency(sizes, seconds, hardware.pcie)}
    if "ranks" in measured:
        ranks = measured["ranks"]
        moved = [ring_allreduce_bytes(ranks["world"], r["bytes"]) for r in ranks["allreduce"]]
        seconds = [r["seconds"] for r in ranks["allreduce"]]
        fits[Resource.NVLINK] = fit_efficiency(moved, seconds, hardware.nvlink)
    return fits


def with_fits(
    hardware: Hardware,
    operator_fits: Mapping[OperatorKind, OperatorTimeFit],
    link_fits: Mapping[Resource, EfficiencyFit],
) -> Hardware:
    """A copy of ``hardware`` with the fitted efficiencies."""
    curves = {resource: fit.curve for resource, fit in link_fits.items()}
    return replace(
        hardware,
        operators={kind: fit.time_model for kind, fit in operator_fits.items()},
        efficiency={**hardware.efficiency, **curves},
    )


def compare_step(
    measured: Mapping[str, Any],
    flat: Hardware,
    fitted: Hardware,
    counters: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The predicted step of a model, compared with its profile and its wall-clock time."""
    features = from_record(measured["described"])
    job = job_from_features(
        features, measured["model"], Architecture.SINGLE, batch=measured["samples"]
    )
    parts = measured["measured"]["parts_seconds"]
    step_seconds = median(measured["seconds"])
    result: dict[str, Any] = {
        "model": measured["model"],
        "measured_ms": {**{p: _ms(parts[p]) for p in PARTS}, "step": _ms(step_seconds)},
        "idle_ms": _ms(sum(v for k, v in parts.items() if k.startswith("idle"))),
        "torch_kernel_ms": _ms(measured["measured"]["torch_device_seconds"]),
    }
    for name, hardware in (("flat", flat), ("fitted", fitted)):
        step = model_step(job, hardware)
        result[f"{name}_ms"] = {**{p: _ms(step.part(p)) for p in PARTS}, "step": _ms(step.total)}
        result[f"{name}_error"] = {
            **{p: _error(step.part(p), parts[p]) for p in PARTS},
            "step": _error(step.total, step_seconds),
        }
    if counters is not None:
        feature_bytes = {"compute": features.product_bytes, "memory": features.memory_bytes}
        result |= _compare_bytes(feature_bytes, counters["kinds"])
    return result


def _compare_bytes(
    feature_bytes: Mapping[str, float], counters: Mapping[str, Any]
) -> dict[str, Any]:
    """Bytes of the module features, compared with the DRAM bytes that ncu counts."""
    counted = {k: counters.get(k, {"bytes": 0.0, "seconds": 0.0}) for k in ("compute", "memory")}
    return {
        "dram_gigabytes": {k: round(v["bytes"] / 1e9, 3) for k, v in counted.items()},
        "ncu_ms": {k: _ms(v["seconds"]) for k, v in counted.items()},
        "described_gigabytes": {k: round(v / 1e9, 3) for k, v in feature_bytes.items()},
        "bytes_error": {k: _error(feature_bytes[k], v["bytes"]) for k, v in counted.items()},
    }


def compare_exchange(
    measured: Mapping[str, Any], world_size: int, flat: Hardware, fitted: Hardware
) -> dict[str, Any]:
    """Predicted and measured seconds of the gradient exchange, summed over buckets.

    Overlap with computation is not subtracted.
    """
    features = from_record(measured["described"])
    # DistributedDataParallel exchanges the gradients of whole embedding tables.
    gradient_bytes = features.dense_bytes + features.embedding_bytes
    buckets = max(1, -(-int(gradient_bytes) // BUCKET_BYTES))
    bucket_job = Job(
        measured["model"],
        Architecture.ALLREDUCE_LOCAL,
        replicas=world_size,
        flops=1.0,
        dense_bytes=gradient_bytes / buckets,
        precision=PRECISION,
    )
    seconds = measured["measured"]["communication_seconds"]
    result = {
        "model": measured["model"],
        "gradients_mb": round(gradient_bytes / 1e6, 1),
        "buckets": buckets,
    }
    for name, hardware in (("flat", flat), ("fitted", fitted)):
        predicted = buckets * model_step(bucket_job, hardware).weights
        result |= {f"{name}_ms": _ms(predicted), f"{name}_error": _error(predicted, seconds)}
    exposed = measured["measured"]["parts_seconds"]["weights"]
    return {**result, "measured_ms": _ms(seconds), "measured_exposed_ms": _ms(exposed)}


def compare_transfer(paths: Sequence[Path], fitted: Hardware) -> dict[str, Any]:
    """Predicted and measured transfer time of the AllReduces of one step, without waiting."""
    collectives, _ = match_collectives(read_ranks(paths).recordings)
    all_reduces = [c for c in collectives if "AllReduce" in c.name]
    world_size = len(paths)
    nvlink = fitted.curve(Resource.NVLINK)
    predicted = sum(
        nvlink.seconds(ring_allreduce_bytes(world_size, c.message_bytes), fitted.nvlink)
        for c in all_reduces
    )
    transfer = sum(c.transfer for c in all_reduces)
    ranks = range(world_size)
    return {
        "traces": [path.name for path in paths],
        "buckets_mb": [round(c.message_bytes / 1e6, 2) for c in all_reduces],
        "rank_ms": [_ms(sum(c.seconds[rank] for c in all_reduces)) for rank in ranks],
        "waited_ms": [_ms(sum(c.waits[rank] for c in all_reduces)) for rank in ranks],
        "transfer_ms": _ms(transfer),
        "fitted_ms": _ms(predicted),
        "fitted_error": _error(predicted, transfer),
    }


def write_preset(name: str, fitted: Hardware, links: Sequence[Resource], source: str) -> None:
    """Write the fitted hardware to the presets of the package."""
    folder = resources.files("nostall.workload.hardware").joinpath("presets")
    base = folder.joinpath(f"{BASE}.toml").read_text()
    text = preset_text(base, name, fitted, links, source)
    write_atomically(Path(str(folder)) / f"{name}.toml", text.encode())


def preset_text(
    base: str, name: str, fitted: Hardware, links: Sequence[Resource], source: str
) -> str:
    """The text of a hardware file: the rates of the file ``base`` with fitted efficiencies."""
    lines = []
    link_names = ", ".join(links)
    for line in base.splitlines():
        if line.startswith("name ="):
            line = f'name = "{name}"'
        elif line.startswith("efficiency ="):
            lines.append(f'operators = "{source}, in bf16"')
            line = f'efficiency = "{link_names}: {source}; others: flat 70 %"'
        lines.append(line)
    for resource in links:
        curve = fitted.curve(resource)
        lines += ["", f"[efficiency.{resource}]", f"share = {curve.share:.4g}"]
        lines.append(f'overhead = "{curve.overhead:.3e} s"')
    for kind, factors in fitted.operators.items():
        lines += ["", f"[operators.{kind}]", f'overhead = "{factors.overhead:.3e} s"']
        lines += [f"compute = {factors.compute:.4g}", f"memory = {factors.memory:.4g}"]
    return "\n".join(lines) + "\n"


def print_errors(
    models: Sequence[Mapping[str, Any]], exchanges: Sequence[Mapping[str, Any]]
) -> None:
    for model in models:
        name = model["model"]
        for part in (*PARTS, "step"):
            predictions = (
                f"{k} {model[f'{k}_ms'][part]:9.3f} ({_percent(model[f'{k}_error'][part])})"
                for k in ("flat", "fitted")
            )
            measured_ms = model["measured_ms"][part]
            print(f"{name:8}{part:9} measured {measured_ms:9.3f} ms, {', '.join(predictions)}")
        if "bytes_error" in model:
            print(f"{name:8}bytes", {k: _percent(v) for k, v in model["bytes_error"].items()})
    for exchange in exchanges:
        print(exchange)


def _operator_record(fit: OperatorTimeFit) -> dict[str, Any]:
    factors = fit.time_model
    values = {"overhead": factors.overhead, "compute": factors.compute, "memory": factors.memory}
    return _fit_record(values, fit)


def _link_record(fit: EfficiencyFit) -> dict[str, Any]:
    return _fit_record({"share": fit.curve.share, "overhead": fit.curve.overhead}, fit)


def _fit_record(
    values: Mapping[str, float], fit: EfficiencyFit | OperatorTimeFit
) -> dict[str, Any]:
    rounded = {name: float(f"{value:.5g}") for name, value in values.items()}
    errors = {"mean_error": round(fit.mean_error, 4), "worst_error": round(fit.worst_error, 4)}
    return {**rounded, **errors, "points": fit.points}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _error(predicted: float, measured: float) -> float | None:
    return round(predicted / measured - 1, 4) if measured > 0 else None


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:+.1%}"
