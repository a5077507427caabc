"""``nostall plan --planner sharding|automap``: place each tensor of a training step on GPUs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from nostall.cli.options.given_options import GivenContext, refuse_options
from nostall.cli.planning.engines import (
    ENGINE_PLANNERS,
    candidates_beside_pipelines,
    engine_candidates,
    list_candidates,
    plan_engine,
    show_engine,
)
from nostall.cli.planning.hybrid import (
    HybridRequest,
    PipelineOffer,
    beside_shardings,
    default_micro_batch,
    show_hybrid,
)
from nostall.cli.planning.output import write_and_show
from nostall.cli.terminal.console import Format, err, out, show_json, show_table
from nostall.cli.terminal.progress import stage_bar, working
from nostall.core.compile_clock import planning_clock
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_text_atomically
from nostall.core.text.plurals import pluralize
from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import BadModel, BadPlan, Infeasible
from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.planners import Effort
from nostall.parallel.planners.fastest import fastest_or_cheap
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, default_shapes, mesh_text
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.engine_file import CANDIDATES
from nostall.parallel.sharding.plan_file import plan_document
from nostall.parallel.sharding.planners.sharding import (
    DEFAULT_SECONDS,
    Options,
    ShardingPlan,
    plan_sharding,
)
from nostall.report.plan.sharding import (
    collective_table,
    placement_table,
    runner_up_table,
    sharding_page,
    sharding_picture,
    sharding_sentences,
)
from nostall.report.units import Scale
from nostall.workload.hardware.description import Hardware
from nostall.workload.hardware.file import load_hardware
from nostall.workload.jobs.record import OperatorKind, Resource


def explore_pipelines(request: HybridRequest, seed: int, seconds: float) -> PipelineOffer:
    """Play the explorer's game with as many stages as servers, at least two."""
    from nostall.papers.automap.pipeline import explore_pipeline, modelled_profile
    from nostall.parallel.module import load_job
    from nostall.parallel.module.eager import compared_model
    from nostall.parallel.plan import Workload

    cluster = request.cluster
    stages = max(2, len(cluster.servers))
    try:
        model = compared_model(load_job(request.module), err.print)
        profile = modelled_profile(model, cluster, request.rates, request.micro_batch)
        work = Workload(
            profile, cluster, request.samples, request.micro_batch, request.state_factor
        )
        found = explore_pipeline(work, stages, seed, seconds=seconds)
    except (BadModel, BadPlan, Infeasible) as error:
        return PipelineOffer(f"the pipeline explorer found no plan: {error}")
    # A cheap plan that is faster is taken, so a short limit gives no slower one.
    plan = fastest_or_cheap(work, found.plan, Effort(seconds))
    evaluation = evaluate_plan(work, plan or found.plan, "automap")
    step_s = evaluation.timeline.iteration_s

    def show(plans: Sequence[ShardingPlan], out_file: Path | None, format: Format) -> None:
        """The file of a pipeline plan does not list ``plans``."""
        write_and_show(evaluation, out_file, None, format, request.module)
        if format is not Format.JSON:
            for plan in plans:
                out.print(f"modelled step {Scale('s', plan.step_s)(plan.step_s)}: {plan.name}")

    return PipelineOffer(
        f"the pipeline explorer's plan, GPUs {evaluation.plan.split}, of "
        f"{pluralize(work.micro_batches, 'micro-batch')} takes {Scale('s', step_s)(step_s)}, "
        "modelled",
        step_s,
        show,
    )


