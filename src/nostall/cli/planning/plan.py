"""The command ``nostall plan``: find a pipeline or sharding plan for a model on a cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from nostall.cli.options.given_options import NO_CONTEXT, GivenContext, refuse_options
from nostall.cli.planning.output import GanttOption, write_and_show
from nostall.cli.planning.sharding import (
    DEFAULT_HARDWARE,
    ONLY_FOR_SHARDING,
    SHARDING_PLANNERS,
    ExportOption,
    HardwareOption,
    MeshOption,
    PictureOption,
    ShardingRequest,
    device_rates,
    plan_sharding_command,
)
from nostall.cli.terminal.console import Format, FormatOption, QuietOption, err, show_table
from nostall.cli.terminal.progress import measured_compile_time, stage_bar, working
from nostall.core.errors import BadInput
from nostall.core.text.suggest import unknown
from nostall.parallel.cluster import load_cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.evaluation import PlanEvaluation, evaluate_plan
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.plan.workload import (
    ADAM_STATE_FACTOR,
    DEFAULT_GLOBAL_BATCH,
    DEFAULT_WEIGHT_GRADIENT_SHARE,
    PASSES_PER_S,
)
from nostall.parallel.planners import PLANNERS, Effort, make_plan
from nostall.parallel.planners.own_plan import (
    Change,
    OwnPlan,
    best_changes,
    own_workload,
    read_own_plans,
    stages_plan,
)
from nostall.parallel.profile import Profile, load_profile
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.torchtitan_export import export_stages
from nostall.report.units import Scale
from nostall.workload.hardware.file import load_hardware

_PYTHON_FILE = re.compile(r"\.py(:|$)")

ProfileArgument = Annotated[
    str,
    typer.Argument(
        help="Profile (PipeDream graph text or JSON), or a module to measure: path.py:build."
    ),
]
ClusterOption = Annotated[
    Path,
    typer.Option(help="Cluster file (TOML), or the output of `nvidia-smi topo -m`."),
]
ALL_PLANNERS = (*PLANNERS, *SHARDING_PLANNERS)
PlannerOption = Annotated[
    str,
    typer.Option(
        help=f"Pipeline planners: {', '.join(PLANNERS)}. Placements of tensors: "
        "sharding, automap. PyTorch's engines: ddp, fsdp2, tp."
    ),
]
GlobalBatchOption = Annotated[
    int, typer.Option(min=1, metavar="N", help="Samples of an iteration.")
]
MicroBatchOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Samples of a micro-batch; default: the profile's batch."
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Write the plan file, for `nostall simulate` and `launch`."),
]
SecondsOption = Annotated[
    float | None,
    typer.Option(help="Time limit of planning; default: depends on layers and GPUs."),
]
EvaluationsOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Maximum number of plans that a search simulates."),
]
SeedOption = Annotated[int, typer.Option(help="Random seed of searches.")]
RecomputeOption = Annotated[
    bool, typer.Option(help="Re-compute activations if no other plan fits into memory.")
]
StateFactorOption = Annotated[
    float,
    typer.Option(
        help="Bytes of parameters, gradients and optimiser state, per byte of parameters."
    ),
]
WeightGradientShareOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Assumed share of weight gradients in the backward time, if the profile lacks it.",
    ),
]
LayersOption = Annotated[
    str,
    typer.Option(
        help="Layers of a module: block (elements of lists), or leaf (also cut inside blocks)."
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Device that measures a module: cpu or cuda; default: cuda if available."),
]
FractionsOption = Annotated[
    bool,
    typer.Option(
        "--fractions",
        help="Allow a replica to run a fraction of a sample, as DAPPLE's planner does.",
    ),
]
MineOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Predict a plan of your own, and the changes worth most, in place of a search: "
        '"dp=2 pp=2 schedule=1F1B micro-batches=8", Megatron-LM\'s flags, or a file of these.',
    ),
]
GpuMemoryOption = Annotated[
    float | None,
    typer.Option(help="Memory of each GPU in GiB, if `--cluster` is the output of nvidia-smi."),
]


_NOT_FOR_OWN = ("planner", "micro_batch", "seconds", "evaluations", "seed", "recompute")
"""Options of searches, and the size of a micro-batch, which follows from their number."""


@dataclass(frozen=True)
class _ModuleProfiling:
    """Settings of the measurement of a module's profile."""

    micro_batch: int | None
    layers: str
    device: str | None
    quiet: bool


