"""Strategy ``ppo``: the contract of a search, actions, network, PPO arithmetic, policy files."""

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

from nostall.core import BadInput, BadRun, Budget
from nostall.papers.game.edits import VARIANTS, ScheduleEdits
from nostall.papers.game.game import Game
from nostall.papers.game.graph_view import GraphView
from nostall.papers.game.ppo import policy as policies
from nostall.papers.game.ppo.learner import (
    GraphPpoParameters,
    Learner,
    Rollout,
    StartStatePool,
    TrainingEnvironment,
)
from nostall.papers.game.ppo.policy import (
    GraphObservation,
    GraphPolicy,
    aggregate_messages,
    load_policy,
    save_policy,
)
from nostall.papers.game.ppo.search import PpoSearch
from nostall.papers.game.randomness import isolated_random_state
from nostall.search.episodes import read_episodes
from nostall.testing import check_search
from tests.unit.papers.game.kernels import CORPUS, dot_product, largest, model, transpose

TINY = GraphPpoParameters(steps=6, horizon=4, epochs=1, minibatch=4, width=4, rounds=1)
SMALL = PpoSearch(settings=TINY, annealing_evaluations=5)


def observe_start(space) -> GraphObservation:
    actions = ScheduleEdits(space.function, space.graph)
    view = GraphView(space.function, space.graph)
    nodes, edge_values = view.observe(space.start())
    return GraphObservation(
        nodes, view.edges, edge_values, actions.candidates, actions.mask(space.start())
    )


@pytest.mark.parametrize("name", ["transpose", "dot_product", "hopper"])
def test_the_mask_is_what_the_space_allows(name: str) -> None:
    spaces = {
        "transpose": transpose,
        "dot_product": dot_product,
        "hopper": lambda: largest(CORPUS / "hopper.sm_90a.cubin"),
    }
    space = spaces[name]()
    actions, rng = ScheduleEdits(space.function, space.graph), np.random.default_rng(4)
    state = space.start()
    mask = actions.mask(state)
    variants = set()
    for _ in range(12):
        for action in rng.choice(actions.count, size=80):
            move = actions.move(state, int(action))
            assert mask[action] == (space.apply_if_legal(state, move) is not None), str(move)
        legal = np.flatnonzero(mask)
        action = int(rng.choice(legal))
        variants |= {VARIANTS[a % len(VARIANTS)] for a in legal}
        move = actions.move(state, action)
        state = space.apply(state, move)
        mask = actions.mask(state, move)
    assert np.array_equal(mask, ScheduleEdits(space.function, space.graph).mask(state))
    assert len(variants) > 6


def test_it_meets_the_contract_of_a_search() -> None:
    check_search(SMALL, transpose(), model(transpose()), seed=3, evaluations=18)


def test_probabilities_sum_to_one_and_do_not_depend_on_the_batch() -> None:
    policy = GraphPolicy(8, 2)
    first, second = observe_start(transpose()), observe_start(dot_product())
    scores, action_state, values = policy([first, second])
    assert action_state.bincount().tolist() == [len(first.mask), len(second.mask)]
    for number, alone in enumerate((first, second)):
        alone_scores, _, value = policy([alone])
        assert torch.allclose(scores[action_state == number], alone_scores, atol=1e-5)
        assert torch.allclose(values[number], value[0], atol=1e-5)
        assert alone_scores.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
        assert (torch.isfinite(alone_scores).numpy() == alone.mask).all()


def test_messages_and_gradients_equal_those_of_pytorch() -> None:
    generator = torch.Generator().manual_seed(2)
    nodes, edges = (torch.randn((n, 5), generator=generator) for n in (7, 11))
    senders, receivers = torch.randint(0, 7, (2, 11), generator=generator)
    gradient = torch.randn((7, 5), generator=generator)
    results = []
    for aggregate in (
        lambda a, b: aggregate_messages(
            a, b, *(x.numpy().astype(np.int32) for x in (senders, receivers))
        ),
        lambda a, b: torch.zeros_like(a).index_add(0, receivers, torch.relu(a[senders] + b)),
    ):
        inputs = [x.clone().requires_grad_() for x in (nodes, edges)]
        result = aggregate(*inputs)
        (result * gradient).sum().backward()
        results.append([result, *(x.grad for x in inputs)])
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, atol=1e-6)
    assert (results[0][1] != 0).any() and (results[0][2] == 0).any()


