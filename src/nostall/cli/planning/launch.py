"""The command ``nostall launch``: train by a plan and compare measured with modelled times."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from nostall.cli.options.given_options import NO_CONTEXT, GivenContext, refuse_options
from nostall.cli.planning.trial import (
    TABLE,
    Trial,
    candidate_files,
    listed_candidates,
    table_rows,
    try_plans,
)
from nostall.cli.terminal.console import Format, FormatOption, err, out, show_json, show_table
from nostall.cli.terminal.progress import working
from nostall.core.errors import BadInput
from nostall.core.text.plurals import pluralize
from nostall.core.text.suggest import unknown
from nostall.parallel.execute.parts.any_plan import load_any_plan
from nostall.parallel.plan_file import load_planned_module
from nostall.parallel.sharding.cost.device_mesh import mesh_text
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.plan_file import PlanFile
from nostall.parallel.simulate import simulated_s
from nostall.report.units import Scale

if TYPE_CHECKING:
    from nostall.parallel.execute.launcher.launch import Nodes
    from nostall.parallel.execute.run_config import Engine, RunConfig, RunResult

ENGINES = ("auto", "p2p", "torch")

PlanArgument = Annotated[Path, typer.Argument(help="Plan file of `nostall plan --out`.")]
ModuleOption = Annotated[
    str | None,
    typer.Option(
        help="Module as path.py:build; default: the module that was planned, if it is in this "
        "folder or in that of the plan."
    ),
]
StepsOption = Annotated[int, typer.Option(min=1, help="Iterations.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu or cuda; default: cuda if there is a GPU.")
]
EngineOption = Annotated[
    str,
    typer.Option(
        help="torch (PyTorch's own pipelining, equal replication), p2p (any plan), or auto: "
        "torch if it supports the plan, else p2p."
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option(help="Train in a single process, too, and compare losses and gradients."),
]
DeadlineOption = Annotated[
    float, typer.Option(help="Seconds that a rank may wait for another rank.")
]
NodesOption = Annotated[
    int, typer.Option(min=1, help="Number of machines; run the same command on each.")
]
EndpointOption = Annotated[
    str | None, typer.Option(help="HOST:PORT of the first machine; needed with `--nodes` above 1.")
]
TryOption = Annotated[
    int | None,
    typer.Option(
        "--try",
        min=2,
        metavar="N",
        help="Measure N steps of the plan and of the candidates in its file (ddp, fsdp2, tp), and "
        "train by the fastest.",
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Let Inductor compile what a rank computes between collectives; the first iteration "
        "takes longer.",
    ),
]
CaptureOption = Annotated[
    bool,
    typer.Option(
        "--capture",
        help="Run an iteration as one CUDA graph; where that is not possible, say why.",
    ),
]
LogsOption = Annotated[
    Path | None,
    typer.Option(help="Folder for the ranks' output; default: it is kept only after a failure."),
]


_NOT_COMPARED = (
    "note: the plan was not made from {target}, so the gradients of its layers were not compared "
    "with those of the module; run once with --check"
)


def launch(
    plan: PlanArgument,
    module: ModuleOption = None,
    steps: StepsOption = 10,
    device: DeviceOption = None,
    engine: EngineOption = "auto",
    check: CheckOption = False,
    deadline: DeadlineOption = 300.0,
    nodes: NodesOption = 1,
    endpoint: EndpointOption = None,
    try_steps: TryOption = None,
    compile: CompileOption = False,
    capture: CaptureOption = False,
    logs: LogsOption = None,
    format: FormatOption = Format.TABLE,
    context: GivenContext = NO_CONTEXT,
) -> None:
    """Train by a plan and measure each iteration.

    torchrun's agent starts one process per GPU. Exit code 1 if `--check` finds a difference, 3 if
    a rank fails or hangs.
    """
    if err.is_terminal:
        err.print(f"nostall: trains by {plan}, {pluralize(steps, 'iteration')}")
    _check_options(engine, deadline, nodes, endpoint, try_steps)
    if try_steps is not None:
        listed_candidates(plan)
    described = _describe(plan, context)
    target = _target_module(plan, module or described.module)
    if module is None:
        _announce_import(plan, target)
    from nostall.parallel.execute.run_config import RunConfig, resolve_device

    with working("loading PyTorch"):
        where, runner = resolve_device(device), cast("Engine", engine)
    config = RunConfig(
        str(plan.resolve()), target, steps, where, runner, check, deadline, compile, capture
    )
    from nostall.parallel.execute.launcher.launch import Nodes

    machines = Nodes(nodes, endpoint, plan.stem) if endpoint else Nodes()
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="nostall-try-") as folder:
        if try_steps is not None:
            trials = _try(config, try_steps, described.gpus, Path(folder))
            config = replace(config, plan=str(trials[0].path))
            described = replace(_describe(trials[0].path, context), module=described.module)
        result = _run(config, described.gpus, logs, machines)
    if result is None:
        out.print("the ranks of this machine are done; the machine of rank 0 prints the result")
        return
    _show(result, described, format, trials)
    for note in result.notes:
        err.print(f"note: {note}")
    if target != described.module and not check:
        err.print(_NOT_COMPARED.format(target=target))
    if not result.is_equal:
        raise typer.Exit(1)


def _describe(path: Path, context: GivenContext) -> _DescribedPlan:
    """What the command prints of a plan of any kind; refuses options that do not concern it."""
    plan = load_any_plan(path)
    if isinstance(plan, tuple):
        workload, stages, _ = plan
        return _DescribedPlan(
            f"{workload.profile.name} on {workload.cluster.name}",
            f"{stages.split}, order {stages.policy}",
            load_planned_module(path),
            len(workload.cluster),
            simulated_s(workload, stages),
            {"split": stages.split, "policy": stages.policy},
        )
    reason = "is for pipeline plans, and this one is none; leave it out"
    refuse_options(context, ("engine",), reason)
    fields = {"planner": plan.planner}
    if isinstance(plan, PlanFile):
        fields["mesh"] = mesh_text(plan.mesh)
        text = f"{plan.planner}, mesh {fields['mesh']}"
    elif isinstance(plan, HybridFile):
        fields["split"] = plan.split
        text = f"{plan.planner}, GPUs of the stages {plan.split}"
    else:
        text = f"PyTorch's {plan.engine}"
    title = f"{plan.module} on {plan.cluster.name}"
    return _DescribedPlan(
        title, text, plan.module, len(plan.cluster), plan.predicted_step_s, fields
    )


def _try(config: RunConfig, steps: int, gpus: int, folder: Path) -> list[Trial]:
    """Trials of the plan and its candidates, the fastest first."""
    from nostall.parallel.execute.launcher.launch import Nodes

    def run(tried: RunConfig) -> RunResult:
        result = _run(tried, gpus, None, Nodes())
        assert result is not None  # on one machine
        return result

    return try_plans(config, candidate_files(Path(config.plan), folder), steps, run)


def _check_options(
    engine: str, deadline: float, nodes: int, endpoint: str | None, try_steps: int | None
) -> None:
    if try_steps is not None and nodes > 1:
        raise BadInput(f"--try {try_steps} is for one machine; leave --nodes {nodes} out")
    if engine not in ENGINES:
        raise BadInput(unknown("engine", engine, ENGINES))
    if not 0 < deadline < float("inf"):
        raise BadInput(f"--deadline {deadline}; allowed is a number of seconds above 0")
    if nodes > 1 and endpoint is None:
        raise BadInput(f"--nodes {nodes} needs --endpoint HOST:PORT, the same on each machine")
    if nodes == 1 and endpoint is not None:
        raise BadInput(
            f"--endpoint {endpoint} is for several machines; a run on one machine listens on "
            "127.0.0.1 only; leave it out, or give --nodes as well"
        )


@dataclass(frozen=True)
class _DescribedPlan:
    """What the command prints of a plan and needs to start it."""

    title: str
    text: str
    """The plan in a few words."""
    module: str | None
    """``path.py:build``; None if the plan names none."""
    gpus: int
    modelled_s: float
    """Modelled seconds of an iteration."""
    fields: dict[str, str]
    """Fields of the JSON document."""


def _target_module(plan: Path, target: str | None) -> str:
    """The ``path.py:build`` to train; raises :class:`BadInput` if it is unknown or has no file."""
    if target is None:
        raise BadInput(
            f"{plan} was made from a profile file and names no module; give --module path.py:build"
        )
    file = Path(target.rpartition(":")[0])
    if file.suffix != ".py" or not file.is_file():
        raise BadInput(f"module {target!r}; allowed is path.py:build with an existing file")
    return target


def _announce_import(plan: Path, target: str) -> None:
    """Say which module of the plan is imported; its code runs, and a plan may come from others.

    Raises :class:`BadInput` if it is neither in the current folder nor in that of the plan, and
    belongs to another user: the user then has to name it.
    """
    file = Path(target.rpartition(":")[0]).resolve()
    is_near = any(file.is_relative_to(own) for own in (Path.cwd(), plan.resolve().parent))
    if not is_near and file.stat().st_uid != os.getuid():
        raise BadInput(
            f"{plan} names the module {target}, whose code would run; it belongs to another user, "
            "and is neither in this folder nor in that of the plan; if you trust it, give "
            f"--module {shlex.quote(target)}"
        )
    err.print(f"nostall: imports {target}, which {plan} names")


def _run(config: RunConfig, gpus: int, logs: Path | None, nodes: Nodes) -> RunResult | None:
    """Run all ranks of this machine; without ``logs``, a successful run leaves no files."""
    folder = logs or Path(tempfile.mkdtemp(prefix="nostall-launch-"))
    with working(f"training on {pluralize(gpus, 'rank')}"):
        from nostall.parallel.execute.launcher.launch import launch_ranks

        result = launch_ranks(config, gpus, folder, nodes)
    if logs is None:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _show(result: RunResult, plan: _DescribedPlan, format: Format, trials: Sequence[Trial]) -> None:
    """Print measured and modelled times.

    The measured iteration is a median; it leaves out the first iteration if there are several.
    """
    counted = result.seconds[1:] or result.seconds
    measured = statistics.median(counted)
    document: dict[str, Any] = {
        "measured_iteration_s": measured,
        "predicted_iteration_s": plan.modelled_s,
        "kind": "measured",
        **plan.fields,
        **{name: _finite(value) for name, value in asdict(result).items()},
        "equal": result.is_equal if result.worst_gradient is not None else None,
    }
    if trials:
        document["trials"] = [trial.row for trial in trials]
    if format is Format.JSON:
        show_json(document)
        return
    if trials:
        show_table("steps in turns, measured; the first is kept", TABLE, table_rows(trials))
    time = Scale("s", measured)
    rows = [
        (step, f"{loss:.6g}", time(seconds))
        for step, (loss, seconds) in enumerate(zip(result.losses, result.seconds, strict=True))
    ]
    show_table(plan.title, ("step", "loss", "measured"), rows)
    out.print(
        f"measured iteration {time(measured)} (median), modelled {time(plan.modelled_s)}: "
        f"{plan.text}, engine {result.engine}"
    )
    if result.collectives:
        calls = [f"{count} {kind}" for kind, count in sorted(result.collectives.items())]
        out.print(f"collectives of a step: {', '.join(calls)}")
    for name, error in (("gradients", result.worst_gradient), ("losses", result.worst_loss)):
        if error is not None:
            out.print(f"{name} {_difference(error)}")


def _difference(error: float) -> str:
    """Comparison of a run with training in a single process; ``error`` is relative to 1."""
    if math.isinf(error):
        return "DIFFERENT from those of a single process: a value is not a finite number"
    word = "equal to" if error <= 1 else "DIFFERENT from"
    return f"{word} those of a single process: largest difference {error:.3g} of the tolerance"


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have (NaN and infinities)."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
