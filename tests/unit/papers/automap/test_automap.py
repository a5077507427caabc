"""Auto-MAP's games: propagation, linkage groups, rewards, both explorers, the planner."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")
pytest.importorskip("transformers", reason="models need the extra nostall[torch-tests]")
pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

from nostall.papers.automap import planner
from nostall.papers.automap.planner import (
    CONFLICT_REWARD,
    EXPLORERS,
    PARTITION,
    PARTITION_REWARD,
    REPLICATE,
    REPLICATE_REWARD,
    Dimension,
    PartitionGame,
    Propagation,
    explore,
    linkage_groups,
    plan_automap,
)
from nostall.parallel.errors import BadPlan
from nostall.parallel.sharding.planners.sharding import Options
from tests.unit.parallel.sharding.steps import captured, prices


@pytest.fixture(scope="module")
def propagation() -> Propagation:
    return Propagation(captured("vgg", 2).graph)


def _parameter(propagation: Propagation, name: str) -> int:
    operators = propagation.graph.operators
    return next(i for i in propagation.graph.parameters if operators[i].target == name)


def test_a_decision_settles_the_layers_linked_to_it(propagation: Propagation) -> None:
    """The two fully connected layers of a VGG: columns of the first, rows of the second."""
    start = propagation.start(["input"])
    assert start is not None
    first = Dimension(_parameter(propagation, "11.weight"), 0)
    assert propagation.decision(start, first) == -1
    after = propagation.decide(start, first, partition=True)
    assert after is not None
    placements = {
        name: propagation.placement(after, _parameter(propagation, name))
        for name in ("11.weight", "11.bias", "13.weight", "13.bias", "0.weight")
    }
    assert placements == {
        "11.weight": "S0",
        "11.bias": "S0",
        "13.weight": "S1",
        "13.bias": "R",
        "0.weight": "R",
    }
    second = Dimension(first.operator, 1)
    assert propagation.decision(after, second) == 0
    assert propagation.decide(after, second, partition=True) is None  # a conflict


def test_rewards_count_the_settled_dimensions(propagation: Propagation) -> None:
    game = PartitionGame(propagation, "parameter", ("input",), by_linkage=True)
    undecided = int((game.reset()[0][:-1] < 0).sum())
    _, _, reward, ended = game.step(PARTITION)
    partitioned = game.partitioned
    settled = undecided - int((game._decisions < 0).sum())
    assert reward == pytest.approx(
        PARTITION_REWARD * partitioned + REPLICATE_REWARD * (settled - partitioned)
    )
    while not ended:
        *_, ended = game.step(REPLICATE)
    assert game.best_partitioned == partitioned
    assert game.conflicts == 0 and CONFLICT_REWARD < 0


def test_the_largest_linkage_group_comes_first(propagation: Propagation) -> None:
    start = propagation.start(["input"])
    assert start is not None
    dimensions = propagation.dimensions("parameter")
    groups = linkage_groups(propagation, start, dimensions)
    largest = max(group.settled for group in groups)
    game = PartitionGame(propagation, "parameter", ("input",), by_linkage=True)
    first = [group.settled for group in groups if group.dimension == game.dimensions[0]]
    assert max(first) == largest > 1


@pytest.mark.parametrize("model", ["vgg"])
def test_the_data_parallel_explorer_finds_the_batch_dimensions(model: str) -> None:
    graph = captured(model, 2).graph
    exploration = explore(graph, EXPLORERS[0], Options(seconds=2), seed=0)
    assert set(exploration.placements.values()) == {"S0"}


def test_the_planner_returns_the_faster_explorer() -> None:
    priced = prices(captured("vgg", 2), (2,))
    plan, explorers = plan_automap(priced, Options(seconds=2), seed=0)
    assert plan.name == "automap"
    assert {own.name for own in explorers} == {"automap-data", "automap-operator"}
    assert plan.whole_s == min(own.whole_s for own in explorers)


def test_several_mesh_dimensions_are_refused() -> None:
    with pytest.raises(BadPlan, match="--mesh with one number"):
        Propagation(captured("wide_classifier", 2, 2).graph)


def test_fine_tuning_undoes_replications_and_keeps_partitions(propagation: Propagation) -> None:
    """After an episode that replicates everything, a second game partitions what it can."""
    first = PartitionGame(propagation, "parameter", ("input",), by_linkage=False)
    _play(first, [REPLICATE])
    assert first.best_partitioned == 0
    start = first.without_replications()
    assert start is not None
    second = PartitionGame(propagation, "parameter", ("input",), by_linkage=False, start=start)
    _play(second, [PARTITION, REPLICATE])
    assert second.best_partitioned > 0
    left = second.without_replications()
    if left is not None:
        kept = [d for d in second.dimensions if propagation.decision(second.best, d) == 1]
        assert all(propagation.decision(left, d) == 1 for d in kept)


def test_episodes_of_both_stages_count_if_the_first_wins(
    propagation: Propagation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(game: PartitionGame, *_: object) -> int:
        _play(game, [REPLICATE])
        return 1

    monkeypatch.setattr(planner, "_play", play)
    found = planner.explore(propagation.graph, planner.EXPLORERS[1], Options(), 0)
    assert (found.fine_tuned, found.episodes, found.steps) == (0, 2, 2)


def _play(game: PartitionGame, actions: list[int]) -> None:
    """One episode; the last action is repeated."""
    game.reset()
    done, played = False, 0
    while not done:
        _, _, _, done = game.step(actions[min(played, len(actions) - 1)])
        played += 1
