"""Kinds of kernels by launch parameters and time, names removed, one kind of model left out.

    python -m benchmarks run learners.kernels --out benchmarks/learners/results/kernels.json \\
        --corpus src/nostall/workload/learning/kernel_corpus.json.gz
    python -m benchmarks run learners.kernels --methods max-margin \\
        --out benchmarks/learners/results/kernels_max_margin.json

The kernels are those of ``learners.gpu_traces``; their kinds come from the rules over names.  For
each kind of model, classifiers are fitted to the kernels of all other kinds.  Recall is averaged
over kinds of kernels.  ``--corpus`` also writes the labelled kernels that nostall brings.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.result_file import load, results, save
from benchmarks.learners.figures import calibration_error
from nostall.core.files.atomic import write_atomically
from nostall.papers.multiview.classifier import MaxMarginMultiView
from nostall.workload.learning.diagnostics import fit_temperature, softmax
from nostall.workload.learning.kernels import (
    COLUMNS,
    FORMAT,
    KernelLabeller,
    LabelledLaunch,
    Launch,
    features_of,
)
from nostall.workload.traces.work_kinds import matching_rule

Array = NDArray[Any]
TRACES = results("learners") / "gpu_traces.json.gz"
COMPUTE = ("matrix product", "convolution", "attention")
MEMORY = "memory-bound"
LAUNCH_COLUMNS = 11
"""The first columns of features, which do not depend on the GPU's speed."""
KERNELS_OF_A_MODEL = {MEMORY: 12, **dict.fromkeys(COMPUTE, 12)}
"""Launches of a kind that one model contributes at most: large models have hundreds alike."""
TRAINING = 1200
"""Launches that the max-margin classifier is fitted to."""
SETTINGS = {"spectrum": "fixed", "dimensions": 20, "features": 60, "view_features": 120,
            "bandwidth": 2.0, "sweeps": 30, "burn_in": 15}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--methods", nargs="+", choices=tuple(METHODS), default=["memory", "forest"]
    )
    parser.add_argument("--corpus", type=Path, help="write the labelled kernels here, too")


def labelled_launches(traces: Any) -> list[tuple[str, LabelledLaunch]]:
    """(kind of model, launch) of at most :data:`KERNELS_OF_A_MODEL` launches of each model."""
    rules = [matching_rule(name) for name in traces["names"]]
    kinds = [rule.what if rule is not None and rule.what in COMPUTE else MEMORY for rule in rules]
    rows = []
    for number, model in enumerate(traces["models"]):
        rng = np.random.default_rng([45, number])
        by_kind: dict[str, list[LabelledLaunch]] = {}
        for name, grid, block, registers, shared, count, microseconds in model["kernels"]:
            launch = Launch(tuple(grid), tuple(block), registers, shared,
                            round(microseconds / count, 2))  # fmt: skip
            row = LabelledLaunch(launch, kinds[name], model["name"])
            by_kind.setdefault(kinds[name], []).append(row)
        for kind, members in sorted(by_kind.items()):
            chosen = rng.permutation(len(members))[: KERNELS_OF_A_MODEL[kind]]
            rows += [(model["kind"], members[i]) for i in sorted(chosen)]
    return rows


def write_launches(path: Path, launches: Sequence[LabelledLaunch]) -> None:
    """Write labelled launches as compressed JSON; equal launches give equal bytes."""
    kinds = sorted({launch.kind for launch in launches})
    models = sorted({launch.model for launch in launches})
    rows = [
        [
            kinds.index(row.kind),
            models.index(row.model),
            *row.launch.grid,
            *row.launch.block,
            row.launch.registers,
            row.launch.shared_memory,
            row.launch.microseconds,
        ]
        for row in launches
    ]
    body = {"format": FORMAT, "kinds": kinds, "models": models, "launches": rows}
    text = json.dumps(body, separators=(",", ":"))
    write_atomically(path, gzip.compress(text.encode(), mtime=0))


