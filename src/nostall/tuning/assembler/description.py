"""What an assembler search did: the winner's levers and lineage, and resources before and after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from nostall.core import LaunchSpec, NostallError
from nostall.ptx.schedule.state import PtxState
from nostall.sass import Program
from nostall.sass.model.occupancy import kernel_resources, occupancy
from nostall.sass.model.parameters import sm_parameters
from nostall.tuning.assembler.candidate_log import read_candidates

_MAX_ANCESTORS = 1000
"""Generations after which a lineage ends; searches of hours have some hundreds."""


def describe_levers(state: PtxState) -> list[str]:
    """The changes of a state, one text for each; empty for the original."""
    moved = sum(bool(order) for order in state.orders)
    return [
        *([f"order of {moved} block{'s' if moved > 1 else ''}"] if moved else []),
        *([f"kernel name {state.kernel_name}"] if state.kernel_name else []),
        *([f"at most {state.max_registers} registers"] if state.max_registers else []),
        *([" ".join(state.options)] if state.options else []),
        *([f"ptxas {state.assembler}"] if state.assembler else []),
        *([f"{len(state.hints)} hints"] if state.hints else []),
        *([f"dependent launch: {state.dependent_launch}"] if state.dependent_launch else []),
    ]


def describe_resources(cubin: bytes, kernel: str, launch: LaunchSpec | None) -> dict[str, Any]:
    """Registers, shared memory and occupancy of a kernel; occupancy only if the launch is known."""
    program = Program.from_cubin(cubin)
    parameters = sm_parameters(program.sm)
    used = launch or LaunchSpec()
    resources = kernel_resources(program, program.kernel(kernel), used, parameters)
    described: dict[str, Any] = {"registers": resources.registers, "shared": resources.shared}
    if launch is None:
        return described
    try:
        on_sm = occupancy(resources, launch, parameters)
    except NostallError:  # the parameters of the model do not fit this launch
        return described
    return described | {
        "blocks_per_sm": on_sm.blocks_per_sm,
        "warps_per_sm": on_sm.blocks_per_sm * resources.warps,
        "limit": on_sm.limit,
    }


def read_lineage(path: Path, winner: PtxState) -> list[dict[str, Any]]:
    """The ancestors of a state and the state itself, oldest first, from the log of candidates.

    Each entry has the ``lever`` that made it, the median ``ratio`` original / candidate of all its
    samples, and its ``registers``.
    """
    if not path.exists():
        return []
    first: dict[str, dict[str, Any]] = {}
    ratios: dict[str, list[float]] = {}
    for record in read_candidates(path):
        ratios.setdefault(record["key"], []).extend(record["ratios"])
        if "parent" in record:
            first.setdefault(record["key"], record)
    lineage: list[dict[str, Any]] = []
    key: str | None = winner.key().hex()
    seen: set[str] = set()
    while key in first and key not in seen and len(lineage) < _MAX_ANCESTORS:
        seen.add(key)
        lineage.append(_generation(first[key], ratios[key]))
        key = first[key]["parent"]
    return lineage[::-1]


def _generation(record: Mapping[str, Any], ratios: list[float]) -> dict[str, Any]:
    return {
        "lever": "portfolio" if record["lever"] == "given" else record["lever"],
        "ratio": round(median(ratios), 5) if ratios else None,
        "registers": record["registers"],
        "state": describe_levers(PtxState.load(record["state"])),
    }