def test_a_shared_observation_is_evaluated_once_and_weighted_by_its_steps() -> None:
    first, second = observe_start(transpose()), observe_start(dot_product())
    results = []
    for batch in ([first, second, first], [first, second, dataclasses.replace(first)]):
        with isolated_random_state():
            torch.manual_seed(1)
            learner = Learner(GraphPolicy(4, 1), TINY, 0)
        sizes = []
        forward = learner.policy.forward
        learner.policy.forward = lambda s, f=forward, k=sizes: k.append(len(s)) or f(s)
        actions = torch.tensor([int(np.flatnonzero(s.mask)[n]) for n, s in enumerate(batch)])
        numbers = torch.tensor([[-5.0, -5.0, -5.0], [1.0, -1.0, 0.5], [2.0, 0.0, -1.0]])
        results.append((learner._update(batch, actions, *numbers), sizes))
    (shared, few), (separate, many) = results
    assert (few, many) == ([2], [3]) and shared == pytest.approx(separate, rel=1e-5)


def test_a_step_that_loses_much_is_taken_back() -> None:
    """Steps: 1 % faster, then 0.001 % slower (accepted), 2 % slower (taken back), 1 % faster."""
    from nostall.core import Measurement

    space = transpose()
    speeds = iter((1.01, 1.00999, 0.99, 1.02))
    game = Game(
        space,
        ScheduleEdits(space.function, space.graph),
        lambda move, state: Measurement("s", (1 / next(speeds),), "modelled"),
        1.0,
    )
    episodes: list[tuple[int, float]] = []
    environment = TrainingEnvironment(
        game,
        space.function,
        space.graph,
        GraphPpoParameters(horizon=4, tolerance=0.03),
        on_episode=lambda steps, total_reward: episodes.append((steps, total_reward)),
    )
    environment.reset()
    states, observations, masks = [game.state], [environment.observe()], []
    for _ in range(4):
        reward, terminated, truncated = environment.step(int(np.flatnonzero(game.mask)[3]))
        states.append(game.state)
        observations.append(environment.observe())
        masks.append(game.mask)
        assert not terminated and (reward > 0) == (len(states) in (2, 5))
    same = [a is b for a, b in itertools.pairwise(states)]
    assert (
        same == [a is b for a, b in itertools.pairwise(observations)] == [False, False, True, False]
    )
    assert np.array_equal(masks[2], game.actions.mask(states[2]))
    assert truncated and episodes == [(4, pytest.approx(2.0))]


def test_start_states_are_the_original_and_the_best() -> None:
    space, rng = transpose(), np.random.default_rng(0)
    states = [space.start()]
    while len(states) < 12:
        move = space.propose(states[-1], rng)
        states.append(space.apply(states[-1], move))
    pool = StartStatePool()
    assert pool.next_start() is None
    for number, state in enumerate(states):
        pool.add(state, 0.99 if number == 11 else 1 + (number * 7 % 11) / 100)
        pool.add(state, 0.99)
    speedups = [speedup for _, speedup in pool.best]
    assert speedups == [1 + n / 100 for n in (10, 9, 8, 7, 6, 5, 4, 3)]
    starts = [pool.next_start() for _ in range(15)]
    assert [n for n, start in enumerate(starts) if start is None] == [2, 6, 10, 14]
    assert {start[1] for start in starts if start} == set(speedups)


def test_episodes_are_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the curves need the extra nostall[rl]")
    search = dataclasses.replace(SMALL, logs=tmp_path)
    result = search.run(transpose(), model(transpose()), Budget(evaluations=40), seed=1)
    episodes = read_episodes(tmp_path)
    assert len(episodes) > 4 and {e.steps for e in episodes} == {4}
    assert [e.evaluations for e in episodes] == sorted(e.evaluations for e in episodes)
    assert episodes[0].evaluations > 5 and episodes[-1].evaluations <= 40
    # A resumed search repeats its episodes: the file holds each of them once.
    search.run(
        transpose(), model(transpose()), Budget(evaluations=50), seed=1, resume=result.checkpoint
    )
    assert read_episodes(tmp_path)[: len(episodes)] == episodes


def test_advantages_by_hand() -> None:
    """Two steps of an episode that is truncated, then one of an episode that terminates."""
    learner = Learner(GraphPolicy(4, 1), GraphPpoParameters(discount=0.5, smoothing=0.5), 0)
    rollout = Rollout(
        values=[1.0, 2.0, 3.0],
        rewards=[10.0, 20.0, 30.0],
        bootstrap_values=[None, 4.0, 0.0],
    )
    advantages, returns = learner._advantages(rollout)
    second = 20 + 0.5 * 4 - 2
    first = 10 + 0.5 * 2 - 1 + 0.25 * second
    assert advantages.tolist() == [first, second, 27.0]
    assert returns.tolist() == [first + 1, second + 2, 30.0]