def main(options: argparse.Namespace) -> None:
    rows = labelled_launches(load(TRACES))
    launches = [launch for _, launch in rows]
    families = np.array([family for family, _ in rows])
    kinds, classes = np.unique([launch.kind for launch in launches], return_inverse=True)
    if options.corpus is not None:
        write_launches(options.corpus, launches)
    body: dict[str, Any] = {
        "launches": {str(k): int(n) for k, n in zip(kinds, np.bincount(classes), strict=True)},
        "kinds_of_models": sorted(set(families.tolist())),
        "settings": SETTINGS,
        "methods": {},
    }
    for method in options.methods:
        run = METHODS[method]
        start = time.process_time()
        probabilities = np.zeros((len(classes), len(kinds)))
        for family in body["kinds_of_models"]:
            test = families == family
            probabilities[test] = run(
                [row for row, held_out in zip(launches, test, strict=True) if not held_out],
                [row.launch for row, held_out in zip(launches, test, strict=True) if held_out],
            )
        body["methods"][method] = judge(probabilities, classes, kinds) | {
            "seconds": round(time.process_time() - start, 1)
        }
        print(method, body["methods"][method], flush=True)
        save(options.out, **body)


def judge(probabilities: Array, classes: Array, kinds: Array) -> dict[str, Any]:
    """Balanced accuracy, recall by kind and calibration error."""
    right = probabilities.argmax(axis=1) == classes
    recall = {str(kind): float(right[classes == c].mean()) for c, kind in enumerate(kinds)}
    return {
        "balanced_accuracy": float(np.mean(list(recall.values()))),
        "accuracy": float(right.mean()),
        "recall": recall,
        "calibration_error": calibration_error(probabilities, classes),
    }


def _forest(train: Sequence[LabelledLaunch], test: Sequence[Launch]) -> Array:
    return KernelLabeller(train).probabilities(test)


def _max_margin(train: Sequence[LabelledLaunch], test: Sequence[Launch]) -> Array:
    """Views: launch parameters, times.  The temperature is fitted to a quarter of the models."""
    rng = np.random.default_rng(0)
    kinds, classes = np.unique([row.kind for row in train], return_inverse=True)
    models, model_of = np.unique([row.model for row in train], return_inverse=True)
    is_held_out = np.isin(model_of, rng.permutation(len(models))[: len(models) // 4])
    features, unseen = features_of([row.launch for row in train]), features_of(test)
    chosen = _balanced(rng, np.flatnonzero(~is_held_out), classes)
    widths = (LAUNCH_COLUMNS, len(COLUMNS) - LAUNCH_COLUMNS)
    model = MaxMarginMultiView(widths, **SETTINGS)  # type: ignore[arg-type]
    model.fit(features[chosen], classes[chosen])
    held_out = model.decision_draws(features[is_held_out])
    temperature = fit_temperature(held_out, classes[is_held_out])
    assert len(model.classes_) == len(kinds)
    mean: Array = softmax(model.decision_draws(unseen), temperature).mean(axis=0)
    return mean


def _balanced(rng: np.random.Generator, rows: Array, classes: Array) -> Array:
    """At most :data:`TRAINING` rows, of each class as many as there are or its equal share."""
    kinds = np.unique(classes)
    parts = [rng.permutation(rows[classes[rows] == c])[: TRAINING // len(kinds)] for c in kinds]
    return np.concatenate(parts)


def _always_memory(train: Sequence[LabelledLaunch], test: Sequence[Launch]) -> Array:
    """What the rules say of a kernel that none of them names."""
    kinds = np.unique([row.kind for row in train])
    return np.tile((kinds == MEMORY).astype(float), (len(test), 1))


METHODS: dict[str, Callable[[Sequence[LabelledLaunch], Sequence[Launch]], Array]] = {
    "memory": _always_memory,
    "forest": _forest,
    "max-margin": _max_margin,
}
