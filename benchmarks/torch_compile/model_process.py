"""Process of ``benchmarks.torch_compile.models``: starts one method or times several methods.

    python -m benchmarks.torch_compile.model_process '{"model": "dien-train", "part": ...}'

The argument is a :class:`Setup` as JSON.  Results are written after every stage, so that a fault in
a later stage does not lose them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.torch_compile.gpu_lock import gpu_turn
from benchmarks.torch_compile.model_zoo import Model, models
from benchmarks.torch_compile.step_timing import (
    CapturedStep,
    Stopwatch,
    capture_step,
    profile_kernels,
    synchronize,
    time_interleaved,
)
from benchmarks.torch_compile.user_models import user_models

if TYPE_CHECKING:
    from nostall.attach.torch_compile.report import GraphReport

AUTOTUNE, GRAPHS = "max-autotune-no-cudagraphs", "reduce-overhead"
STITCHED_ALWAYS = {"nostall.choose": "stitched"}
MAX_CHOICE_SHARE = 0.6
"""Largest share of a process's time until the backend has chosen."""
_PROGRAMS = itertools.count()
WARM_UP = 3
MAX_LONGEST_STEPS = 8
"""Number of longest steps that are recorded."""


@dataclass(frozen=True)
class Method:
    """How a model runs: ``backend`` of torch.compile or ``eager``, mode, and nostall's options."""

    backend: str
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


METHODS = {
    "eager": Method("eager"),
    "compile": Method("inductor"),
    "nostall": Method("nostall"),
    "always": Method("nostall", None, STITCHED_ALWAYS),
    "compile, autotuned": Method("inductor", AUTOTUNE),
    "nostall, autotuned": Method("nostall", AUTOTUNE),
    "compile, graphs": Method("inductor", GRAPHS),
    "nostall, graphs": Method("nostall", GRAPHS),
    "untouched, graphs": Method("nostall", GRAPHS, {"nostall.choose": "inductor"}),
    "compile, again": Method("inductor"),
    "compile, autotuned, again": Method("inductor", AUTOTUNE),
    "compile, graphs, again": Method("inductor", GRAPHS),
}
INTERLEAVED = {
    "steady": ("compile", "nostall", "always", "eager"),
    "gain": ("compile", "nostall", "compile, again"),
    "autotuned": ("compile, autotuned", "nostall, autotuned", "compile, autotuned, again"),
    "graphs": (
        *("compile, graphs", "nostall, graphs"),
        *("untouched, graphs", "compile, graphs, again"),
    ),
}
"""Methods that are timed interleaved, by part; all are compared with the first."""
REPLAYED = ("steady", "gain")
"""Parts that also time whole steps as CUDA graphs."""
ZOOS = {"parts": models, "users": user_models}
"""Sets of models: parts of published models, and whole models as users write them."""
PROCESS_COUNTS = {"graphs": 4}
"""Number of processes of a part (default 1).

Each makes the copies of the model in another order, because equal copies are not equally fast.
"""
STARTS = {"inductor": "compile", "nostall": "nostall"}
"""Parts that measure the start of a program, with their method."""
PAIRED, AGAIN = "first", "again"
"""Parts that start programs of several methods alternately, one process for each start.

PAIRED has empty caches; AGAIN has the caches that the parts in ``STARTS`` have filled.
"""
START_METHODS = {PAIRED: STARTS, AGAIN: {**STARTS, "always": "always"}}
"""Methods of these parts; with warm caches also the stitched version, even if it was not chosen."""


@dataclass(frozen=True)
class Setup:
    """Settings of one process."""

    model: str
    part: str
    out: str
    state: str = "cold"
    """State of the caches; in paired parts the method to start."""
    device: str = "cuda"
    dtype: str = "bfloat16"
    small: bool = False
    seconds: float = 200.0
    """Time limit of the process."""
    measured_s: float = 4.0
    """Seconds for each set of samples."""
    recorded: bool = True
    """Whether a paired start is recorded; otherwise it only reads files into memory."""
    pairs: int = 2
    """Number of pairs of first steps in all."""
    zoo: str = "parts"
    """The set that has the model (:data:`ZOOS`)."""
    turn: int = 0
    """Number of the process of a part in :data:`ROUNDS`; rotates the order of the copies."""


