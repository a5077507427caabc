"""Process of ``benchmarks.torch_compile.models``: starts one method or times several methods.

    python -m benchmarks.torch_compile.model_process '{"model": "dien-train", "part": ...}'

The argument is a :class:`Setup` as JSON.  Results are written after every stage, so that a fault in
a later stage does not lose them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.harness.gpu_lock import gpu_turn
from benchmarks.torch_compile.model_program import Program
from benchmarks.torch_compile.model_setup import (
    AGAIN,
    INTERLEAVED,
    METHODS,
    PAIRED,
    PROCESS_COUNTS,
    REPLAYED,
    START_METHODS,
    STARTS,
    ZOOS,
    Setup,
)
from benchmarks.torch_compile.model_zoo.parts import Model
from benchmarks.torch_compile.step_timing import (
    CapturedStep,
    Stopwatch,
    capture_step,
    profile_kernels,
    synchronize,
    time_interleaved,
)

if TYPE_CHECKING:
    from nostall.attach.torch_compile.report import GraphReport

MAX_CHOICE_SHARE = 0.6
"""Largest share of a process's time until the backend has chosen."""
WARM_UP = 3
MAX_LONGEST_STEPS = 8
"""Number of longest steps that are recorded."""


# -- start of a program ----------------------------------------------------------------------------


def start_program(
    model: Model, part: str, setup: Setup
) -> tuple[Program, Stopwatch, dict[str, Any]]:
    """Start a program and run its first step; returns the times, including the imports."""
    program = Program(model, METHODS[START_METHODS[AGAIN][part]], setup)
    with torch.no_grad():
        # Load the CUDA context and libraries before the measurement.
        ones = torch.ones(8, 8, device=setup.device, dtype=getattr(torch, setup.dtype))
        ones.mm(ones)
    synchronize(setup.device)
    stopwatch = Stopwatch()
    program.compile()
    program.step()
    synchronize(setup.device)
    return program, stopwatch, stopwatch.elapsed("first")


def measure_start(model: Model, setup: Setup) -> dict[str, Any]:
    """Measure the first step and the steps until the choice, with the backend's reports."""
    program, stopwatch, result = start_program(model, setup.part, setup)
    steps = program.run_until_chosen(MAX_CHOICE_SHARE * setup.seconds)
    return {
        **result,
        "chosen": program.has_chosen,
        **stopwatch.elapsed("until_chosen"),
        "steps": 1 + len(steps),
        **waiting_times(steps),
        "graphs": [report_record(report) for report in program.reports],
        "duels": kernel_comparisons() if program.reports else [],
    }


def waiting_times(steps: Sequence[float]) -> dict[str, Any]:
    """How long the program was held up until the choice.

    The median step, the longest steps, and the summed time of all steps beyond the median.
    """
    if not steps:
        return {}
    usual_seconds = statistics.median(steps)
    longest = [
        seconds
        for seconds in sorted(steps, reverse=True)[:MAX_LONGEST_STEPS]
        if seconds > 2 * usual_seconds
    ]
    held_up_seconds = sum(max(0.0, seconds - usual_seconds) for seconds in steps)
    return {"usual_step_s": usual_seconds, "longest_steps_s": longest, "held_up_s": held_up_seconds}


def append_first_step(model: Model, setup: Setup, previous: list[Any]) -> list[Any]:
    """Measure one first step and append it to ``previous``."""
    _, _, result = start_program(model, setup.state, setup)
    return [*previous, {"method": setup.state, **result}] if setup.recorded else previous


def kernel_comparisons() -> list[dict[str, Any]]:
    """All comparisons of stitched kernels with Inductor's kernels of the same operators."""
    from nostall.attach.torch_compile.store.kernel_store import KernelStore
    from nostall.attach.torch_compile.store.records import KernelComparisonRecord

    store, comparisons = KernelStore(), []
    for path in sorted((store.folder / "duels").glob("*.json")):
        record = KernelComparisonRecord.read(path.read_bytes())
        comparison: dict[str, Any] = {
            "plans": [store.load_kernel(name)[0].plan for name in record.kernels]
        }
        comparison |= {"failure": record.failure, "lost": record.is_not_faster}
        if record.failure is None:
            times = (statistics.median(row) for row in (record.inductor, record.stitched))
            comparison |= dict(zip(("inductor_s", "stitched_s"), times, strict=True))
        comparisons.append(comparison)
    return comparisons


def report_record(report: GraphReport) -> dict[str, Any]:
    """Record of a graph's report for a result file, with all samples."""
    import msgspec  # lazy, because nostall's first step must include it

    return {
        "state": report.state,
        "reason": report.reason,
        "kernels": report.kernels,
        "left": report.kept_in_inductor,
        "from_store": report.from_store,
        "refused": [[why, what, count] for (why, what), count in report.not_fused.items()],
        "compared": msgspec.to_builtins(report.comparison),
        "seconds": report.seconds,
        "cpu_seconds": report.cpu_seconds,
        "not_ahead": report.local_only_reason,
        "products": report.products,
        "changed": [*report.attention, *report.loss, *report.chunked],
        "unchanged": report.left,
    }


# -- steady state ----------------------------------------------------------------------------------


