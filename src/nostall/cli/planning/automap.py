"""Auto-MAP's pipeline explorer beside its other two, for ``nostall plan --planner automap``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nostall.cli.planning.hybrid import HybridRequest
from nostall.cli.planning.output import write_and_show
from nostall.cli.terminal.console import Format, out
from nostall.core.plurals import pluralize
from nostall.parallel.errors import BadModel, BadPlan, Infeasible
from nostall.parallel.evaluation import PlanEvaluation, evaluate_plan
from nostall.parallel.sharding.planners.sharding import ShardingPlan
from nostall.report.units import Scale


@dataclass(frozen=True)
class PipelineResult:
    """What the pipeline explorer found."""

    sentence: str
    evaluation: PlanEvaluation | None = None
    """Its plan, simulated; None if it found none."""
    module: str | None = None

    def show_if_faster(
        self, plan: ShardingPlan, others: Sequence[ShardingPlan], out_file: Path | None,
        format: Format,
    ) -> bool:  # fmt: skip
        """Write and show the plan if it is modelled to be faster than that of the other explorers.

        It is a pipeline plan, whose file does not list ``others``.
        """
        found = self.evaluation
        if found is None or found.timeline.iteration_s >= plan.step_s:
            return False
        write_and_show(found, out_file, None, format, self.module)
        if format is not Format.JSON:
            for other in (plan, *others):
                time = Scale("s", other.step_s)
                out.print(f"modelled step {time(other.step_s)}: {other.name}")
        return True


def explore_pipelines(request: HybridRequest, seed: int, seconds: float) -> PipelineResult:
    """Play the explorer's game with as many stages as servers, at least two."""
    from nostall.parallel.module import Model, load_job
    from nostall.parallel.plan import Workload
    from nostall.parallel.sharding.automap.modelled_profile import modelled_profile
    from nostall.parallel.sharding.automap.pipeline import explore_pipeline

    cluster = request.cluster
    stages = max(2, len(cluster.servers))
    try:
        model = Model(load_job(request.module))
        profile = modelled_profile(model, cluster, request.rates, request.micro_batch)
        work = Workload(
            profile, cluster, request.samples, request.micro_batch, request.state_factor
        )
        found = explore_pipeline(work, stages, seed, seconds=seconds)
    except (BadModel, BadPlan, Infeasible) as error:
        return PipelineResult(f"the pipeline explorer found no plan: {error}")
    evaluation = evaluate_plan(work, found.plan, "automap")
    time = Scale("s", evaluation.timeline.iteration_s)
    return PipelineResult(
        f"the pipeline explorer's plan, GPUs {found.plan.split}, of "
        f"{pluralize(work.micro_batches, 'micro-batch')} takes "
        f"{time(evaluation.timeline.iteration_s)}, modelled",
        evaluation,
        request.module,
    )