class Program:
    """A model with one method; :meth:`step` is one iteration of a user's loop."""

    def __init__(self, model: Model, method: Method, setup: Setup) -> None:
        torch.manual_seed(0)
        module, inputs = model.make()
        dtype = getattr(torch, setup.dtype)
        self.module: nn.Module = module.to(setup.device, dtype).train(model.train)
        self.inputs = [x.to(setup.device, dtype if x.is_floating_point() else None) for x in inputs]
        if model.varies:
            torch._dynamo.mark_dynamic(self.inputs[0], 0)
        self.train = model.train
        self.reports: list[GraphReport] = []
        self._method, self._setup = method, setup
        self._function = with_own_code(self.module)
        self._wanted: Tensor | None = None

    def compile(self) -> None:
        """Call torch.compile as a user does, including the imports that this needs."""
        method = self._method
        if method.backend == "inductor":
            self._function = torch.compile(self._function, mode=method.mode)
        elif method.backend == "nostall":
            backend = nostall_backend(self._setup.device)
            self.reports = backend.reports
            # torch.compile accepts either a mode or options.
            mode = torch._inductor.list_mode_options(method.mode) if method.mode else {}
            tuning = {} if self._setup.device == "cuda" else {"nostall.tuned_plans": 0}
            options = {**mode, **tuning, **method.options}
            self._function = torch.compile(self._function, backend=backend, options=options)

    def step(self) -> Any:
        """Run one step; returns the model's result."""
        if self._setup.device == "cuda":
            # With CUDA graphs Inductor must be told that the previous result may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        if not self.train:
            with torch.no_grad():
                return self._function(*self.inputs)
        self.module.zero_grad(set_to_none=True)
        result = self._function(*self.inputs)
        if self._wanted is None:
            draw = torch.Generator(result.device).manual_seed(0)
            self._wanted = torch.randn(result.shape, device=result.device, generator=draw)
        # After a norm the gradient of the mean square alone is only rounding error.
        (result.float() - self._wanted).square().mean().backward()
        return result.detach()

    @property
    def has_chosen(self) -> bool:
        """Whether the backend has chosen a version for every graph."""
        return all(report.reason for report in self.reports)

    def run_until_chosen(self, seconds: float) -> list[float]:
        """Run steps until the backend has chosen, at most ``seconds``; returns their times."""
        step_seconds, deadline = list[float](), time.perf_counter() + seconds
        while not self.has_chosen and time.perf_counter() < deadline:
            with gpu_turn():
                start = time.perf_counter()
                self.step()
                synchronize(self._setup.device)
            step_seconds.append(time.perf_counter() - start)
        return step_seconds


def nostall_backend(device: str) -> Any:
    """The backend; on a CPU with recorded times that let stitched versions win.

    Measured times would not, because Triton's interpreter is slow.
    """
    from nostall.attach.torch_compile.backend import Backend

    if device == "cuda":
        return Backend()
    from nostall.gpu.clock import RecordedClock

    faster = RecordedClock({"*": [[2.0] * 12, [1.0] * 12, [2.0] * 12]})
    return Backend(faster, faster)


def with_own_code(module: nn.Module) -> Callable[..., Any]:
    """A function with its own code object that calls the module.

    Dynamo caches compiled code by code object, and a call checks the guards of all entries, so the
    methods must not share one.  The function is in a module whose name is the same in every run,
    because PyTorch's cache keys contain the source of the inputs.
    """
    name = f"{__name__}.program_{next(_PROGRAMS)}"
    sys.modules[name] = scope = ModuleType(name)
    vars(scope)["module"] = module
    exec("def call(*inputs):\n    return module(*inputs)\n", vars(scope))
    call: Callable[..., Any] = vars(scope)["call"]
    return call


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
        from nostall.fusion.testing.triton_interpreter import prepare

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
