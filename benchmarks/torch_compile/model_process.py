"""One process of ``benchmarks.torch_compile.models``: a model by one method from its first step on, or by
several side by side.

    python -m benchmarks.torch_compile.model_process '{"model": "bert-train", "part": "steady", ...}'

The argument is a :class:`Setup`.  What is found is written after every stage, so that a fault in
a later one costs only that.
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

from benchmarks.torch_compile.model_zoo import Model, models
from benchmarks.torch_compile.step_timing import (
    Captured,
    Watch,
    captured,
    in_turns,
    kernels_of,
    synchronized,
)

if TYPE_CHECKING:
    from nostall.attach.torch_compile.report import GraphReport

AUTOTUNE, GRAPHS = "max-autotune-no-cudagraphs", "reduce-overhead"
ALWAYS = {"nostall.choose": "stitched"}
MOST_SHARE = 0.6
"""Of the time of a process, what may pass until the backend has chosen."""
_PROGRAMS = itertools.count()
WARM_UP = 3
LONGEST = 8
"""Steps that are named."""


@dataclass(frozen=True)
class Method:
    """How a model runs: ``backend`` of torch.compile (or ``eager``), its mode, our options."""

    backend: str
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


METHODS = {
    "eager": Method("eager"),
    "compile": Method("inductor"),
    "nostall": Method("nostall"),
    "always": Method("nostall", None, ALWAYS),
    "compile, autotuned": Method("inductor", AUTOTUNE),
    "nostall, autotuned": Method("nostall", AUTOTUNE),
    "compile, graphs": Method("inductor", GRAPHS),
    "nostall, graphs": Method("nostall", GRAPHS),
    "untouched, graphs": Method("nostall", GRAPHS, {"nostall.choose": "inductor"}),
    "compile, autotuned, again": Method("inductor", AUTOTUNE),
    "compile, graphs, again": Method("inductor", GRAPHS),
}
SIDE_BY_SIDE = {
    "steady": ("compile", "nostall", "always", "eager"),
    "autotuned": ("compile, autotuned", "nostall, autotuned", "compile, autotuned, again"),
    "graphs": (
        *("compile, graphs", "nostall, graphs"),
        *("untouched, graphs", "compile, graphs, again"),
    ),
}
"""Parts in which methods are timed in turns; everything is compared with the first one."""
ROUNDS = {"graphs": 4}
"""Parts in so many processes: each makes the models in another order, as copies of a model are not
equally fast."""
FIRST = {"inductor": "compile", "nostall": "nostall"}
"""Parts that are about how a program starts, and by which method."""
PAIRED, AGAIN = "first", "again"
"""The parts that start programs by several methods in turns, one process for each: with empty
caches, and with those that the two parts have left."""
STARTED = {PAIRED: FIRST, AGAIN: {**FIRST, "always": "always"}}
"""By which methods: where caches are warm also by the stitched version, whatever was chosen."""


@dataclass(frozen=True)
class Setup:
    """``seconds``: that the process may take; ``measured_s``: for each set of times; ``state``: of
    the caches, or who is to start of a pair; ``recorded``: whether that is looked at; ``pairs``:
    that there are in all; ``turn``: of a part in rounds."""

    model: str
    part: str
    out: str
    state: str = "cold"
    device: str = "cuda"
    dtype: str = "bfloat16"
    small: bool = False
    seconds: float = 200.0
    measured_s: float = 4.0
    recorded: bool = True
    pairs: int = 2
    turn: int = 0


class Program:
    """A model by one method; ``step`` is what a user's loop does."""

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
        self._function = own_code(self.module)
        self._wanted: Tensor | None = None

    def compile(self) -> None:
        """As a user does it; what has to be imported for that is part of it."""
        method = self._method
        if method.backend == "inductor":
            self._function = torch.compile(self._function, mode=method.mode)
        elif method.backend == "nostall":
            backend = nostall_backend(self._setup.device)
            self.reports = backend.reports
            # PyTorch takes either a mode or options.
            mode = torch._inductor.list_mode_options(method.mode) if method.mode else {}
            race = {} if self._setup.device == "cuda" else {"nostall.tuned_plans": 0}
            options = {**mode, **race, **method.options}
            self._function = torch.compile(self._function, backend=backend, options=options)

    def step(self) -> Any:
        """One step; the result of the model."""
        if self._setup.device == "cuda":
            # In modes with CUDA graphs Inductor has to know that the last result may go.
            torch.compiler.cudagraph_mark_step_begin()
        if not self.train:
            with torch.no_grad():
                return self._function(*self.inputs)
        self.module.zero_grad(set_to_none=True)
        result = self._function(*self.inputs)
        if self._wanted is None:
            draw = torch.Generator(result.device).manual_seed(0)
            self._wanted = torch.randn(result.shape, device=result.device, generator=draw)
        # Behind a norm the square alone has no gradient but roundings.
        (result.float() - self._wanted).square().mean().backward()
        return result.detach()

    @property
    def chosen(self) -> bool:
        """Whether every graph has settled for a version."""
        return all(report.reason for report in self.reports)

    def until_chosen(self, seconds: float) -> list[float]:
        """Seconds of each step until then, or until no more begins after ``seconds``."""
        taken, end = list[float](), time.perf_counter() + seconds
        while not self.chosen and (began := time.perf_counter()) < end:
            self.step()
            synchronized(self._setup.device)
            taken.append(time.perf_counter() - began)
        return taken