SHARDING_PLANNERS = ("sharding", "automap", *ENGINE_PLANNERS)
DEFAULT_HARDWARE = "h100-dgx"
SHARDING_SHARE = 2 / 3
"""Share of the time limit for shardings of the whole batch; what is left is for pipelines."""
MAX_STATE_FACTOR = 1e6
"""Far above that of every optimiser; sums of bytes stay finite."""
MeshOption = Annotated[
    str | None,
    typer.Option(
        metavar="AxB",
        help="Shape of the device mesh, such as 8 or 2x8; default: the faster of all GPUs in one "
        "dimension and servers x GPUs (planner sharding).",
    ),
]
HardwareOption = Annotated[
    str,
    typer.Option(
        help="Hardware file or preset with the FLOP/s and memory rate of a GPU (planner sharding)."
    ),
]
ExportOption = Annotated[
    Path | None,
    typer.Option(
        help="Write Python text that gives a module the placements with PyTorch's "
        "parallelize_module (planners sharding and automap), or its pipeline stages and schedule."
    ),
]
PictureOption = Annotated[
    Path | None,
    typer.Option(
        help="Write a picture of the graph with placements (.svg, or a page around it: .html; "
        "planners sharding and automap)."
    ),
]
ONLY_FOR_SHARDING = ("mesh", "hardware", "picture")
_NOT_FOR_SHARDING = (
    "gantt", "evaluations", "recompute", "weight_gradient_share", "layers", "device",
    "fractions",
)  # fmt: skip
_MESH = re.compile(r"\d{1,5}(x\d{1,5})*")
_ELEMENT_TYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
}
"""PyTorch's element types by the names of precisions in hardware files."""


@dataclass(frozen=True)
class ShardingRequest:
    """Options of one call of the command."""

    module: str
    """``path.py:build``."""
    cluster: Cluster
    mesh: str | None
    hardware: str
    samples: int
    state_factor: float
    seconds: float | None
    planner: str = "sharding"
    seed: int = 0
    micro_batch: int | None = None
    """Samples of a micro-batch of a pipeline whose stages are sharded; None for no pipeline."""


