"""PPO with a graph network: the contract, its actions, its arithmetic and its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="learning needs the extra nostall[rl]")
pytest.importorskip("torch", reason="learning needs the extra nostall[rl]")
pytest.importorskip("safetensors", reason="learning needs the extra nostall[rl]")

import safetensors.torch as safetensors
import torch
from tests.unit.game.kernels import CORPUS, dot_product, largest, model, transpose

from nostall.core import BadInput, BadRun, Budget
from nostall.sass.game import policy as policies
from nostall.sass.game.edits import VARIANTS, Edits
from nostall.sass.game.game import Game
from nostall.sass.game.graph_view import GraphView
from nostall.sass.game.learning import Learner, Player, Ppo, Rollout
from nostall.sass.game.policy import GraphPolicy, Sight, load_policy, save_policy
from nostall.sass.game.ppo import LearnedSearch
from nostall.sass.game.randomness import kept_apart
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


def test_advantages_by_hand() -> None:
    """Two turns of an episode that runs out of time, then the first of one that ends."""
    learner = Learner(GraphPolicy(4, 1), Ppo(discount=0.5, smoothing=0.5), 0)
    rollout = Rollout(worths=[1.0, 2.0, 3.0], rewards=[10.0, 20.0, 30.0], beyond=[None, 4.0, 0.0])
    advantages, returns = learner._advantages(rollout)
    second = 20 + 0.5 * 4 - 2
    first = 10 + 0.5 * 2 - 1 + 0.25 * second
    assert advantages.tolist() == [first, second, 27.0]
    assert returns.tolist() == [first + 1, second + 2, 30.0]


def test_it_learns_the_one_rewarded_instruction() -> None:
    """A made-up judge: moves of one instruction double the speed, the others change nothing."""
    from nostall.core import Measurement

    space = transpose()
    actions = Edits(space.function, space.graph)
    legal = actions.mask(space.start()).reshape(-1, len(VARIANTS))
    best = int(legal.sum(axis=1).argmax())
    wanted = torch.arange(legal.size) // len(VARIANTS) == best

    def judge(move, state):
        rewarded = move.index == actions.candidates[best]
        return Measurement("s", (0.5 if rewarded else 1.0,), "modelled")

    game = Game(space, actions, judge, 1.0)
    settings = Ppo(steps=256, horizon=1, minibatch=64, width=8, rounds=2, rate=1e-2)
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
        assert before < 0.05 and chance() > 2 * before


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
