"""Fit the schedule model to a GPU, and judge it on kernels that it was not fitted to.

    python -m benchmarks run fusion.cost_model_fit [--measured FILE] [--judge] [--out FILE]

First the counts (``tile_cost.Counts``): registers and instructions of the binaries that Triton
made, then what a machine takes for them (``sm.Machine``): measured times.  Vendor's and other
people's figures stay as they are.  What is fitted to all chains is written down in the sources by
hand.  ``--judge`` says how the sources as they are do, what a race of the model's favourites would
have taken (``fusion_evaluator_race``), and, for the *held out* numbers, fits on half of the chains
and judges on the other half, both ways round (chains of one function stay together), and writes
both into FILE.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.stitched import chain_graph
from benchmarks.fusion.cost_model.race import means, races
from benchmarks.fusion.cost_model.sample import plan_of
from benchmarks.fusion.cost_model.summary import first, ran, regret, spread, tau_of, us
from benchmarks.harness.result_file import load, results, save
from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.gpu import H200, Gpu, kernel_seconds, max_registers
from nostall.fusion.codegen.cost.kernel import kernel_costs
from nostall.fusion.codegen.cost.tile import COEFFICIENTS, CostCoefficients
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, plans

MEASURED = results("fusion") / "cost_model.json.gz"
FITTED = results("fusion") / "cost_model_fit.json"
OF_MACHINE = (
    "launch_s",
    "issue_rate",
    "load_latency_s",
    "program_start_s",
    "warp_start_s",
    "reduction_phase_s",
    "barrier_s",
    "dependent_issue_cycles",
    "l2_bytes_per_s",
    "sharpness",
    "half_sharpness_programs",
    "unpaired_sector_penalty",
    "spill_factor",
    "reload_s",
)
"""What is fitted of a machine."""
STORED_NAMES = {
    "issue_rate": "issued",
    "sm_bytes_per_cycle": "link_bytes",
    "program_start_s": "program_s",
    "warp_start_s": "warp_s",
    "load_latency_s": "load_s",
    "reduction_phase_s": "phase_s",
    "dependent_issue_cycles": "alone",
    "spill_factor": "spills",
    "half_sharpness_programs": "company",
    "unpaired_sector_penalty": "pair",
    "iteration": "step",
    "cross_warp": "across_warps",
    "layout_conversion": "converted",
    "base_registers": "fixed",
    "extra_chunk_registers": "further",
    "element_registers": "each",
    "row_operand_registers": "rows",
    "broadcast_operand_registers": "bare",
    "philox_registers": "drawn",
    "int64_registers": "places",
    "row_loop_registers": "walked",
    "peeling_registers": "peeled",
    "async_copy_registers": "staged",
    "live_share": "live",
}
"""Names of fields in result files where they differ from those of the classes."""
_PRIOR = 0.1
"""How strongly a figure is held where it was: it costs this much to be e times as large."""
_OUTLIER = 0.1
"""Errors in the logarithm above this count less."""
_COMMON = 0.7
"""How much of an error that all plans of a kernel have in common is left out: it is no matter for
their order, but some for that of kernels."""

Errors = Callable[[Any], NDArray[np.float64]]
Model = Callable[["Point"], float]


@dataclass(frozen=True)
class Point:
    """A measured plan."""

    of: Schedule
    plan: KernelPlan
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Kernel:
    """A measured kernel, the ``number``-th of its chain, and its plans that ran."""

    chain: str
    number: int
    measured: Mapping[str, Any]
    points: tuple[Point, ...]


def kernels(chains: Mapping[str, Any]) -> list[Kernel]:
    """All kernels of a result with at least two plans that ran, but those of chains whose graph is
    another one today."""
    found = []
    for name, chain in chains.items():
        graph = chain_graph(CHAINS[name])
        for number, kernel in enumerate(chain["kernels"]):
            try:
                of = schedule_operators(graph, kernel["operators"])
            except BadInput:
                continue
            points = tuple(Point(of, plan_of(row), row) for row in ran(kernel))
            if len(points) > 1 and of.kind == kernel["kind"]:
                found.append(Kernel(name, number, kernel, points))
    return found


def half_of(name: str) -> int:
    """0 or 1: every other function's chains, so that neither half has seen the other's programs."""
    functions = list(dict.fromkeys(chain.function for chain in CHAINS.values()))
    return functions.index(CHAINS[name].function) % 2


def fit_counts(found: Sequence[Kernel]) -> CostCoefficients:
    """Registers from the first kernel of every plan, instructions from kernels without loops: their
    static ones are those that run."""
    points = [point for kernel in found for point in kernel.points]

    def errors(counts: CostCoefficients) -> NDArray[np.float64]:
        wrong = []
        for point in points:
            # Of several kernels the first does what the others wait for.
            used, demand = point.row["kernels"][0], kernel_costs(point.of, point.plan, counts)[0]
            straight = point.plan.scheme in ("thread", "warp", "block")
            if straight and not used["stack_bytes"]:
                wrong.append(np.log(demand.instructions / used["instructions"]))
            # What does not fit at all is sometimes given hardly any: that says nothing.
            most = max_registers(demand)
            taken = most if used["stack_bytes"] else used["registers"]
            wrong.append(np.log(min(demand.registers, most) / taken))
        return np.array(wrong)

    names = [
        one.name
        for one in fields(COEFFICIENTS)
        if isinstance(getattr(COEFFICIENTS, one.name), float)
    ]
    fitted: CostCoefficients = _fitted(COEFFICIENTS, names, errors)
    return fitted


def fit_machine(found: Sequence[Kernel], counts: CostCoefficients) -> Gpu:
    """From measured times, every kernel with the same weight."""
    points = [point for kernel in found for point in kernel.points]
    asked = [kernel_costs(point.of, point.plan, counts) for point in points]
    measured = np.array([us(point.row) for point in points])
    plans = [len(kernel.points) for kernel in found]
    kernel, weight = np.repeat(np.arange(len(found)), plans), np.repeat(plans, plans) ** -0.5

    def errors(machine: Gpu) -> NDArray[np.float64]:
        times = [1e6 * sum(kernel_seconds(d, machine) for d in every) for every in asked]
        wrong = np.log(np.array(times) / measured)
        common = np.bincount(kernel, wrong) / np.bincount(kernel)
        return 5 * weight * (wrong - _COMMON * common[kernel])

    machine: Gpu = _fitted(H200, OF_MACHINE, errors)
    return machine


def _fitted(start: Any, names: Sequence[str], errors: Errors) -> Any:
    """``start`` with these positive figures moved to where the errors are least."""
    before = np.array([getattr(start, name) for name in names])

    def moved(by: NDArray[np.float64]) -> Any:
        values = before * np.exp(by)
        return replace(start, **dict(zip(names, map(float, values), strict=True)))

    def wrong(by: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([errors(moved(by)), _PRIOR * by])

    step = np.zeros(len(names))
    found = least_squares(wrong, step, loss="soft_l1", f_scale=_OUTLIER, diff_step=1e-2)
    return moved(found.x)


# -- judging ---------------------------------------------------------------------------------------


def model(counts: CostCoefficients, machine: Gpu) -> Model:
    """Seconds of a plan with these figures."""

    def modelled(point: Point) -> float:
        return sum(
            kernel_seconds(one, machine) for one in kernel_costs(point.of, point.plan, counts)
        )

    return modelled


def held_out(found: Sequence[Kernel]) -> dict[int, Model]:
    """For each half the model that was fitted to the other one."""
    fitted = {}
    for half in (0, 1):
        others = [kernel for kernel in found if half_of(kernel.chain) != half]
        counts = fit_counts(others)
        fitted[half] = model(counts, fit_machine(others, counts))
    return fitted


def judged(kernel: Kernel, modelled: Model) -> dict[str, Any]:
    """Tau and regret of a model, and by how much it is off in the median."""
    plans = [{**point.row, "modelled_us": 1e6 * modelled(point)} for point in kernel.points]
    found = {"plans": plans}
    off = [abs(plan["modelled_us"] / us(plan) - 1) for plan in plans]
    return {
        "tau": _rounded(tau_of(found)),
        "regret": _rounded(regret(found, first(found))),
        "off": _rounded(float(np.median(off))),
        "first": first(found),
        "first_us": round(min(plan["modelled_us"] for plan in plans), 2),
    }


def raced(kernel: Kernel, modelled: Model) -> dict[str, Any]:
    """As :func:`judged`, and what a race of this model's favourites would have taken."""
    of = kernel.points[0].of
    times = {plan: modelled(Point(of, plan, {})) for plan in plans(of).legal}
    samples = {point.plan: point.row["samples_us"] for point in kernel.points}
    return {**judged(kernel, modelled), "races": races(times, samples)}