def plan(
    profile: ProfileArgument,
    cluster: ClusterOption,
    planner: PlannerOption = "nostall",
    global_batch: GlobalBatchOption = DEFAULT_GLOBAL_BATCH,
    micro_batch: MicroBatchOption = None,
    out_file: OutOption = None,
    gantt: GanttOption = None,
    seconds: SecondsOption = None,
    evaluations: EvaluationsOption = None,
    seed: SeedOption = 0,
    recompute: RecomputeOption = True,
    state_factor: StateFactorOption = ADAM_STATE_FACTOR,
    weight_gradient_share: WeightGradientShareOption = DEFAULT_WEIGHT_GRADIENT_SHARE,
    layers: LayersOption = "block",
    device: DeviceOption = None,
    gpu_memory: GpuMemoryOption = None,
    fractions: FractionsOption = False,
    mine: MineOption = None,
    mesh: MeshOption = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    export: ExportOption = None,
    picture: PictureOption = None,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
    context: GivenContext = NO_CONTEXT,
) -> None:
    """Find a pipeline plan, or the placement of each tensor.

    A pipeline plan has stages, GPUs, replication and micro-batch order. The planners sharding and
    automap cut tensors instead. Times of a plan are modelled.
    """
    if err.is_terminal and not quiet:
        err.print(f"nostall: plans {profile} on the GPUs of {cluster}")
    _check_options(planner, seconds)
    if mine is not None and planner in SHARDING_PLANNERS:
        refuse_options(context, ("mine",), "is for plans of stages; leave --planner out")
    module = profile if _PYTHON_FILE.search(profile) else None
    if planner in SHARDING_PLANNERS:
        if module is None:
            raise BadInput(
                f"the planner {planner} needs a module, and {profile} is a profile; give "
                "path.py:build"
            )
        request = ShardingRequest(
            module,
            load_cluster(cluster, gpu_memory),
            mesh,
            hardware,
            global_batch,
            state_factor,
            seconds,
            planner,
            seed,
            micro_batch,
        )
        plan_sharding_command(
            request,
            out_file,
            format,
            quiet=quiet,
            context=context,
            export=export,
            picture=picture,
        )
        return
    gpus = load_cluster(cluster, gpu_memory)
    plans = _own_plans(mine, len(gpus), global_batch, context)
    _refuse_unused(context, planner, module, has_groups=any(own.tensor > 1 for _, own in plans))
    if plans:
        global_batch = plans[0][1].global_batch or global_batch
        micro_batch = max(1, global_batch // plans[0][1].micro_batches)
    profiling = _ModuleProfiling(micro_batch, layers, device, quiet)
    workload = Workload(
        _measure(module, profiling) if module else load_profile(Path(profile)),
        gpus,
        global_batch,
        micro_batch,
        state_factor,
        weight_gradient_share,
        fractions,
    )
    changes: list[Change] | None = None
    if plans:
        grouped = _Grouped(workload, module, device_rates(load_hardware(hardware)))
        if any(own.tensor > 1 for _, own in plans) and (out_file or export):
            raise BadPlan("a plan with tp is predicted, not run; leave --out and --export out")
        evaluation, changes = _evaluate_own(grouped, plans, format)
    else:
        _check_time(workload, seconds)
        effort = Effort.for_workload(
            workload, seconds=seconds, evaluations=evaluations, seed=seed, recompute=recompute
        )
        evaluation = _search(workload, planner, effort, quiet)
    if export is not None:
        export_stages(evaluation.workload, evaluation.plan, export)
    write_and_show(evaluation, out_file, gantt, format, module, changes)


def _search(workload: Workload, planner: str, effort: Effort, quiet: bool) -> PlanEvaluation:
    """Plan within a time limit, which compiling our own models does not count for."""
    with measured_compile_time() as compilation:
        evaluation = _plan_with_progress(workload, planner, effort, quiet)
    compilation.show("beside the time limit ")
    if effort.is_over:
        err.print(
            f"the time limit of {effort.seconds:g} s ended the planning; the plan is the best so "
            f"far, and --seconds {2 * effort.seconds:.0f} searches longer"
        )
    return evaluation


def _own_plans(
    mine: str | None, gpus: int, global_batch: int, context: GivenContext
) -> list[tuple[str, OwnPlan]]:
    """The plans of ``--mine``; raises :class:`BadInput` for options that contradict them."""
    if mine is None:
        return []
    plans = read_own_plans(mine, gpus, global_batch)
    reason = "does not change a plan of your own (--mine); leave it out"
    refuse_options(context, _NOT_FOR_OWN, reason)
    own = plans[0][1].global_batch
    if own not in (None, global_batch):
        reason = f"is not --mine's --global-batch-size {own}; leave one out"
        refuse_options(context, ("global_batch",), reason)
    return plans


@dataclass(frozen=True)
class _Grouped:
    """The measured workload, and with groups of tensor parallelism."""

    workload: Workload
    module: str | None
    rates: DeviceRates

    def fitted(self, own: OwnPlan) -> Workload:
        """The workload in a plan's micro-batches, on its groups of GPUs."""
        if own.tensor == 1:
            return own_workload(self.workload, own)
        if self.module is None:
            raise BadPlan(
                f"--mine has tp={own.tensor}, whose cuts only a module shows; give path.py:build "
                "in the place of the profile"
            )
        # Imports PyTorch and SciPy, which other plans of one's own do not need.
        from nostall.parallel.module import load_job
        from nostall.parallel.sharding.tensor_workload import tensor_workload

        samples = self.workload.global_batch // (own.micro_batches * own.replicas)
        work = tensor_workload(
            self.workload, load_job(self.module), self.rates, own.tensor, max(1, samples)
        )
        return own_workload(work, own)


def _evaluate_own(
    grouped: _Grouped, plans: Sequence[tuple[str, OwnPlan]], format: Format
) -> tuple[PlanEvaluation, list[Change]]:
    """The fastest of the user's own plans, and its changes; prints the times of several."""
    found = []
    for text, own in plans:
        fitted = grouped.fitted(own)
        evaluation = evaluate_plan(fitted, stages_plan(fitted, own), "yours")
        found.append((evaluation, own, text))
    best, own, _ = min(found, key=lambda each: each[0].timeline.iteration_s)
    if len(found) > 1 and format is not Format.JSON:
        time = Scale("s", best.timeline.iteration_s)
        rows = [(text, time(each.timeline.iteration_s)) for each, _, text in found]
        show_table("your plans, modelled; the fastest follows", ("plan", "iteration"), rows)
    if own.tensor > 1:
        err.print(
            f"nostall: tp={own.tensor}: each GPU below is a group of {own.tensor}, also the one "
            "GPU of speed-ups; layers take their measured seconds times the modelled share of cut "
            "operators, and modelled collectives"
        )
    return best, best_changes(best.workload, own, _other_groups(grouped, own))


def _other_groups(grouped: _Grouped, own: OwnPlan) -> list[tuple[str, Workload, Plan]]:
    """The plan with half and with twice the GPUs of a group, and more or fewer replicas."""
    found, gpus = [], own.replicas * own.tensor
    for tensor in (own.tensor // 2, own.tensor * 2):
        # Without tp in the plan, groups are not tried: their price takes seconds.
        if own.tensor == 1 or not tensor or gpus % tensor:
            continue
        other = replace(own, tensor=tensor, replicas=gpus // tensor)
        with suppress(BadPlan):
            fitted = grouped.fitted(other)
            text = f"dp={other.replicas} tp={tensor} pp={own.stages}"
            found.append((text, fitted, stages_plan(fitted, other)))
    return found


def _check_options(planner: str, seconds: float | None) -> None:
    if planner not in ALL_PLANNERS:
        raise BadPlan(unknown("planner", planner, ALL_PLANNERS))
    if seconds is not None and not 0 < seconds < float("inf"):
        raise BadInput(f"--seconds {seconds}; allowed is a number above 0")


def _refuse_unused(
    context: GivenContext, planner: str, module: str | None, *, has_groups: bool
) -> None:
    """Raise :class:`BadInput` for an option that has no effect on this plan.

    ``has_groups``: whether it has tensor parallelism, which the hardware prices.
    """
    reason = "is for the planners sharding and automap; leave it out, or give one of these"
    names = tuple(n for n in ONLY_FOR_SHARDING if not (has_groups and n == "hardware"))
    refuse_options(context, names, reason)
    if module is None:
        reason = "says how a module is measured, and the profile is a file; leave it out"
        refuse_options(context, ("layers", "device"), reason)
    if planner != "nostall":
        reason = f"is an option of the planner nostall, which {planner} does not use; leave it out"
        refuse_options(context, ("evaluations", "seed"), reason)


def _check_time(workload: Workload, seconds: float | None) -> None:
    """Raise :class:`BadInput` if a single simulation takes longer than the time limit."""
    stages = min(len(workload.profile), len(workload.cluster))
    needed = workload.micro_batches * stages / PASSES_PER_S
    if seconds is not None and needed > seconds:
        raise BadInput(
            f"one simulation of {workload.micro_batches} micro-batches on up to {stages} stages "
            f"takes about {needed:.0f} s, and --seconds is {seconds:g}; give a larger "
            "--micro-batch, or more seconds"
        )


def _measure(target: str, profiling: _ModuleProfiling) -> Profile:
    """Measure the profile of a module on this machine, with the samples of a micro-batch."""
    from nostall.parallel.execute.run_config import resolve_device

    with working("loading PyTorch", enabled=not profiling.quiet) as say:
        device = resolve_device(profiling.device)
        from nostall.parallel.module import load_job, profile_job
        from nostall.parallel.module.layering import Granularity

        say(f"building {target}")
        job = load_job(target)
        say(f"tracing and measuring the layers on {device}")
        return profile_job(
            job,
            samples=profiling.micro_batch,
            device=device,
            granularity=cast(Granularity, profiling.layers),
            note=err.print,
        )


def _plan_with_progress(
    workload: Workload, planner: str, effort: Effort, quiet: bool
) -> PlanEvaluation:
    bar = stage_bar(enabled=not quiet)
    with bar:
        task = bar.add_task("planning", total=1.0)
        effort = effort.with_progress(
            lambda fraction, step: bar.update(task, completed=fraction, description=step)
        )
        return evaluate_plan(workload, make_plan(workload, planner, effort), planner)
