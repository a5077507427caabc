"""Fit of the cost model's coefficients to measured plans, and its evaluation on held-out kernels.

    python -m benchmarks run fusion.cost_model_fit [--measured FILE] [--gpu-only] [--judge]
        [--out FILE]

Two fits: the cost coefficients (``codegen.cost.tile.CostCoefficients``) to the registers and
instructions of Triton's binaries, then the GPU's parameters (``codegen.cost.gpu.Gpu``) to measured
times.  Parameters from the vendor or from papers are not fitted.  The fitted values and the regrets
before and after are printed, and written to FILE if it is given; a person copies the values into
the sources.  ``--gpu-only`` fits the GPU's parameters only.  The measurements are those of
``fusion.cost_model`` or of the train half of ``fusion.unseen_chains``.

``--judge`` evaluates the coefficients in the sources: tau, regret, error, and the result of tuning
with this model (``tuning_replay``).  For the *held out* numbers it fits to half of the chains and
evaluates on the other half, both ways; chains of one function stay together.  All are written to
FILE.  With ``--gpu-only`` the held-out fits are of the GPU's parameters, too.
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

from benchmarks.fusion.chains.generated import GENERATED
from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.stitched import chain_graph
from benchmarks.fusion.cost_model.sample import plan_from_record
from benchmarks.fusion.cost_model.summary import (
    distribution,
    kernel_tau,
    measured_plans,
    median_us,
    modelled_best,
    regret,
)
from benchmarks.fusion.cost_model.tuning_replay import replay_distributions, replay_tuning
from benchmarks.harness.result_file import load, results, save
from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.coefficients import COEFFICIENTS, CostCoefficients
from nostall.fusion.codegen.cost.default_plan import is_last_choice
from nostall.fusion.codegen.cost.gpu import H200, Gpu, kernel_seconds
from nostall.fusion.codegen.cost.kernel import kernel_costs
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import max_registers
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel

ALL_CHAINS = {**CHAINS, **GENERATED}
MEASURED = results("fusion") / "cost_model.json.gz"
FITTED = results("fusion") / "cost_model_fit.json"
FITTED_GPU_FIELDS = (
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
"""Fields of ``Gpu`` that are fitted."""
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
"""Names of fields in result files, if they differ from those of the classes."""
_PRIOR = 0.1
"""Weight of the prior: the residual of a coefficient that is e times its initial value."""
_OUTLIER = 0.1
"""Scale of the soft L1 loss: larger logarithmic errors have less weight."""
_COMMON = 0.7
"""Share of the mean error of a kernel's plans that is subtracted.