def told(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over all kernels, by who is judged."""
    found: dict[str, Any] = {}
    for who in ("before", "today", "held out"):
        judgements = [row[who] for row in rows if who in row]
        if len(judgements) == len(rows):
            found[who] = {
                key: spread([one[key] for one in judgements if one[key] is not None])
                for key in ("tau", "regret", "off")
            }
            if all("races" in one for one in judgements):
                found[who]["races"] = means([one["races"] for one in judgements])
    return found


def today(kernel: Kernel) -> dict[str, Any]:
    """The row of a kernel: the model that was there when it was measured, and the sources'."""
    return {
        "chain": kernel.chain,
        "number": kernel.number,
        "kind": kernel.measured["kind"],
        "plans": len(kernel.points),
        "before": judged(kernel, lambda point: 1e-6 * float(point.row["modelled_us"])),
        "today": raced(kernel, model(COEFFICIENTS, H200)),
    }


def _stored(figures: CostCoefficients | Gpu) -> dict[str, Any]:
    """Fitted figures as a result file holds them."""
    return {STORED_NAMES.get(name, name): value for name, value in asdict(figures).items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--out", type=Path, default=FITTED)
    parser.add_argument("--judge", action="store_true", help="the sources as they are")


def main(options: argparse.Namespace) -> None:
    found = kernels(load(options.measured)["chains"])
    if not options.judge:
        counts = fit_counts(found)
        machine = fit_machine(found, counts)
        print(json.dumps({"counts": _stored(counts), "machine": _stored(machine)}, indent=1))
        return
    others = held_out(found)
    rows = [
        {**today(kernel), "held out": raced(kernel, others[half_of(kernel.chain)])}
        for kernel in found
    ]
    for row in rows:
        print(row["chain"], {key: row["today"][key] for key in ("tau", "regret", "first")})
    figures = {"counts": _stored(COEFFICIENTS), "machine": _stored(H200)}
    save(options.out, kind="modelled", figures=figures, summary=told(rows), kernels=rows)
    print(json.dumps(told(rows), indent=1))
