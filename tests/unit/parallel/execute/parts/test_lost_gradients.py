"""``--check`` of plans with sharded tensors reports a gradient that the program does not return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="models need the extra nostall[torch]")

import torch.distributed as dist  # noqa: E402

from nostall.parallel.cluster import parse_cluster  # noqa: E402
from nostall.parallel.execute.run import (  # noqa: E402
    RunOptions,
    run_hybrid_plan,
    run_sharding_plan,
)
from nostall.parallel.execute.run_config import RunResult  # noqa: E402
from nostall.parallel.module import Model  # noqa: E402
from nostall.parallel.sharding.capture.operators import capture  # noqa: E402
from nostall.parallel.sharding.graph import ShardingGraph, replicated, strategy_of  # noqa: E402
from nostall.parallel.sharding.hybrid.plan_file import HybridFile  # noqa: E402
from nostall.parallel.sharding.hybrid.run import capture_stage  # noqa: E402
from nostall.parallel.sharding.hybrid.search import HybridStage  # noqa: E402
from nostall.parallel.sharding.plan_file import PlanFile  # noqa: E402
from nostall.parallel.sharding.program.program import ShardedProgram, StepResult  # noqa: E402
from tests.unit.parallel import jobs  # noqa: E402

SAMPLES = 4
CLUSTER = parse_cluster(
    'name = "1"\n[[servers]]\ngpus = 1\nmemory_gib = 1\nlink = { bandwidth_gbytes = 300 }\n'
)
OPTIONS = RunOptions(1, torch.device("cpu"), check=True)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _file(graph: ShardingGraph) -> PlanFile:
    """A plan of one GPU."""
    strategies = {
        operator.name: [(s.inputs, s.outputs) for s in strategy_of(graph, replicated(graph), n)]
        for n, operator in enumerate(graph.operators)
    }
    return PlanFile("one GPU", 1.0, "m", SAMPLES, (1,), CLUSTER, graph.fingerprint, strategies)


def _sharded() -> RunResult:
    job = jobs.chain()
    return run_sharding_plan(job, _file(capture(job, SAMPLES, (1,)).graph), OPTIONS)


def _hybrid() -> RunResult:
    job = jobs.chain()
    model = Model(job)
    graph = capture_stage(model, 0, len(model), SAMPLES, 1).step.graph
    stage = (HybridStage(0, len(model), 1, 1.0), _file(graph))
    plan = HybridFile("one GPU", 1.0, "m", SAMPLES, SAMPLES, CLUSTER, (stage,))
    return run_hybrid_plan(job, plan, OPTIONS)


@pytest.mark.parametrize("run", [_sharded, _hybrid])
def test_a_lost_gradient_is_reported(
    one_process: None, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run().is_equal
    whole_run = ShardedProgram.run

    def without_one_gradient(self: ShardedProgram, *given: Any, **named: Any) -> StepResult:
        result = whole_run(self, *given, **named)
        lost = next(iter(result.gradients))
        return StepResult(
            result.loss, {name: g for name, g in result.gradients.items() if name != lost}
        )

    monkeypatch.setattr(ShardedProgram, "run", without_one_gradient)
    assert not run().is_equal