def nostall_backend(device: str) -> Any:
    """On a processor with recorded times by which stitched versions win: interpreted none does."""
    from nostall.attach.torch_compile.backend import Backend

    if device == "cuda":
        return Backend()
    from nostall.gpu.clock import RecordedClock

    faster = RecordedClock({"*": [[2.0] * 12, [1.0] * 12, [2.0] * 12]})
    return Backend(faster, faster)


def own_code(module: nn.Module) -> Callable[..., Any]:
    """The module behind a function with code of its own: Dynamo keeps what it compiled by code, and
    the methods would wait for each other's guards.  It stands in a file of its own, so to say, of
    equal name in every run: PyTorch's caches know graphs by where inputs come from."""
    name = f"{__name__}.program_{next(_PROGRAMS)}"
    sys.modules[name] = scope = ModuleType(name)
    vars(scope)["module"] = module
    exec("def call(*inputs):\n    return module(*inputs)\n", vars(scope))
    found: Callable[..., Any] = vars(scope)["call"]
    return found


# -- how a program starts --------------------------------------------------------------------------


def started(model: Model, part: str, setup: Setup) -> tuple[Program, Watch, dict[str, Any]]:
    """A program behind its first step, and what that took with all that is imported for it."""
    program = Program(model, METHODS[STARTED[AGAIN][part]], setup)
    with torch.no_grad():
        # Contexts and libraries of the GPU are there.
        ones = torch.ones(8, 8, device=setup.device, dtype=getattr(torch, setup.dtype))
        ones.mm(ones)
    synchronized(setup.device)
    watch = Watch()
    program.compile()
    program.step()
    synchronized(setup.device)
    return program, watch, watch.said("first")


def first(model: Model, setup: Setup) -> dict[str, Any]:
    """First step, steps until the choice, and what the backend says of itself."""
    program, watch, found = started(model, setup.part, setup)
    steps = program.until_chosen(MOST_SHARE * setup.seconds)
    return {
        **found,
        "chosen": program.chosen,
        **watch.said("until_chosen"),
        "steps": 1 + len(steps),
        **waited(steps),
        "graphs": [told(report) for report in program.reports],
        "duels": duels() if program.reports else [],
    }


def waited(steps: Sequence[float]) -> dict[str, Any]:
    """What the program waited for while it ran until the choice: seconds of the longest steps, and
    of all together beyond what steps take otherwise."""
    if not steps:
        return {}
    usual = statistics.median(steps)
    longest = [one for one in sorted(steps, reverse=True)[:LONGEST] if one > 2 * usual]
    held = sum(max(0.0, one - usual) for one in steps)
    return {"usual_step_s": usual, "longest_steps_s": longest, "held_up_s": held}


def one_of_pairs(model: Model, setup: Setup, before: list[Any]) -> list[Any]:
    """A first step and nothing else, behind those of ``before``."""
    _, _, found = started(model, setup.state, setup)
    return [*before, {"method": setup.state, **found}] if setup.recorded else before


def duels() -> list[dict[str, Any]]:
    """Every kernel that was timed beside what Inductor makes of the same operators."""
    from nostall.attach.torch_compile.store.kernel_store import KernelStore
    from nostall.attach.torch_compile.store.records import KernelComparisonRecord

    kept, found = KernelStore(), []
    for place in sorted((kept.folder / "duels").glob("*.json")):
        record = KernelComparisonRecord.read(place.read_bytes())
        one: dict[str, Any] = {"plans": [kept.load_kernel(name)[0].plan for name in record.kernels]}
        one |= {"failure": record.failure, "lost": record.is_not_faster}
        if record.failure is None:
            times = (statistics.median(row) for row in (record.inductor, record.stitched))
            one |= dict(zip(("inductor_s", "stitched_s"), times, strict=True))
        found.append(one)
    return found


