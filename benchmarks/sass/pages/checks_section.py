"""Section of the results page: correctness of results and of the measuring itself, on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.result_file import results
from benchmarks.harness.template import render, source

Row = Mapping[str, Any]


def checks_section() -> str:
    """Random walks, broken kernels, measurement checks, several GPUs."""
    walks, checks, farm, overlap = (
        _result(name)
        for name in (
            "random_walks_on_gpu", "measurement_checks", "farm_throughput", "load_overlap",
        )
    )  # fmt: skip
    tried = [kernel for kernel in walks["kernels"] if kernel.get("walks")]
    values = {
        "walks": walks,
        "tried": tried,
        "left": len(walks["kernels"]) - len(tried),
        "walks_date": walks["date"][:16],
        "soaks": [_result("soak"), _result("soak_more")],
        "checks": checks,
        **_measuring(checks["parts"]),
        "farm": farm,
        "farm_rates": [f"{run['gpus']}: {run['per_second']:.0f}" for run in farm["runs"]],
        "overlap": overlap,
    }
    return render(__file__, values)


def _result(name: str) -> Row:
    return source(results("sass") / f"{name}.json")


def _measuring(parts: Row) -> Row:
    """Inputs, rates, clocks and nulls of the measurement checks."""
    inputs = parts["inputs"]["inputs_equal"]
    rates = _named(parts, "throughput").values()
    clocks = _named(parts, "clocks ")
    kinds = [name for name in next(iter(clocks.values())) if "," in name]
    return {
        "inputs": inputs,
        "equal_inputs": sum(inputs.values()),
        "alone": [part["one by one"]["per_s"] for part in rates],
        "overlapped": [part["overlapped"]["per_s"] for part in rates],
        "samples": [part["samples_per_s"] for part in _named(parts, "samples").values()],
        "clock_kernels": [f"{kernel}, us" for kernel in clocks],
        "clocks": [
            {"clock": kind, "times_us": [part[kind]["us"] for part in clocks.values()]}
            for kind in kinds
        ],
        "nulls": [
            {**part[loads], "kernel": kernel, "loads": loads.split()[0]}
            for kernel, part in _named(parts, "nulls ").items()
            for loads in part
            if loads.endswith("loads")
        ],
    }


def _named(parts: Row, prefix: str) -> dict[str, Any]:
    """The parts whose names begin with a prefix, by the rest of the name."""
    return {n.removeprefix(prefix): part for n, part in parts.items() if n.startswith(prefix)}
