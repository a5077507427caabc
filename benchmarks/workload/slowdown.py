"""Predicted and measured slow-down over several nodes, for the models that Pollux measured.

    NOSTALL_PUBLIC_DATA=DIR python -m benchmarks run workload.slowdown --out FILE

DIR/pollux/{bert,cifar10,ncf}/placements.csv are the files of petuum/adaptdl, branch
osdi21-artifact, sched/traces (Apache-2.0), measured on one to four nodes with four GPUs each.  The
placement 123 has one replica on the first node, two on the second and three on the third.

The compute time of a step is that of the same model on one node, with the same local batch and as
many GPUs as the fullest node of the step.  The network is fitted to the other models only.  Buckets
have the default size of PyTorch's DistributedDataParallel, on which Pollux builds.  The 90 %
interval is that of the ratio of measured to modelled times of the other models.  If DIR also has
imagenet, yolov3 and deepspeech2, a fit to the first three models predicts these as well.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from nostall.core.errors import BadInput
from nostall.workload.hardware.description import EfficiencyCurve
from nostall.workload.model.breakdown import ring_allreduce_bytes
from nostall.workload.model.slowdown import (
    BUCKET_BYTES,
    MeasuredStep,
    SlowdownModel,
    fit_slowdown,
    last_bucket_share,
)

ETHERNET = 6.25e9
"""Peak rate of the link of a node in bytes/s.  The nodes are g4dn.12xlarge: 50 Gb/s (AWS)."""

PARAMETERS = {
    "bert": 109_482_240,  # BERT-base, uncased
    "cifar10": 11_173_962,  # ResNet-18 with ten classes and a 3x3 stem
    "ncf": 1_602_657,  # NeuMF-end, 32 factors, three layers, MovieLens-1M (6,040 x 3,706)
}
"""Number of parameters, from the model definitions; all models exchange dense fp32 gradients."""

LATER_PARAMETERS = {
    "imagenet": 25_557_032,  # ResNet-50
    "yolov3": 61_626_049,  # Darknet-53 and three heads for the 20 classes of VOC
    "deepspeech2": 41_187_968,  # two convolutions, five bidirectional GRU of 800, 29 letters
}
"""Models that were not used to choose the first form of the fit.  The present form was chosen with
all six models."""


def read_steps(root: Path, model: str) -> list[MeasuredStep]:
    """The multi-node steps of a model for which :func:`_one_node_key` was measured, too."""
    with _placements_file(root, model).open(newline="") as file:
        rows = list(csv.DictReader(file))
    gradient_bytes = 4.0 * {**PARAMETERS, **LATER_PARAMETERS}[model]
    one_node_seconds = {
        (row["placement"], row["local_bsz"]): float(row["step_time"])
        for row in rows
        if len(row["placement"]) == 1
    }
    steps = []
    for row in rows:
        placement = row["placement"]
        one_node = _one_node_key(row)
        if len(placement) > 1 and one_node in one_node_seconds:
            steps.append(
                MeasuredStep(
                    group=model,
                    compute=one_node_seconds[one_node],
                    moved_bytes=ring_allreduce_bytes(len(placement), gradient_bytes),
                    seconds=float(row["step_time"]),
                    last_share=last_bucket_share(gradient_bytes, BUCKET_BYTES),
                    is_pair=len(placement) == 2,
                )
            )
    return steps


def _one_node_key(row: Mapping[str, str]) -> tuple[str, str]:
    """(placement, local batch) of the run on one node as full as the fullest node of ``row``."""
    return max(row["placement"]), row["local_bsz"]


def _placements_file(root: Path, model: str) -> Path:
    return root / "pollux" / model / "placements.csv"


def evaluate(steps: list[MeasuredStep], model: SlowdownModel) -> dict[str, Any]:
    """Errors of the predictions, and coverage of the 90 % interval if the model has a spread."""
    predicted = np.array([model.seconds(step) for step in steps])
    ratio = predicted / np.array([step.seconds for step in steps])
    record: dict[str, Any] = {
        "steps": len(steps),
        "mape": round(float(np.abs(ratio - 1).mean()), 4),
        "bias": round(float((ratio - 1).mean()), 4),
        "overhead_ms": round(model.curve.overhead * 1e3, 3),
        "share_of_peak": round(model.curve.share, 4),
        "hidden": round(model.hidden_share, 3),
        "pair_share": round(model.pair_share, 3),
    }
    if model.spread:
        intervals = [model.interval(step) for step in steps]
        is_inside = [
            low <= step.seconds <= high for step, (low, high) in zip(steps, intervals, strict=True)
        ]
        record["covered_by_90"] = round(float(np.mean(is_inside)), 4)
    return record


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    data = os.environ.get("NOSTALL_PUBLIC_DATA")
    if not data:
        raise BadInput("set NOSTALL_PUBLIC_DATA to the folder that contains pollux/")
    root = Path(data)
    first = {name: read_steps(root, name) for name in PARAMETERS}
    later = {
        name: read_steps(root, name)
        for name in LATER_PARAMETERS
        if _placements_file(root, name).exists()
    }
    flat = SlowdownModel(EfficiencyCurve(0.7), 0.0, ETHERNET)
    body: dict[str, Any] = {"leaving_one_of_three_out": evaluate_held_out(first, flat)}
    if later:
        fit = fit_slowdown([step for steps in first.values() for step in steps], ETHERNET)
        body["unseen"] = [_record(name, steps, flat, fit) for name, steps in later.items()]
        body["leaving_one_of_all_out"] = evaluate_held_out({**first, **later}, flat)
    summary = {name: _summary(records) for name, records in body.items()}
    print(summary)
    save(options.out, summary=summary, **body)


def evaluate_held_out(
    steps: Mapping[str, list[MeasuredStep]], flat: SlowdownModel
) -> list[dict[str, Any]]:
    """Evaluate each model with a fit to the other models."""
    records = []
    for name, held_out in steps.items():
        others = [step for other, some in steps.items() if other != name for step in some]
        records.append(_record(name, held_out, flat, fit_slowdown(others, ETHERNET)))
    return records


def _record(
    name: str, steps: list[MeasuredStep], flat: SlowdownModel, fit: SlowdownModel
) -> dict[str, Any]:
    record = {
        "model": name,
        "measured_slowdown_median": round(float(np.median([s.slowdown for s in steps])), 3),
        "flat_70_percent": evaluate(steps, flat),
        "fitted_on_others": evaluate(steps, fit),
    }
    print(record)
    return record


def _summary(records: list[dict[str, Any]]) -> dict[str, float]:
    """Mean errors over models, coverage over steps, number of models with 80 to 97 % coverage."""
    flat = [record["flat_70_percent"] for record in records]
    fitted = [record["fitted_on_others"] for record in records]
    num_steps = sum(f["steps"] for f in fitted)
    covered = sum(f["covered_by_90"] * f["steps"] for f in fitted)
    return {
        "flat_mape_mean": round(float(np.mean([f["mape"] for f in flat])), 4),
        "fitted_mape_mean": round(float(np.mean([f["mape"] for f in fitted])), 4),
        "fitted_mape_worst": max(f["mape"] for f in fitted),
        "covered_by_90": round(covered / num_steps, 4),
        "models_covered": sum(0.8 <= f["covered_by_90"] <= 0.97 for f in fitted),
    }
