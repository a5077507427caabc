"""How much of a gain survives on another GPU and with another ptxas.

    python -m benchmarks run ptx.transfer --baseline compiler_baseline.json \\
        --winners assembler_suite.json assembler_filling.json --out transfer.json

The winner of each kernel, of an earlier search, is built again from its recorded state and compared
with the compiler's cubin on this GPU (``deployed``).  Then the same state is built with each
installed version of ptxas, and compared with the original text built by that version.  Moves of
native instructions are no part of a recorded state.  Each kernel takes about 15 seconds and is
written when it is done; a second run measures only missing ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.comparison import comparison_record
from benchmarks.harness.result_file import save
from benchmarks.kernels.suite import Entry
from benchmarks.ptx.assembler_suite import SUITES
from benchmarks.ptx.dependent_launch import read_winners
from benchmarks.ptx.dependent_launch_cell import ChainPlan, OpenDevice, find_build
from benchmarks.sass.compiler_baseline import load as load_baselines
from nostall.core.errors import NostallError
from nostall.gpu import Kernel, LocalGpu, MeasurementPlan
from nostall.ptx.assemble.builder import Builder
from nostall.ptx.schedule.state import PtxState
from nostall.tuning.assembler.candidate import build_state, hazards
from nostall.tuning.assembler.job import prepare
from nostall.tuning.gpu_objective import decide
from nostall.tuning.sources.source import Source

EXPECTED = 25.0
"""Seconds of one kernel, at most, as far as is known."""
_CHECKS = 16


def measure_transfer(entry: Entry, plan: ChainPlan, *, versions: bool = True) -> dict[str, Any]:
    """The winner of ``plan`` on this GPU; raises ValueError if its build cannot be made here."""
    _, source, winner = find_build(entry, plan)
    if winner is None or plan.winner is None:
        raise ValueError("this machine does not make the build of the winner's record")
    record: dict[str, Any] = {
        "searched": {
            "gpu": plan.winner["gpu"]["gpu"],
            "driver": plan.winner["gpu"]["driver_version"],
            "deployed": plan.winner["deployed"],
        },
        "settings": json.loads(winner.dump()) | {"orders": len(winner.orders)},
        "versions": {},
    }
    builder = Builder(prepare(source)[1])
    try:
        pairs = list(_pairs(builder, source, winner, versions=versions))
    finally:
        builder.close()
    for name, original, candidate, problem in pairs:
        result: dict[str, Any] = {"failure": problem}
        if not problem:
            result = _compare(source, original, candidate, plan)
            record["gpu"] = result.pop("gpu")
        if name == "deployed":
            record["deployed"] = result
        else:
            record["versions"][name] = result
    return record


def _pairs(
    builder: Builder, source: Source, winner: PtxState, *, versions: bool
) -> Iterator[tuple[str, bytes, bytes, str]]:
    """(name, original, candidate, why there is none) of each comparison."""
    own = builder.spec.assemblers[0].version
    yield "deployed", source.cubin, *_build(builder, winner)
    for assembler in builder.spec.assemblers if versions else ():
        version = "" if assembler.version == own else assembler.version
        original, problem = _build(builder, PtxState(assembler=version))
        candidate, also = _build(builder, replace(winner, assembler=version))
        yield assembler.version, original, candidate, problem or also


def _build(builder: Builder, state: PtxState) -> tuple[bytes, str]:
    """The cubin of a state, or why there is none or it must not run."""
    built = build_state(builder, state)
    if not built.cubin:
        return b"", f"{built.status}: {built.detail}"[:300]
    problem = hazards(built.cubin, builder.spec.kernel)
    return (b"", problem[:300]) if problem else (built.cubin, "")


def _compare(source: Source, original: bytes, candidate: bytes, plan: ChainPlan) -> dict[str, Any]:
    assert source.launch is not None
    kernel = Kernel(original, source.kernel, source.launch)
    with plan.open(kernel, MeasurementPlan()) as gpu:
        decision = decide(gpu, candidate, plan.rounds, _CHECKS)
        about = dict(gpu.info)
    outcome = decision.outcome
    failure = {"failure": f"{outcome.status}: {outcome.detail}"[:300]}
    return {**(comparison_record(decision) or failure), "gpu": about}


def summary_line(name: str, record: dict[str, Any]) -> str:
    """A record in one line."""
    cells = [f"ptxas {version} {_ratio(r)}" for version, r in record["versions"].items()]
    searched = record["searched"]
    return (
        f"{name:38} searched on {searched['gpu']} {searched['deployed']:.4f}, here "
        f"{_ratio(record['deployed'])}  {'  '.join(cells)}"
    )


def _ratio(result: dict[str, Any]) -> str:
    if "failure" in result:
        return f"failed ({result['failure'][:60]})"
    return f"{result['ratio']:.4f}{'*' if result['verdict'] == 'faster' else ' '}"


def run(
    options: argparse.Namespace, *, open_device: OpenDevice = LocalGpu, rounds: int = 200
) -> dict[str, Any]:
    """Measure what is missing until the time is up; returns the records by kernel."""
    until = monotonic() + options.budget_s
    winners: dict[str, dict[str, Any]] = {}
    for path in options.winners:
        winners |= read_winners(path)
    baselines = load_baselines(options.baseline)
    done = json.loads(options.out.read_text())["kernels"] if options.out.exists() else {}
    for entry in (e for suite in options.suite for e in SUITES[suite]()):
        is_wanted = any(fnmatch(entry.name, pattern) for pattern in options.kernels)
        if entry.name not in winners or not is_wanted or "deployed" in done.get(entry.name, {}):
            continue
        if winners[entry.name]["deployed"] <= 1.0 or monotonic() + EXPECTED > until:
            continue
        plan = ChainPlan(baselines.get(entry.name, ()), winners[entry.name], rounds, open_device)
        try:
            done[entry.name] = measure_transfer(entry, plan, versions=not options.no_versions)
            print(summary_line(entry.name, done[entry.name]), flush=True)
        except (ValueError, NostallError) as error:
            done[entry.name] = {"failure": str(error)[:300]}
            print(entry.name, done[entry.name]["failure"], flush=True)
        save(options.out, kind="measured", kernels=done)
    return done


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", nargs="*", choices=tuple(SUITES), default=list(SUITES))
    parser.add_argument(
        "--baseline", type=Path, required=True, help="made by benchmarks.sass.compiler_baseline"
    )
    parser.add_argument(
        "--winners", nargs="+", type=Path, required=True, help="results of ptx.assembler_suite"
    )
    parser.add_argument("--kernels", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument("--no-versions", action="store_true", help="only the recorded ptxas")
    parser.add_argument("--budget-s", type=float, default=300.0, help="end after so many seconds")


def main(options: argparse.Namespace) -> None:
    run(options)
