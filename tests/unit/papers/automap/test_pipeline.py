"""Auto-MAP's pipeline game: masks, rewards, and the DQN against enumeration."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the DQN needs the extra nostall[rl]")

from nostall.papers.automap.pipeline import (
    PipelineGame,
    best_of,
    explore_pipeline,
)
from nostall.parallel.cluster import parse_cluster
from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Workload, check_plan
from nostall.parallel.profile.layers import Layer, chain
from nostall.parallel.simulate import memory, simulate


def _workload(layers: int = 12, servers: int = 2, memory_gib: float = 1.0) -> Workload:
    """Layers whose times grow, each with parameters, on servers of four GPUs."""
    own = [Layer(str(i), 1e-3 * (i + 1), 2e-3 * (i + 1), 1e6, 1e6) for i in range(layers)]
    cluster = parse_cluster(
        f'name = "n"\n[[servers]]\ncount = {servers}\ngpus = 4\nmemory_gib = {memory_gib}\n'
        "link = { bandwidth_gbytes = 100 }\n[network]\nbandwidth_gbytes = 1\n"
    )
    return Workload(chain("c", own, [1e5] * (layers - 1), 4), cluster, 64)


def test_cuts_lie_near_the_borders_of_servers_and_layers_follow_the_compute() -> None:
    game = PipelineGame(_workload(), 2)
    assert game.centres == (4,)
    assert game.complete() == [(cut,) for cut in range(1, 8)]
    # 12 layers of times 1 to 12: the first 8 of them take 36 of 78, closest to one half.
    assert game.layer_cut(4) == 8
    plan = game.plan((4,))
    check_plan(plan, 12, 8)
    assert [len(stage.gpus) for stage in plan.stages] == [4, 4]


def test_masks_keep_cuts_in_order() -> None:
    game = PipelineGame(_workload(servers=3), 3)
    lists = game.complete()
    assert lists and all(a < b for a, b in lists)
    _, mask = game.reset()
    assert mask.tolist() == [True] * 7
    observation, mask, reward, ended = game.step(6)  # the first cut is 7
    assert (reward, ended) == (0.0, False)
    assert mask.tolist() == [False] * 3 + [True] * 4  # 8 to 11
    assert len(observation) == game.observation_size
    assert game.step(6)[3]


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["1/L", "1/sqrt(L)"])
def test_the_learner_finds_the_best_cuts(reward: str) -> None:
    workload = _workload(servers=3)
    best = best_of(game := PipelineGame(workload, 3), game.complete())
    found = explore_pipeline(workload, 3, reward=reward, steps=400)  # type: ignore[arg-type]
    assert found.cuts == best.cuts and found.episodes == 200


def test_a_seed_gives_the_same_exploration() -> None:
    first, second = (explore_pipeline(_workload(), 2, seed=3, steps=80) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("memory_gib", [0.02, 0.04, 0.06, 1.0])
def test_the_plan_fits_by_limits_on_micro_batches_if_it_needs_them(memory_gib: float) -> None:
    own = [Layer(str(i), 1e-3, 2e-3, 1e5, 4e6) for i in range(8)]
    cluster = _workload(servers=1, memory_gib=memory_gib).cluster
    workload = Workload(chain("c", own, [1e5] * 7, 4), cluster, 64)
    plan = explore_pipeline(workload, 4, steps=20).plan
    assert memory(workload, plan, simulate(workload, plan)).fits
    needs_limits = memory_gib < 0.05
    assert (plan.in_flight is not None) == needs_limits


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(Infeasible, match="fits into the GPUs' memory"):
        explore_pipeline(_workload(memory_gib=1e-3), 2, steps=20)
    game = PipelineGame(_workload(memory_gib=1e-3), 2)
    game.reset()
    assert game.step(3)[2] < 0
    with pytest.raises(BadPlan, match="needs 2 to 8 stages"):
        PipelineGame(_workload(), 9)