def measure_interleaved(model: Model, setup: Setup, store: Callable[..., None]) -> None:
    """Time all methods of a part in one process.  ``store`` is called with the results so far."""
    names = INTERLEAVED[setup.part]
    order = [*names[setup.turn :], *names[: setup.turn]]
    result: dict[str, Any] = {"made": order}
    programs: dict[str, Program] = {}
    result["starts_in_one_process"] = starts = dict[str, Any]()
    for name in order:
        programs[name] = program = Program(model, METHODS[name], setup)
        stopwatch = Stopwatch()
        program.compile()
        program.step()
        synchronize(setup.device)
        starts[name] = stopwatch.elapsed("first")
        # Only nostall's programs have to choose.
        program.run_until_chosen(MAX_CHOICE_SHARE * setup.seconds)
        starts[name] |= {"chosen": program.has_chosen, **stopwatch.elapsed("until_chosen")}
        with gpu_turn():
            for _ in range(WARM_UP):
                program.step()
            synchronize(setup.device)
    with gpu_turn():
        _measure_programs(programs, setup, result, store)


def _measure_programs(
    programs: Mapping[str, Program],
    setup: Setup,
    result: dict[str, Any],
    store: Callable[..., None],
) -> None:
    """Time programs that have chosen, and add the times and kernels to ``result``."""
    names = INTERLEAVED[setup.part]
    result["graphs"] = {
        name: [report_record(report) for report in program.reports]
        for name, program in programs.items()
        if program.reports
    }
    result["apart"] = {
        name: max_difference(program, programs[names[0]])
        for name, program in programs.items()
        if program.reports
    }
    result["looped"] = time_interleaved(
        {name: program.step for name, program in programs.items()}, setup, names[0]
    )
    store(**result)
    if setup.device == "cuda":
        result["peak_bytes"] = {name: program.peak_bytes() for name, program in programs.items()}
        result["state_bytes"] = programs[names[0]].state_bytes
        if setup.part in REPLAYED:
            result["replayed"] = time_replays(programs, setup)
            store(**result)
        result["kernels"] = {
            name: profile_kernels(program.step) for name, program in programs.items()
        }
    store(**result, complete=True)


def time_replays(programs: Mapping[str, Program], setup: Setup) -> dict[str, Any]:
    """Time whole steps as CUDA graphs, which excludes the host; names methods that fail."""
    graphs: dict[str, CapturedStep] = {}
    failed: dict[str, str] = {}
    for name, program in programs.items():
        try:
            graphs[name] = capture_step(program.step)
        except Exception as error:  # any failure of a capture; measure the other methods
            failed[name] = f"{type(error).__name__}: {error}"
    base = INTERLEAVED[setup.part][0]
    replays = {name: captured.replay for name, captured in graphs.items()}
    return {"failed": failed, **(time_interleaved(replays, setup) if base in replays else {})}


def max_difference(program: Program, base: Program) -> float:
    """Largest relative difference of the result and gradients of two programs with equal seeds.

    Differences are root mean squares.
    """
    results_of_program, results_of_base = results(program), results(base)
    pairs = [
        (a.double(), b.double()) for a, b in zip(results_of_program, results_of_base, strict=True)
    ]
    # Gradients that are only rounding error are compared with the largest gradient.
    floor = 0.1 * max(float(b.square().mean().sqrt()) for _, b in pairs[1:] or pairs)
    return max(
        float((a - b).square().mean().sqrt()) / max(float(b.square().mean().sqrt()), floor)
        for a, b in pairs
    )


def results(program: Program) -> Sequence[Tensor]:
    """Result and gradients of a step with a fixed seed."""
    torch.manual_seed(1)
    result = program.step().clone()
    return [
        result,
        *(
            parameter.grad.clone()
            for parameter in program.module.parameters()
            if parameter.grad is not None
        ),
    ]


# -- one process -----------------------------------------------------------------------------------


def main() -> None:
    setup = Setup(**json.loads(sys.argv[1]))
    if setup.device == "cpu":
        from tools.interpreters.triton_interpreter import prepare

        prepare()
    model, out = ZOOS[setup.zoo](setup.small)[setup.model], Path(setup.out)
    gpu = torch.cuda.get_device_name() if setup.device == "cuda" else None
    about = {"model": setup.model, "part": setup.part, "gpu": gpu, "torch": torch.__version__}
    about |= {"dtype": setup.dtype, "small": setup.small}

    def store(**fields: Any) -> None:
        # A lazy import: it imports nostall, which must be part of nostall's first step.
        from benchmarks.harness.result_file import save

        save(out, **about, **fields)

    if setup.part in (PAIRED, AGAIN):
        runs = json.loads(out.read_text())["runs"] if out.exists() else []
        runs = append_first_step(model, setup, runs)
        store(runs=runs, complete=len(runs) == len(START_METHODS[setup.part]) * setup.pairs)
    elif setup.part in STARTS:
        previous = json.loads(out.read_text())["starts"] if setup.state == "warm" else {}
        starts = {**previous, setup.state: measure_start(model, setup)}
        store(starts=starts, complete=setup.state == "warm")
    elif setup.part in PROCESS_COUNTS:
        rounds = json.loads(out.read_text())["rounds"] if out.exists() else []
        latest: dict[str, Any] = {}
        measure_interleaved(model, setup, lambda **fields: latest.update(fields))
        complete = latest.pop("complete") and len(rounds) + 1 == PROCESS_COUNTS[setup.part]
        store(rounds=[*rounds, latest], complete=complete)
    else:
        measure_interleaved(model, setup, store)


if __name__ == "__main__":
    main()