def plan_sharding_command(
    request: ShardingRequest,
    out_file: Path | None,
    format: Format,
    *,
    quiet: bool,
    context: GivenContext,
    export: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Plan, write the plan file, the exported text and the picture, and print the result."""
    _check_request(request, context)
    if request.planner in ENGINE_PLANNERS:
        _refuse_for_engines(request, context)
        with working(f"loading PyTorch and pricing {request.planner}", enabled=not quiet):
            document = plan_engine(request.planner, _hybrid_request(request))
        show_engine(document, out_file, format)
        return
    if request.micro_batch is not None and request.planner == "sharding":
        reason = "is not for pipelines whose stages are sharded (--micro-batch); leave it out"
        refuse_options(context, ("mesh", "seconds", "export", "picture"), reason)
        _show_pipeline(_hybrid_request(request), out_file, format, quiet=quiet)
        return
    pipelines = None
    if request.mesh or export or picture:
        plan, *others = _plan(request, quiet, _seconds(request))
    else:
        started, total = planning_clock(), _seconds(request)
        plans, failure = _plan_if_feasible(request, quiet, SHARDING_SHARE * total)
        left = max((1 - SHARDING_SHARE) * total, started + total - planning_clock())
        offer = _pipelines(request, plans, quiet, left)
        if offer.shown_if_faster(plans, out_file, format):
            if out_file is not None:
                list_candidates(out_file, engine_candidates(plans, _hybrid_request(request)))
            if failure is not None and format is not Format.JSON:
                out.print(f"the whole batch at once: {failure}")
            return
        if failure is not None:
            raise Infeasible(f"{failure}; {offer.sentence}")
        (plan, *others), pipelines = plans, offer.sentence
    document = plan_document(plan, others, request.module, request.samples, request.state_factor)
    document["pipelines"] = pipelines
    document[CANDIDATES] = engine_candidates(others, _hybrid_request(request))
    if out_file is not None:
        write_text_atomically(out_file, json.dumps(document, indent=1) + "\n", parents=True)
    if picture is not None:
        write_text_atomically(picture, _drawn(plan, others, picture, out_file), parents=True)
    exported = _export(plan, request.module, export) if export is not None else ""
    if format is Format.JSON:
        show_json(document)
        return
    _show_plan(request, plan, others)
    if pipelines is not None:
        out.print(pipelines)
    if out_file is not None:
        out.print(f"plan:     {out_file}")
    if picture is not None:
        out.print(f"picture:  {picture}")
    if exported:
        out.print(f"styles:   {export}: {exported}")


def _show_pipeline(
    request: HybridRequest, out_file: Path | None, format: Format, *, quiet: bool
) -> None:
    """Plan pipelines whose stages are sharded, and list the engines in their file."""
    show_hybrid(request, out_file, format, quiet=quiet)
    if out_file is not None:
        list_candidates(out_file, candidates_beside_pipelines(request))


def _drawn(plan: Any, others: Any, picture: Path, out_file: Path | None) -> str:
    """The page of a plan, or its picture for other names than ``*.html``."""
    if picture.suffix != ".html":
        return sharding_picture(plan, others)
    launch = shlex.join(["nostall", "launch", str(out_file)]) if out_file is not None else ""
    return sharding_page(plan, others, launch)


def _refuse_for_engines(request: ShardingRequest, context: GivenContext) -> None:
    reason = f"does not change a plan of {request.planner}; leave it out"
    names = ("mesh", "seconds", "micro_batch", "seed", "export", "picture")
    refuse_options(context, names, reason)


def _hybrid_request(request: ShardingRequest) -> HybridRequest:
    own = request.micro_batch or default_micro_batch(request.samples, len(request.cluster))
    return HybridRequest(
        request.module,
        request.cluster,
        device_rates(load_hardware(request.hardware)),
        request.samples,
        own,
        request.state_factor,
    )


def _seconds(request: ShardingRequest) -> float:
    return request.seconds or DEFAULT_SECONDS


def _plan_if_feasible(
    request: ShardingRequest, quiet: bool, seconds: float
) -> tuple[list[ShardingPlan], Infeasible | None]:
    """Shardings of the whole batch, the plan first; none and the reason if none is possible."""
    try:
        return _plan(request, quiet, seconds), None
    except Infeasible as error:
        return [], error


def _pipelines(
    request: ShardingRequest, plans: Sequence[ShardingPlan], quiet: bool, seconds: float
) -> PipelineOffer:
    """The search for pipelines beside shardings of the whole batch."""
    from nostall.parallel.module import load_job

    if request.planner == "automap":
        return explore_pipelines(_hybrid_request(request), request.seed, seconds)
    job = load_job(request.module)
    plan = plans[0] if plans else None
    return beside_shardings(_hybrid_request(request), job, plan, seconds, quiet=quiet)


def _show_plan(
    request: ShardingRequest, plan: ShardingPlan, others: Sequence[ShardingPlan]
) -> None:
    """Print the tables of a plan and its runners-up."""
    graph = plan.prices.graph
    show_table(
        f"{graph.name} on {request.cluster.name}, mesh {mesh_text(graph.mesh)}",
        *placement_table(plan),
    )
    show_table("collectives of a step", *collective_table(plan))
    show_table("plans", *runner_up_table(plan, others))
    for line in sharding_sentences(plan):
        out.print(line)


def _check_request(request: ShardingRequest, context: GivenContext) -> None:
    """Raise :class:`BadInput` for options that have no effect or are out of range."""
    reason = "is an option of pipeline planners, which sharding does not use; leave it out"
    refuse_options(context, _NOT_FOR_SHARDING, reason)
    if request.planner == "sharding":
        reason = "is for planners that draw random numbers, which sharding does not; leave it out"
        refuse_options(context, ("seed",), reason)
    elif request.planner == "automap" and request.micro_batch is not None:
        reason = (
            "asks for a sharding of the whole batch, and --micro-batch is for the pipeline "
            "explorer; leave one of them out"
        )
        refuse_options(context, ("mesh", "export", "picture"), reason)
    if not 1 <= request.state_factor <= MAX_STATE_FACTOR:
        raise BadInput(
            f"--state-factor {request.state_factor}: allowed is 1 (the parameters alone) to "
            f"{MAX_STATE_FACTOR:g}"
        )


def _export(plan: ShardingPlan, module: str, path: Path) -> str:
    """Write the text of a plan's styles; returns a sentence about what it leaves out."""
    from nostall.parallel.module import load_job
    from nostall.parallel.sharding.style_export import export_styles

    found = export_styles(plan, load_job(module))
    write_text_atomically(path, found.text, parents=True)
    left_out = sum(found.left_out.values())
    return (
        f"{pluralize(found.standard, 'module')} with PyTorch's styles, {len(found.placed)} with "
        f"Placed; {pluralize(left_out, 'redistribution')} left to DTensor"
    )


def _plan(request: ShardingRequest, quiet: bool, seconds: float) -> list[ShardingPlan]:
    """The fastest plan of all meshes, and after it all other plans sorted by time.

    Raises :class:`Infeasible` if no plan is possible or fits into memory.
    """
    cluster = request.cluster
    shapes = [_parse_mesh(request.mesh)] if request.mesh else default_shapes(cluster)
    if request.planner == "automap" and request.mesh is None:
        shapes = [(len(cluster),)]  # the paper slices tensors over all GPUs
    meshes = [ClusterMesh(cluster, shape) for shape in shapes]
    rates = device_rates(load_hardware(request.hardware))
    found: list[ShardingPlan] = []
    failures: list[Infeasible] = []
    with stage_bar(enabled=not quiet) as bar:
        task = bar.add_task("loading PyTorch and the module", total=float(len(meshes)))
        from nostall.parallel.module import load_job
        from nostall.parallel.sharding.capture.operators import capture

        job = load_job(request.module)
        bar.update(task, description="tracing")
        for number, mesh in enumerate(meshes):
            step = capture(job, request.samples, mesh.shape)

            def report(fraction: float, step: str, done: int = number) -> None:
                bar.update(task, completed=done + fraction, description=step)

            options = Options(
                min(cluster.memory),
                request.state_factor,
                seconds / len(meshes),
                report=report,
            )
            try:
                best, rules = _plan_on_mesh(request, Prices(step.graph, mesh, rates), options)
            except Infeasible as error:
                failures.append(error)
                continue
            found += [best, *rules]
    if not found:
        raise failures[0]
    return _ranked(found, request.planner, min(cluster.memory))


def _plan_on_mesh(
    request: ShardingRequest, prices: Prices, options: Options
) -> tuple[ShardingPlan, list[ShardingPlan]]:
    """The plan of the requested planner, and the plans beside it."""
    best, rules = plan_sharding(prices, options)
    if request.planner == "sharding":
        return best, rules
    from nostall.papers.automap.planner import plan_automap

    automap, explorers = plan_automap(prices, options, request.seed, rules)
    return automap, [best, *rules, *explorers]


def _ranked(plans: Sequence[ShardingPlan], planner: str, memory: float) -> list[ShardingPlan]:
    """The fastest plan of a planner that fits, and after it all others sorted by time."""
    by_time = sorted(plans, key=lambda plan: plan.whole_s)
    best = next(plan for plan in by_time if plan.name == planner and plan.fits(memory))
    return [best, *(plan for plan in by_time if plan is not best)]


def device_rates(hardware: Hardware) -> DeviceRates:
    """Rates that large operators reach on a GPU of a hardware file."""
    compute, memory = hardware.curve(Resource.COMPUTE), hardware.curve(Resource.MEMORY)
    product = hardware.operators.get(OperatorKind.PRODUCT)
    flops = {
        _ELEMENT_TYPES[precision]: rate * compute.share
        for precision, rate in hardware.flops.items()
        if precision in _ELEMENT_TYPES
    }
    return DeviceRates(
        hardware.name,
        flops,
        hardware.memory * memory.share,
        max(compute.overhead, memory.overhead),
        contention=hardware.contention,
        wait_s=hardware.collective_wait,
        start_s=product.overhead if product is not None else 0.0,
    )


def _parse_mesh(text: str) -> tuple[int, ...]:
    if not _MESH.fullmatch(text):
        raise BadPlan(f"--mesh {text!r}; allowed is a number of GPUs, or two such as 2x8")
    return tuple(map(int, text.split("x")))