def told(report: GraphReport) -> dict[str, Any]:
    """A report for a result file; samples stay in it."""
    import msgspec  # nostall's first step imports it

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
    }


# -- how it runs -----------------------------------------------------------------------------------


def side_by_side(model: Model, setup: Setup, keep: Callable[..., None]) -> None:
    """All methods of a part in one process.  ``keep`` is called with what is known so far."""
    names = SIDE_BY_SIDE[setup.part]
    made = [*names[setup.turn :], *names[: setup.turn]]
    found: dict[str, Any] = {"made": made}
    programs: dict[str, Program] = {}
    for name in made:
        programs[name] = program = Program(model, METHODS[name], setup)
        program.compile()
        program.step()
        # Of a part one program has to choose; the others have chosen.
        program.until_chosen(MOST_SHARE * setup.seconds)
        for _ in range(WARM_UP):
            program.step()
    synchronized(setup.device)
    found["graphs"] = {n: [told(r) for r in p.reports] for n, p in programs.items() if p.reports}
    found["apart"] = {n: apart(p, programs[names[0]]) for n, p in programs.items() if p.reports}
    found["looped"] = in_turns({n: p.step for n, p in programs.items()}, setup, names[0])
    keep(**found)
    if setup.device == "cuda":
        if setup.part == "steady":
            found["replayed"] = replayed(programs, setup)
            keep(**found)
        found["kernels"] = {name: kernels_of(p.step) for name, p in programs.items()}
    keep(**found, complete=True)


def replayed(programs: Mapping[str, Program], setup: Setup) -> dict[str, Any]:
    """Whole steps as CUDA graphs: what the GPU takes, whatever the host does.  Methods that cannot
    be captured are named."""
    graphs: dict[str, Captured] = {}
    failed: dict[str, str] = {}
    for name, program in programs.items():
        try:
            graphs[name] = captured(program.step)
        except Exception as error:  # the others are worth measuring
            failed[name] = f"{type(error).__name__}: {error}"
    base = SIDE_BY_SIDE[setup.part][0]
    runs = {name: graph.replay for name, graph in graphs.items()}
    return {"failed": failed, **(in_turns(runs, setup) if base in runs else {})}


def apart(program: Program, base: Program) -> float:
    """The largest relative difference (norms) of a result or a gradient from those of another
    program, from equal random numbers."""
    ours, theirs = results(program), results(base)
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True)]
    # Gradients that are 0 but for rounding are compared with the largest.
    floor = 0.1 * max(float(b.square().mean().sqrt()) for _, b in pairs[1:] or pairs)
    return max(
        float((a - b).square().mean().sqrt()) / max(float(b.square().mean().sqrt()), floor)
        for a, b in pairs
    )


def results(program: Program) -> Sequence[Tensor]:
    torch.manual_seed(1)
    result = program.step().clone()
    return [result, *(p.grad.clone() for p in program.module.parameters() if p.grad is not None)]


# -- one process -----------------------------------------------------------------------------------


def main() -> None:
    setup = Setup(**json.loads(sys.argv[1]))
    if setup.device == "cpu":
        from nostall.fusion.testing.triton_interpreter import prepare

        prepare()
    model, out = models(setup.small)[setup.model], Path(setup.out)
    gpu = torch.cuda.get_device_name() if setup.device == "cuda" else None
    about = {"model": setup.model, "part": setup.part, "gpu": gpu, "torch": torch.__version__}
    about |= {"dtype": setup.dtype, "small": setup.small}

    def keep(**found: Any) -> None:
        from benchmarks.harness.result_file import (
            save,  # imports nostall, which is part of its first step
        )

        save(out, **about, **found)

    if setup.part in (PAIRED, AGAIN):
        runs = json.loads(out.read_text())["runs"] if out.exists() else []
        runs = one_of_pairs(model, setup, runs)
        keep(runs=runs, complete=len(runs) == len(STARTED[setup.part]) * setup.pairs)
    elif setup.part in FIRST:
        before = json.loads(out.read_text())["starts"] if setup.state == "warm" else {}
        starts = {**before, setup.state: first(model, setup)}
        keep(starts=starts, complete=setup.state == "warm")
    elif setup.part in ROUNDS:
        rounds = json.loads(out.read_text())["rounds"] if out.exists() else []
        last: dict[str, Any] = {}
        side_by_side(model, setup, lambda **found: last.update(found))
        complete = last.pop("complete") and len(rounds) + 1 == ROUNDS[setup.part]
        keep(rounds=[*rounds, last], complete=complete)
    else:
        side_by_side(model, setup, keep)


if __name__ == "__main__":
    main()
