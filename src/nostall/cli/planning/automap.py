"""Auto-MAP's pipeline explorer beside its other two, for ``nostall plan --planner automap``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nostall.cli.planning.hybrid import HybridRequest
from nostall.cli.planning.output import write_and_show
from nostall.cli.planning.pipeline_offer import PipelineOffer
from nostall.cli.terminal.console import Format, err, out
from nostall.core.text.plurals import pluralize
from nostall.parallel.errors import BadModel, BadPlan, Infeasible
from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.planners import Effort
from nostall.parallel.planners.fastest import fastest_or_cheap
from nostall.parallel.sharding.planners.sharding import ShardingPlan
from nostall.report.units import Scale


def explore_pipelines(request: HybridRequest, seed: int, seconds: float) -> PipelineOffer:
    """Play the explorer's game with as many stages as servers, at least two."""
    from nostall.papers.automap.modelled_profile import modelled_profile
    from nostall.papers.automap.pipeline import explore_pipeline
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