@pytest.mark.slow
def test_it_learns_which_instructions_are_rewarded() -> None:
    """Artificial objective: moves of memory accesses double the speed, others have no effect."""
    from nostall.core import Measurement

    space = transpose()
    actions = ScheduleEdits(space.function, space.graph)
    memory = torch.from_numpy(space.graph.memory[actions.candidates])
    rewarded = memory.repeat_interleave(len(VARIANTS))

    def evaluate(move, state):
        return Measurement("s", (0.5 if space.graph.memory[move.index] else 1.0,), "modelled")

    game = Game(space, actions, evaluate, 1.0)
    settings = GraphPpoParameters(
        steps=64, horizon=1, epochs=4, minibatch=32, width=8, rounds=2, rate=1e-2
    )
    environment = TrainingEnvironment(game, space.function, space.graph, settings)

    def probability() -> float:
        environment.reset()
        with torch.no_grad():
            return float(learner.policy([environment.observe()])[0].exp()[rewarded].sum())

    with isolated_random_state():
        torch.manual_seed(0)
        learner = Learner(GraphPolicy(8, 1), settings, 0)
        before = probability()
        for _ in range(8):
            learner.learn([environment])
        assert before < 0.25 and probability() > 2 * before


def test_a_policy_file_is_read_back_and_others_are_rejected(tmp_path: Path) -> None:
    path, policy = tmp_path / "policy.safetensors", GraphPolicy(8, 2)
    save_policy(policy, path, {"corpus": ["a"]})
    loaded, header = load_policy(path)
    assert header["about"] == {"corpus": ["a"]} and header["version"] == policies.VERSION
    for name, weight in policy.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])

    data = path.read_bytes()
    weights = safetensors.load_file(path)
    wrong = {
        "cut": data[:200],
        "pickle": b"\x80\x04K\x01.",
        "empty": b"",
        "headless": safetensors.save(weights),
    }
    header = {**policies.layout(), "width": 8, "rounds": 2, "about": {}}
    for name, changes in {
        "version": {"version": 99},
        "nodes": {"nodes": ["other"]},
        "actions": {"actions": ["other"]},
        "width": {"width": 4},
        "rounds": {"rounds": "many"},
        "gigabytes": {"width": 10**6},
        "endless": {"rounds": 10**12},
        "infinite": {"width": float("inf")},
    }.items():
        text = json.dumps({**header, **changes})
        wrong[name] = safetensors.save(weights, {"nostall.policy": text})
    weights = {name: weight.clone() for name, weight in weights.items()}
    first = next(iter(weights.values()))
    first.view(-1)[0] = float("nan")
    wrong["not a number"] = safetensors.save(weights, {"nostall.policy": json.dumps(header)})
    wrong["nested"] = safetensors.save(weights, {"nostall.policy": "[" * 100_000})
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput, match=r"nostall train"):
            load_policy(tmp_path / name)
    with pytest.raises(BadInput, match="no policy file"):
        load_policy(tmp_path / "missing")


def test_a_search_with_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    save_policy(GraphPolicy(4, 1), path, {})
    search = PpoSearch(settings=TINY, policy=path)
    result = search.run(transpose(), model(transpose()), Budget(evaluations=20), seed=1)
    assert result.stopped == "budget" and result.evaluations == 20
    with pytest.raises(BadInput):  # before any work on a kernel
        PpoSearch(settings=TINY, policy=tmp_path / "missing")


def test_weights_without_probabilities_are_refused(tmp_path: Path) -> None:
    policy, path = GraphPolicy(4, 1), tmp_path / "policy.safetensors"
    for weight in policy.parameters():
        torch.nn.init.constant_(weight, 1e38)
    save_policy(policy, path, {})
    search = PpoSearch(settings=TINY, policy=path)
    with pytest.raises(BadInput, match="give no probabilities of actions"):
        search.run(transpose(), model(transpose()), Budget(evaluations=20))


def test_a_checkpoint_of_another_game_is_rejected() -> None:
    cut = SMALL.run(transpose(), model(transpose()), Budget(evaluations=20), seed=1).checkpoint
    other = PpoSearch(settings=TINY, annealing_evaluations=0)
    with pytest.raises(BadRun, match="another game"):
        other.run(transpose(), model(transpose()), Budget(evaluations=30), seed=1, resume=cut)
