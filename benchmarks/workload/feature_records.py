"""Conversion between module features and their records in result files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nostall.workload.jobs.record import Operator, OperatorKind
from nostall.workload.modules import ModuleFeatures


def to_record(features: ModuleFeatures) -> dict[str, Any]:
    """A JSON record; the bytes of an operator have the key ``size``."""
    operators = [
        {
            "kind": operator.kind.value,
            "name": operator.name,
            "calls": operator.calls,
            "flops": operator.flops,
            "size": operator.bytes_moved,
        }
        for operator in features.operators
    ]
    return {**asdict(features), "operators": operators}


def from_record(record: Mapping[str, Any]) -> ModuleFeatures:
    """The features of a record that :func:`to_record` wrote."""
    operators = tuple(
        Operator(OperatorKind(o["kind"]), o["name"], o["calls"], o["flops"], o["size"])
        for o in record["operators"]
    )
    return ModuleFeatures(**{**record, "operators": operators})
