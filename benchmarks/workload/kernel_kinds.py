"""Kinds of all kernels of public traces, against a classification of their identifiers by hand.

    NOSTALL_PUBLIC_TRACES=DIR python -m benchmarks run workload.kernel_kinds \\
        --out benchmarks/workload/results/kernel_kinds.json

DIR contains traces of the tests of TraceLens, HTA, PARAM and Kineto (MIT, BSD).  The classification
is ``tests/unit/workload/traces/kernels_by_kind.py``.  Two kernels have the same identifier if their
names differ in template arguments, parameters and numbers only.  The exit code is 1 if a kind
disagrees, or if the list does not have an identifier.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.unit.workload.traces.kernels_by_kind import GENERATED, kernels_by_kind

from benchmarks.harness.result_file import save
from nostall.core.errors import BadInput, BadTrace
from nostall.workload.traces.kineto.reader import read_kineto
from nostall.workload.traces.recording import ActivityType
from nostall.workload.traces.work_kinds import WorkKind, kernel_work_kind, parse_kernel_name


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    root = os.environ.get("NOSTALL_PUBLIC_TRACES")
    if not root:
        raise BadInput("set NOSTALL_PUBLIC_TRACES to a folder with traces")
    names: set[str] = set()
    traces = 0
    for path in sorted(Path(root).rglob("*.json.gz")):
        try:
            recording = read_kineto(path)
        except BadTrace as error:
            print(f"skipped: {error}")
            continue
        traces += 1
        activities = recording.activities
        kernels = activities.name[activities.type == ActivityType.KERNEL]
        names.update(recording.names[index] for index in set(kernels.tolist()))
    body = compare(names)
    print(traces, "traces", body)
    save(options.out, traces=traces, **body)
    sys.exit(bool(body["disagreements"] or body["not_classified"]))


def compare(names: set[str]) -> dict[str, Any]:
    """Kernel names by kind, and the identifiers that disagree or are not classified by hand."""
    by_hand = {
        identifier(name): kind for kind, known in kernels_by_kind().items() for name in known
    }
    kinds: Counter[str] = Counter()
    identifiers: dict[str, WorkKind | None] = {}
    disagreements: set[str] = set()
    for name in names:
        key = identifier(name)
        expected = by_hand.get(key, _generated_kind(parse_kernel_name(name).function))
        identifiers[key] = expected
        kind = kernel_work_kind(name)
        kinds[kind.name.lower()] += 1
        if expected is not None and kind != expected:
            disagreements.add(key)
    return {
        "names": len(names),
        "identifiers": len(identifiers),
        "names_by_kind": dict(kinds),
        "disagreements": sorted(disagreements),
        "not_classified": sorted(key for key, kind in identifiers.items() if kind is None),
    }


def identifier(name: str) -> str:
    """The identifier of a kernel without numbers and underscores."""
    return re.sub(r"[\d_]+", "", parse_kernel_name(name).function)


def _generated_kind(function: str) -> WorkKind | None:
    for kind, starts in GENERATED.items():
        if function.startswith(starts):
            return kind
    return None