A common error does not change the order of a kernel's plans, but that of different kernels.
"""

Errors = Callable[[Any], NDArray[np.float64]]
Model = Callable[["Point"], float]


@dataclass(frozen=True)
class Point:
    """A data point of the fit: a plan and its measurement."""

    schedule: Schedule
    plan: KernelPlan
    row: Mapping[str, Any]
    """Record in the result file."""

    @property
    def kernel(self) -> PlannedKernel:
        return PlannedKernel(self.schedule, self.plan)


@dataclass(frozen=True)
class Kernel:
    """A measured kernel."""

    chain: str
    number: int
    """Index in its chain."""
    measured: Mapping[str, Any]
    """Record in the result file."""
    points: tuple[Point, ...]
    """Its measured plans."""


def load_kernels(chains: Mapping[str, Any]) -> list[Kernel]:
    """Kernels of a result with at least two measured plans.

    Kernels that the present version cannot schedule in the same way are left out.
    """
    loaded = []
    for name, chain in chains.items():
        graph = chain_graph(ALL_CHAINS[name])
        for number, kernel in enumerate(chain["kernels"]):
            try:
                schedule = schedule_operators(graph, kernel["operators"])
            except BadInput:
                continue
            points = tuple(
                Point(schedule, plan_from_record(row), row) for row in measured_plans(kernel)
            )
            if len(points) > 1 and schedule.kind == kernel["kind"]:
                loaded.append(Kernel(name, number, kernel, points))
    return loaded


def half_of_chain(name: str) -> int:
    """Half (0 or 1) of a chain; chains of one function are in the same half."""
    functions = list(dict.fromkeys(chain.function for chain in ALL_CHAINS.values()))
    return functions.index(ALL_CHAINS[name].function) % 2


def fit_coefficients(kernels: Sequence[Kernel]) -> CostCoefficients:
    """Fit registers to the first kernel of every plan, and instructions to kernels without loops.

    Without loops the static number of instructions is the executed one.
    """
    points = [point for kernel in kernels for point in kernel.points]

    def errors(counts: CostCoefficients) -> NDArray[np.float64]:
        log_errors = []
        for point in points:
            # Of several kernels the first does most of the work.
            used, demand = (
                point.row["kernels"][0],
                kernel_costs(PlannedKernel(point.schedule, point.plan), counts)[0],
            )
            has_no_loops = point.plan.scheme in ("thread", "warp", "block")
            if has_no_loops and not used["stack_bytes"]:
                log_errors.append(np.log(demand.instructions / used["instructions"]))
            # If a kernel spills, the compiler's register count is not its demand; use the limit.
            limit = max_registers(demand.warps)
            registers = limit if used["stack_bytes"] else used["registers"]
            log_errors.append(np.log(min(demand.registers, limit) / registers))
        return np.array(log_errors)

    names = [
        field.name
        for field in fields(COEFFICIENTS)
        if isinstance(getattr(COEFFICIENTS, field.name), float)
    ]
    fitted: CostCoefficients = _fit(COEFFICIENTS, names, errors)
    return fitted


def fit_gpu(kernels: Sequence[Kernel], counts: CostCoefficients) -> Gpu:
    """Fit the GPU's parameters to measured times; every kernel has the same weight."""
    points = [point for kernel_index in kernels for point in kernel_index.points]
    asked = [kernel_costs(PlannedKernel(point.schedule, point.plan), counts) for point in points]
    measured = np.array([median_us(point.row) for point in points])
    plan_counts = [len(kernel_index.points) for kernel_index in kernels]
    kernel_index, weights = (
        np.repeat(np.arange(len(kernels)), plan_counts),
        np.repeat(plan_counts, plan_counts) ** -0.5,
    )

    def errors(gpu: Gpu) -> NDArray[np.float64]:
        times = [
            1e6 * sum(kernel_seconds(cost, gpu) for cost in kernel_list) for kernel_list in asked
        ]
        log_errors = np.log(np.array(times) / measured)
        mean_errors = np.bincount(kernel_index, log_errors) / np.bincount(kernel_index)
        return 5 * weights * (log_errors - _COMMON * mean_errors[kernel_index])

    gpu: Gpu = _fit(H200, FITTED_GPU_FIELDS, errors)
    return gpu


