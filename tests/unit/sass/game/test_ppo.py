"""PPO with a graph network: the contract, its actions, its arithmetic and its files."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="learning needs the extra nostall[rl]")
pytest.importorskip("torch", reason="learning needs the extra nostall[rl]")
pytest.importorskip("safetensors", reason="learning needs the extra nostall[rl]")

import safetensors.torch as safetensors
import torch
from nostall.sass.game.learning import Learner, Player, Ppo, Rollout
from nostall.sass.game.messages import heard
from nostall.sass.game.openings import Openings
from nostall.sass.game.ppo import LearnedSearch
from tests.unit.sass.game.kernels import CORPUS, dot_product, largest, model, transpose

from nostall.core import BadInput, BadRun, Budget
from nostall.sass.game import policy as policies
from nostall.sass.game.edits import VARIANTS, Edits
from nostall.sass.game.game import Game
from nostall.sass.game.graph_view import GraphView
from nostall.sass.game.policy import GraphPolicy, Sight, load_policy, save_policy
from nostall.sass.game.randomness import kept_apart
from nostall.search.episodes import read_episodes
from nostall.testing import check_search

TINY = Ppo(steps=6, horizon=4, epochs=1, minibatch=4, width=4, rounds=1)
SMALL = LearnedSearch(settings=TINY, seeds=5)


def sight(space) -> Sight:
    actions = Edits(space.function, space.graph)
    view = GraphView(space.function, space.graph)
    nodes, values = view.of(space.start())
    return Sight(nodes, view.edges, values, actions.candidates, actions.mask(space.start()))


@pytest.mark.parametrize("name", ["transpose", "dot_product", "hopper"])
def test_the_mask_is_what_the_space_allows(name: str) -> None:
    made = {
        "transpose": transpose,
        "dot_product": dot_product,
        "hopper": lambda: largest(CORPUS / "hopper.sm_90a.cubin"),
    }
    space = made[name]()
    actions, rng = Edits(space.function, space.graph), np.random.default_rng(4)
    state = space.start()
    mask = actions.mask(state)
    seen = set()
    for _ in range(12):
        for action in rng.choice(actions.count, size=80):
            move = actions.move(state, int(action))
            assert mask[action] == (space._try(state, move) is not None), str(move)
        legal = np.flatnonzero(mask)
        action = int(rng.choice(legal))
        seen |= {VARIANTS[a % len(VARIANTS)] for a in legal}
        move = actions.move(state, action)
        state = space.apply(state, move)
        mask = actions.mask(state, move)
    assert np.array_equal(mask, Edits(space.function, space.graph).mask(state))
    assert len(seen) > 6


def test_it_keeps_the_contract_of_a_search() -> None:
    check_search(SMALL, transpose(), model(transpose()), seed=3, evaluations=18)


def test_probabilities_sum_to_one_and_do_not_depend_on_the_company() -> None:
    net = GraphPolicy(8, 2)
    one, other = sight(transpose()), sight(dot_product())
    scores, each, worths = net([one, other])
    assert each.bincount().tolist() == [len(one.mask), len(other.mask)]
    for number, alone in enumerate((one, other)):
        own, _, worth = net([alone])
        assert torch.allclose(scores[each == number], own, atol=1e-5)
        assert torch.allclose(worths[number], worth[0], atol=1e-5)
        assert own.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
        assert (torch.isfinite(own).numpy() == alone.mask).all()


def test_messages_are_those_of_plain_pytorch() -> None:
    generator = torch.Generator().manual_seed(2)
    said, room = (torch.randn((n, 5), generator=generator) for n in (7, 11))
    here, there = torch.randint(0, 7, (2, 11), generator=generator)
    given = torch.randn((7, 5), generator=generator)
    found = []
    for sums in (
        lambda a, b: heard(a, b, *(x.numpy().astype(np.int32) for x in (here, there))),
        lambda a, b: torch.zeros_like(a).index_add(0, there, torch.relu(a[here] + b)),
    ):
        inputs = [x.clone().requires_grad_() for x in (said, room)]
        result = sums(*inputs)
        (result * given).sum().backward()
        found.append([result, *(x.grad for x in inputs)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert (found[0][1] != 0).any() and (found[0][2] == 0).any()


def test_a_sight_of_several_turns_is_looked_at_once_and_counts_as_often() -> None:
    one, other = sight(transpose()), sight(dot_product())
    told = []
    for sights in ([one, other, one], [one, other, dataclasses.replace(one)]):
        with kept_apart():
            torch.manual_seed(1)
            learner = Learner(GraphPolicy(4, 1), TINY, 0)
        seen = []
        forward = learner.policy.forward
        learner.policy.forward = lambda s, f=forward, k=seen: k.append(len(s)) or f(s)
        actions = torch.tensor([int(np.flatnonzero(s.mask)[n]) for n, s in enumerate(sights)])
        numbers = torch.tensor([[-5.0, -5.0, -5.0], [1.0, -1.0, 0.5], [2.0, 0.0, -1.0]])
        told.append((learner._update(sights, actions, *numbers), seen))
    (shared, few), (apart, many) = told
    assert (few, many) == ([2], [3]) and shared == pytest.approx(apart, rel=1e-5)


def test_a_turn_that_loses_much_is_taken_back() -> None:
    """Values by turn: 1 % faster, then 0.001 % slower (kept), 2 % slower (not), 1 % faster."""
    from nostall.core import Measurement

    space = transpose()
    speeds = iter((1.01, 1.00999, 0.99, 1.02))
    game = Game(
        space,
        Edits(space.function, space.graph),
        lambda move, state: Measurement("s", (1 / next(speeds),), "modelled"),
        1.0,
    )
    told: list[tuple[int, float]] = []
    player = Player(
        game,
        space.function,
        space.graph,
        Ppo(horizon=4, tolerance=0.03),
        ended=lambda turns, earned: told.append((turns, earned)),
    )
    player.begin()
    states, sights, masks = [game.state], [player.see()], []
    for _ in range(4):
        reward, over, late = player.play(int(np.flatnonzero(game.mask)[3]))
        states.append(game.state)
        sights.append(player.see())
        masks.append(game.mask)
        assert not over and (reward > 0) == (len(states) in (2, 5))
    same = [a is b for a, b in itertools.pairwise(states)]
    assert same == [a is b for a, b in itertools.pairwise(sights)] == [False, False, True, False]
    assert np.array_equal(masks[2], game.actions.mask(states[2]))
    assert late and told == [(4, pytest.approx(2.0))]


def test_where_episodes_begin() -> None:
    space, rng = transpose(), np.random.default_rng(0)
    states = [space.start()]
    while len(states) < 12:
        move = space.propose(states[-1], rng)
        states.append(space.apply(states[-1], move))
    openings = Openings()
    assert openings() is None
    for number, state in enumerate(states):
        openings.met(state, 0.99 if number == 11 else 1 + (number * 7 % 11) / 100)
        openings.met(state, 0.99)
    speeds = [speed for _, speed in openings.best]
    assert speeds == [1 + n / 100 for n in (10, 9, 8, 7, 6, 5, 4, 3)]
    begun = [openings() for _ in range(15)]
    assert [n for n, opening in enumerate(begun) if opening is None] == [2, 6, 10, 14]
    assert {speed for opening in begun if opening for speed in opening[1:]} == set(speeds)


def test_episodes_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the curves need the extra nostall[rl]")
    search = dataclasses.replace(SMALL, logs=tmp_path)
    found = search.run(transpose(), model(transpose()), Budget(evaluations=40), seed=1)
    whole = read_episodes(tmp_path)
    assert len(whole) > 4 and {e.turns for e in whole} == {4}
    assert [e.evaluations for e in whole] == sorted(e.evaluations for e in whole)
    assert whole[0].evaluations > 5 and whole[-1].evaluations <= 40
    # A resumed search plays again: the file tells the whole game once.
    search.run(
        transpose(), model(transpose()), Budget(evaluations=50), seed=1, resume=found.checkpoint
    )
    assert read_episodes(tmp_path)[: len(whole)] == whole


def test_advantages_by_hand() -> None:
    """Two turns of an episode that runs out of time, then the first of one that ends."""
    learner = Learner(GraphPolicy(4, 1), Ppo(discount=0.5, smoothing=0.5), 0)
    rollout = Rollout(worths=[1.0, 2.0, 3.0], rewards=[10.0, 20.0, 30.0], beyond=[None, 4.0, 0.0])
    advantages, returns = learner._advantages(rollout)
    second = 20 + 0.5 * 4 - 2
    first = 10 + 0.5 * 2 - 1 + 0.25 * second
    assert advantages.tolist() == [first, second, 27.0]
    assert returns.tolist() == [first + 1, second + 2, 30.0]


def test_it_learns_which_instructions_are_rewarded() -> None:
    """A made-up judge: moves of memory accesses double the speed, the others change nothing."""
    from nostall.core import Measurement

    space = transpose()
    actions = Edits(space.function, space.graph)
    memory = torch.from_numpy(space.graph.memory[actions.candidates])
    wanted = memory.repeat_interleave(len(VARIANTS))

    def judge(move, state):
        return Measurement("s", (0.5 if space.graph.memory[move.index] else 1.0,), "modelled")

    game = Game(space, actions, judge, 1.0)
    settings = Ppo(steps=64, horizon=1, epochs=4, minibatch=32, width=8, rounds=2, rate=1e-2)
    player = Player(game, space.function, space.graph, settings)

    def chance() -> float:
        player.begin()
        with torch.no_grad():
            return float(learner.policy([player.see()])[0].exp()[wanted].sum())

    with kept_apart():
        torch.manual_seed(0)
        learner = Learner(GraphPolicy(8, 1), settings, 0)
        before = chance()
        for _ in range(8):
            learner.learn([player])
        assert before < 0.25 and chance() > 2 * before


def test_a_policy_file_comes_back_and_others_are_refused(tmp_path: Path) -> None:
    path, net = tmp_path / "policy.safetensors", GraphPolicy(8, 2)
    save_policy(net, path, {"corpus": ["a"]})
    again, header = load_policy(path)
    assert header["about"] == {"corpus": ["a"]} and header["version"] == policies.VERSION
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])

    data = path.read_bytes()
    weights = safetensors.load_file(path)
    wrong = {
        "cut": data[:200],
        "pickle": b"\x80\x04K\x01.",
        "empty": b"",
        "headless": safetensors.save(weights),
    }
    whole = {**policies.layout(), "width": 8, "rounds": 2, "about": {}}
    for name, changes in {
        "version": {"version": 99},
        "nodes": {"nodes": ["other"]},
        "actions": {"actions": ["other"]},
        "width": {"width": 4},
        "rounds": {"rounds": "many"},
    }.items():
        text = json.dumps({**whole, **changes})
        wrong[name] = safetensors.save(weights, {"nostall.policy": text})
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput, match=r"nostall train|train it anew"):
            load_policy(tmp_path / name)
    with pytest.raises(BadInput, match="no policy file"):
        load_policy(tmp_path / "missing")


def test_a_search_that_begins_with_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_policy(GraphPolicy(4, 1), path, {})
    search = LearnedSearch(settings=TINY, policy=path)
    found = search.run(transpose(), model(transpose()), Budget(evaluations=20), seed=1)
    assert found.stopped == "budget" and found.evaluations == 20
    bad = LearnedSearch(settings=TINY, policy=tmp_path / "missing")
    with pytest.raises(BadInput):
        bad.run(transpose(), model(transpose()), Budget(evaluations=20))


def test_a_checkpoint_of_another_game_is_refused() -> None:
    cut = SMALL.run(transpose(), model(transpose()), Budget(evaluations=20), seed=1).checkpoint
    other = LearnedSearch(settings=TINY, seeds=0)
    with pytest.raises(BadRun, match="another game"):
        other.run(transpose(), model(transpose()), Budget(evaluations=30), seed=1, resume=cut)
