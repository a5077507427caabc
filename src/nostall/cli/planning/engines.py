"""``nostall plan --planner ddp|fsdp2|tp``: plans that PyTorch's engines run, priced by rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nostall.cli.planning.hybrid import HybridRequest
from nostall.cli.terminal.console import Format, out, show_json
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_text_atomically
from nostall.parallel.errors import BadModel, Infeasible
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.engine_file import (
    CANDIDATES,
    RULES_OF,
    TorchEngine,
    engine_document,
)
from nostall.parallel.sharding.planners.rules import RULES
from nostall.parallel.sharding.planners.sharding import Options, ShardingPlan, plan_by_rule
from nostall.report.units import Scale

if TYPE_CHECKING:
    from nostall.parallel.module import Job

ENGINE_PLANNERS = tuple(RULES_OF)


def plan_engine(engine: str, request: HybridRequest) -> dict[str, Any]:
    """The document of an engine's plan of a module.

    Raises :class:`Infeasible` if it does not fit into memory, :class:`BadInput` if a GPU would have
    no sample.
    """
    cluster, module = request.cluster, request.module
    if engine != "tp" and request.samples < len(cluster):
        raise BadInput(
            f"--global-batch {request.samples} for {len(cluster)} GPUs of {engine}; each needs a "
            "sample"
        )
    from nostall.parallel.module import load_job
    from nostall.parallel.sharding.capture.operators import capture

    name, mesh = cast(TorchEngine, engine), (len(cluster),)
    job = load_job(module)
    graph = capture(job, request.samples, mesh).graph
    prices = Prices(graph, ClusterMesh(cluster, mesh), request.rates)
    options = Options(state_factor=request.state_factor)
    plan = plan_by_rule(prices, RULES[RULES_OF[name]], options)
    if plan is None or not plan.fits(min(cluster.memory)):
        needed = "" if plan is None else f" (it needs {plan.memory.peak / 2**30:.3g} GiB, modelled)"
        raise Infeasible(
            f"{engine} does not fit into {min(cluster.memory) / 2**30:.3g} GiB of a GPU{needed}; "
            "use another planner, more GPUs or a smaller --global-batch"
        )
    document = _document(name, plan, request, job)
    if name == "tp" and not document["options"]["styles"]:
        raise Infeasible(
            "tp cuts linear layers by the names of Megatron's rules (q_proj, o_proj, up_proj, "
            f"down_proj, fc1, fc2, ...), in sizes that are multiples of {len(cluster)}, and this "
            "module has no such pair; use --planner sharding, which needs no names"
        )
    return document


def engine_candidates(
    plans: Sequence[ShardingPlan], request: HybridRequest
) -> list[dict[str, Any]]:
    """Documents of the engines' plans whose rules are among shardings of a step, fastest first.

    Only those on a mesh of one dimension that fit into memory, and have a sample for each GPU or
    layers that tensor parallelism cuts.
    """
    from nostall.parallel.module import load_job

    found: dict[TorchEngine, ShardingPlan] = {}
    for plan in sorted(plans, key=lambda own: own.step_s):
        cluster = plan.prices.mesh.cluster
        is_possible = len(plan.prices.graph.mesh) == 1 and plan.fits(min(cluster.memory))
        for engine, rule in RULES_OF.items():
            if (
                plan.name == rule
                and is_possible
                and (engine == "tp" or request.samples >= len(cluster))
            ):
                found.setdefault(engine, plan)
    job = load_job(request.module) if found else None
    documents = [
        _document(engine, plan, request, job) for engine, plan in found.items() if job is not None
    ]
    return [own for own in documents if own["engine"] != "tp" or own["options"]["styles"]]


def candidates_beside_pipelines(request: HybridRequest) -> list[dict[str, Any]]:
    """Documents of the engines' plans of a whole batch that is planned as a pipeline."""
    from nostall.parallel.module import load_job
    from nostall.parallel.sharding.capture.operators import capture

    mesh = (len(request.cluster),)
    try:
        graph = capture(load_job(request.module), request.samples, mesh).graph
    except BadModel:
        return []
    prices = Prices(graph, ClusterMesh(request.cluster, mesh), request.rates)
    options = Options(state_factor=request.state_factor)
    plans = [plan_by_rule(prices, RULES[rule], options) for rule in RULES_OF.values()]
    found = [plan for plan in plans if plan is not None]
    return engine_candidates(found, request)


def list_candidates(plan: Path, candidates: list[dict[str, Any]]) -> None:
    """Add candidates to a plan file of any kind; readers of the plan ignore them."""
    document = json.loads(plan.read_text(encoding="utf-8")) | {CANDIDATES: candidates}
    write_text_atomically(plan, json.dumps(document, indent=1) + "\n", parents=True)


def show_engine(document: dict[str, Any], out_file: Path | None, format: Format) -> None:
    """Write a plan file and print what the plan is."""
    if out_file is not None:
        write_text_atomically(out_file, json.dumps(document, indent=1) + "\n", parents=True)
    if format is Format.JSON:
        show_json(document)
        return
    seconds, engine = document["predicted_step_s"], document["engine"]
    out.print(
        f"{engine}: modelled step {Scale('s', seconds)(seconds)}, speed-up over one GPU "
        f"{document['predicted_speedup']:.2f}, peak memory "
        f"{document['peak_memory_bytes'] / 2**30:.3g} GiB of a GPU"
    )
    if styles := document["options"]["styles"]:
        out.print(f"cut:      {', '.join(list(styles)[:8])}{' ...' if len(styles) > 8 else ''}")
    if wrap := document["options"]["wrap"]:
        out.print(f"wrapped:  {', '.join(wrap[:8])}{' ...' if len(wrap) > 8 else ''}")
    if out_file is not None:
        out.print(f"plan:     {out_file}")


def _document(
    engine: TorchEngine, plan: ShardingPlan, request: HybridRequest, job: Job
) -> dict[str, Any]:
    from nostall.parallel.module.wrapping import wrapped_blocks
    from nostall.parallel.sharding.tensor_styles import tensor_styles

    wrap = wrapped_blocks(job.module)
    styles = tensor_styles(job.module, len(plan.prices.mesh.cluster))
    own = request.module, request.samples, request.state_factor
    return engine_document(engine, plan, *own, wrap, styles)