def _fit(start: Any, names: Sequence[str], errors: Errors) -> Any:
    """``start`` with these positive fields replaced by the least-squares fit of ``errors``."""
    initial = np.array([getattr(start, name) for name in names])

    def scaled(log_factors: NDArray[np.float64]) -> Any:
        values = initial * np.exp(log_factors)
        return replace(start, **dict(zip(names, map(float, values), strict=True)))

    def residuals(log_factors: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([errors(scaled(log_factors)), _PRIOR * log_factors])

    zeros = np.zeros(len(names))
    solution = least_squares(residuals, zeros, loss="soft_l1", f_scale=_OUTLIER, diff_step=1e-2)
    return scaled(solution.x)


# -- evaluation ------------------------------------------------------------------------------------


def make_model(counts: CostCoefficients, gpu: Gpu) -> Model:
    """The model with these coefficients: modelled seconds of a plan."""

    def modelled(point: Point) -> float:
        return sum(
            kernel_seconds(kernel, gpu)
            for kernel in kernel_costs(PlannedKernel(point.schedule, point.plan), counts)
        )

    return modelled


def fit_held_out(kernels: Sequence[Kernel], gpu_only: bool) -> dict[int, Model]:
    """For each half the model that is fitted to the other half.

    ``gpu_only``: with the sources' coefficients of instructions and registers, which are fitted to
    binaries and not to times.
    """
    models = {}
    for half in (0, 1):
        training = [kernel for kernel in kernels if half_of_chain(kernel.chain) != half]
        counts = COEFFICIENTS if gpu_only else fit_coefficients(training)
        models[half] = make_model(counts, fit_gpu(training, counts))
    return models


def evaluate(kernel: Kernel, modelled: Model) -> dict[str, Any]:
    """Tau, regret and median relative error of a model on one kernel."""
    plans = [
        {**point.row, "modelled_us": 1e6 * modelled(point), "last": is_last_choice(point.kernel)}
        for point in kernel.points
    ]
    kernel_record = {"plans": plans}
    errors = [abs(plan["modelled_us"] / median_us(plan) - 1) for plan in plans]
    return {
        "tau": _round(kernel_tau(kernel_record)),
        "regret": _round(regret(kernel_record, modelled_best(kernel_record))),
        "off": _round(float(np.median(errors))),
        "first": modelled_best(kernel_record),
        "first_us": round(
            next(p["modelled_us"] for p in plans if p["plan"] == modelled_best(kernel_record)), 2
        ),
    }


def evaluate_with_tuning(kernel: Kernel, modelled: Model) -> dict[str, Any]:
    """As :func:`evaluate`, with the results of tuning with this model."""
    schedule = kernel.points[0].schedule
    times = {plan: modelled(Point(schedule, plan, {})) for plan in plans(schedule).legal_plans}
    samples = {point.plan: point.row["samples_us"] for point in kernel.points}
    return {**evaluate(kernel, modelled), "races": replay_tuning(times, samples)}


def summarize_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Distributions over all kernels, for each evaluated model."""
    summary: dict[str, Any] = {}
    for name in ("before", "today", "held out"):
        results = [row[name] for row in rows if name in row]
        if len(results) == len(rows):
            summary[name] = {
                key: distribution([result[key] for result in results if result[key] is not None])
                for key in ("tau", "regret", "off")
            }
            if all("races" in result for result in results):
                summary[name]["races"] = replay_distributions(
                    [result["races"] for result in results]
                )
    return summary


def evaluate_present(kernel: Kernel) -> dict[str, Any]:
    """Record of a kernel: evaluation of the model at measurement time and of the present model."""
    return {
        "chain": kernel.chain,
        "number": kernel.number,
        "kind": kernel.measured["kind"],
        "plans": len(kernel.points),
        "before": evaluate(kernel, lambda point: 1e-6 * float(point.row["modelled_us"])),
        "today": evaluate_with_tuning(kernel, make_model(COEFFICIENTS, H200)),
    }


def fit_report(kernels: Sequence[Kernel], gpu_only: bool) -> dict[str, Any]:
    """The fitted figures, and the regret of the modelled best plans before and after the fit."""
    counts = COEFFICIENTS if gpu_only else fit_coefficients(kernels)
    gpu = fit_gpu(kernels, counts)
    models = {"sources": make_model(COEFFICIENTS, H200), "fitted": make_model(counts, gpu)}
    regrets = {
        name: distribution([evaluate(kernel, model)["regret"] for kernel in kernels])
        for name, model in models.items()
    }
    figures = {"counts": _stored(counts), "machine": _stored(gpu)}
    return {
        "kernels": len(kernels),
        "plans": sum(len(kernel.points) for kernel in kernels),
        "regret": regrets,
        "figures": figures,
    }


def _stored(figures: CostCoefficients | Gpu) -> dict[str, Any]:
    """Coefficients under their names in result files."""
    return {STORED_NAMES.get(name, name): value for name, value in asdict(figures).items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measured", type=Path, nargs="+", default=[MEASURED], help="files with measured plans"
    )
    parser.add_argument("--out", type=Path, help="default with --judge: the committed file")
    parser.add_argument(
        "--gpu-only", action="store_true", help="fit only the GPU's parameters, to times"
    )
    parser.add_argument(
        "--judge", action="store_true", help="evaluate the coefficients in the sources"
    )


def main(options: argparse.Namespace) -> None:
    kernels = [kernel for path in options.measured for kernel in load_kernels(load(path)["chains"])]
    if not options.judge:
        report = fit_report(kernels, options.gpu_only)
        print(json.dumps(report, indent=1))
        if options.out is not None:
            names = [path.name for path in options.measured]
            save(options.out, kind="modelled", measured=names, **report)
        return
    held_out_models = fit_held_out(kernels, options.gpu_only)
    rows = [
        {
            **evaluate_present(kernel),
            "held out": evaluate_with_tuning(kernel, held_out_models[half_of_chain(kernel.chain)]),
        }
        for kernel in kernels
    ]
    for row in rows:
        print(row["chain"], {key: row["today"][key] for key in ("tau", "regret", "first")})
    figures = {"counts": _stored(COEFFICIENTS), "machine": _stored(H200)}
    summary = summarize_rows(rows)
    save(options.out or FITTED, kind="modelled", figures=figures, summary=summary, kernels=rows)
    print(json.dumps(summary, indent=1))
