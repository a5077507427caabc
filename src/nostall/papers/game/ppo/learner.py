"""Proximal policy optimisation (Schulman et al., arXiv:1707.06347) of a graph policy.

The libraries' policies have a fixed number of actions. Here the number of actions depends on the
kernel, and a batch holds rollouts of several kernels, so the algorithm is implemented in full.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nostall.core import BadInput, BadRun, Measurement, Objective
from nostall.core.files.atomic import write_atomically
from nostall.core.validation import parse_json
from nostall.papers.game.edits import ScheduleEdits
from nostall.papers.game.game import Game
from nostall.papers.game.graph_view import GraphView
from nostall.papers.game.parameters import PpoParameters
from nostall.papers.game.ppo.policy import (
    GraphObservation,
    GraphPolicy,
    layout,
    load_weights,
    policy_weights,
    save_policy,
)
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.graph import DependenceGraph
from nostall.sass.schedule.moves import ScheduleMove

StartState = tuple[Schedule, float]
"""A state with which an episode begins, and its speedup (1: as fast as the original)."""

POOL_SIZE = 8
ORIGINAL_INTERVAL = 4
"""Each episode with a number divisible by this begins with the original."""


class StartStatePool:
    """The ``POOL_SIZE`` best states so far, with which three of four episodes begin in turn."""

    def __init__(self) -> None:
        self.best: list[StartState] = []
        """The fastest first."""
        self.episodes = 0

    def add(self, state: Schedule, speedup: float) -> None:
        """Add a state if it is one of the best and no slower than the original."""
        if speedup >= 1 and (len(self.best) < POOL_SIZE or speedup > self.best[-1][1]):
            others = [start for start in self.best if start[0] != state]
            self.best = sorted([*others, (state, speedup)], key=lambda start: -start[1])[:POOL_SIZE]

    def next_start(self) -> StartState | None:
        """The start state of the next episode; None for the original."""
        self.episodes += 1
        if self.episodes % ORIGINAL_INTERVAL == 0 or not self.best:
            return None
        turn = self.episodes * (ORIGINAL_INTERVAL - 1) // ORIGINAL_INTERVAL
        return self.best[turn % len(self.best)]


@dataclass(frozen=True, kw_only=True)
class GraphPpoParameters(PpoParameters):
    """Hyperparameters of PPO with a graph policy."""

    allowed: ClassVar[str] = f"{PpoParameters.allowed}, and a tolerance of at least 0"

    steps: int = 128
    epochs: int = 2
    minibatch: int = 32
    rate: float = 1e-3
    width: int = 32
    """Features of a node inside the network."""
    rounds: int = 3
    """Rounds of message passing."""
    tolerance: float = 0.03
    """Largest loss of throughput that a step may keep, as a multiple of a typical change."""

    @property
    def is_valid(self) -> bool:
        return super().is_valid and min(self.width, self.rounds) > 0 and self.tolerance >= 0


class TrainingEnvironment:
    """A kernel's game as the learner sees it: graph observations and normalised rewards.

    A step that loses more than ``tolerance`` times a typical change is taken back, as in threshold
    accepting (Dueck and Scheuer, J. Comput. Phys. 90, 1990): it costs an evaluation, but has no
    reward and changes nothing. Rewards are divided by their running root mean square, so that
    kernels with different gains have the same weight.
    """

    def __init__(
        self,
        game: Game,
        function: Function,
        graph: DependenceGraph,
        parameters: GraphPpoParameters,
        next_start: Callable[[], StartState | None] = lambda: None,
        on_episode: Callable[[int, float], None] = lambda steps, total_reward: None,
    ) -> None:
        """Wrap ``game``.

        next_start: returns the start state of an episode; None for the original
        on_episode: receives the steps and the total reward of each finished episode
        """
        self.game, self.parameters = game, parameters
        self.next_start, self.on_episode = next_start, on_episode
        assert isinstance(game.actions, ScheduleEdits)
        self._view, self._candidates = GraphView(function, graph), game.actions.candidates
        self._observation: GraphObservation | None = None
        self.changes, self.rewards = RunningRms(), RunningRms()
        self.steps, self.total_reward = 0, 0.0

    def reset(self) -> None:
        """Begin an episode; with the original if no action is legal in the given start state."""
        start = self.next_start()
        self.game.reset(*(start or ()))
        if not self.game.mask.any():
            self.game.reset()
        self.steps, self.total_reward, self._observation = 0, 0.0, None

    def observe(self) -> GraphObservation:
        """Observe the current state; the same object until a step changes the state."""
        if self._observation is None:
            nodes, edge_values = self._view.observe(self.game.state)
            self._observation = GraphObservation(
                nodes, self._view.edges, edge_values, self._candidates, self.game.mask
            )
        return self._observation

    def step(self, action: int) -> tuple[float, bool, bool]:
        """Take one action; returns (normalised reward, terminated, truncated)."""
        before = self.game.state
        result = self.game.step(action, self._accepts)
        if self.game.state is not before:
            self._observation = None
        self.steps += 1
        self.total_reward += result.reward
        self.rewards.add(result.reward)
        reward = float(np.clip(result.reward / max(1e-3, self.rewards.value), -10.0, 10.0))
        truncated = self.steps >= self.parameters.horizon and not result.terminated
        if result.terminated or truncated:
            self.on_episode(self.steps, self.total_reward)
        return reward, result.terminated, truncated

    def _accepts(self, change: float) -> bool:
        self.changes.add(change)
        return change >= -self.parameters.tolerance * self.changes.value


@dataclass
class RunningRms:
    """Running root mean square of a sequence of numbers."""

    sum_of_squares: float = 0.0
    count: int = 0

    def add(self, number: float) -> None:
        self.sum_of_squares += number**2
        self.count += 1

    @property
    def value(self) -> float:
        return float(np.sqrt(self.sum_of_squares / max(1, self.count)))


@dataclass
class Rollout:
    """Consecutive steps of one environment, one list entry per step."""

    observations: list[GraphObservation] = field(default_factory=list[GraphObservation])
    actions: list[int] = field(default_factory=list[int])
    log_probabilities: list[float] = field(default_factory=list[float])
    values: list[float] = field(default_factory=list[float])
    """The critic's value of the observed state."""
    rewards: list[float] = field(default_factory=list[float])
    bootstrap_values: list[float | None] = field(default_factory=list["float | None"])
    """Value of the state after a step that no other step of the rollout follows: 0 if the episode
    terminated. None if the next step follows."""


class Learner:
    """PPO's policy, optimiser and random generator."""

    def __init__(self, policy: GraphPolicy, parameters: GraphPpoParameters, seed: int) -> None:
        self.policy, self.parameters = policy, parameters
        self.optimiser = torch.optim.Adam(policy.parameters(), lr=parameters.rate, eps=1e-5)
        self.generator = torch.Generator().manual_seed(seed)

    def learn(self, environments: Sequence[TrainingEnvironment]) -> dict[str, float]:
        """Collect one rollout of each environment and update the policy.

        Returns the mean losses, entropy and reward by their metric names.
        """
        rollouts = [self._collect(environment) for environment in environments]
        estimates = [self._advantages(rollout) for rollout in rollouts]
        observations = [o for r in rollouts for o in r.observations]
        actions = torch.tensor([a for r in rollouts for a in r.actions])
        log_probabilities = torch.tensor([p for r in rollouts for p in r.log_probabilities])
        advantages = torch.cat([advantages for advantages, _ in estimates])
        # Normalised over the whole batch: most steps have no reward, and in a minibatch without
        # any reward a normalisation would only amplify the noise of the critic.
        advantages = (advantages - advantages.mean()) / advantages.std().clamp(min=1.0)
        returns = torch.cat([returns for _, returns in estimates])
        losses: list[list[float]] = []
        for _ in range(self.parameters.epochs):
            shuffled = torch.randperm(len(observations), generator=self.generator)
            for part in shuffled.split(self.parameters.minibatch):
                if len(part) > 1:
                    losses.append(
                        self._update(
                            [observations[int(i)] for i in part],
                            actions[part],
                            log_probabilities[part],
                            advantages[part],
                            returns[part],
                        )
                    )
        policy, value, entropy = np.mean(losses, axis=0).tolist()
        reward = float(np.mean([x for r in rollouts for x in r.rewards]))
        return {"policy": policy, "value": value, "entropy": entropy, "reward": reward}

    def _collect(self, environment: TrainingEnvironment) -> Rollout:
        rollout, observation = Rollout(), None
        environment.reset()
        for step in range(self.parameters.steps):
            if environment.observe() is not observation:
                observation = environment.observe()
                with torch.no_grad():
                    scores, _, value = self.policy([observation])
                    probabilities = scores.exp()
                if not bool(torch.isfinite(probabilities).all()):
                    raise BadInput(
                        "the weights of the policy give no probabilities of actions: they are too "
                        "large; train the policy again with `nostall train`"
                    )
            action = int(torch.multinomial(probabilities, 1, generator=self.generator))
            reward, terminated, truncated = environment.step(action)
            is_last = step + 1 == self.parameters.steps
            rollout.observations.append(observation)
            rollout.actions.append(action)
            rollout.log_probabilities.append(float(scores[action]))
            rollout.values.append(float(value))
            rollout.rewards.append(reward)
            # A truncated episode could have earned more, so its last state has a value.
            if truncated or (is_last and not terminated):
                rollout.bootstrap_values.append(self._value(environment))
            else:
                rollout.bootstrap_values.append(0.0 if terminated else None)
            if (terminated or truncated) and not is_last:
                environment.reset()
        return rollout

    def _value(self, environment: TrainingEnvironment) -> float:
        with torch.no_grad():
            return float(self.policy([environment.observe()])[2])

    def _advantages(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Generalised advantage estimates (arXiv:1506.02438) and returns."""
        p, n = self.parameters, len(rollout.rewards)
        estimates, advantage = [0.0] * n, 0.0
        for t in reversed(range(n)):
            bootstrap = rollout.bootstrap_values[t]
            next_value = rollout.values[t + 1] if bootstrap is None else bootstrap
            error = rollout.rewards[t] + p.discount * next_value - rollout.values[t]
            advantage = error + (p.discount * p.smoothing * advantage if bootstrap is None else 0.0)
            estimates[t] = advantage
        advantages = torch.tensor(estimates)
        return advantages, advantages + torch.tensor(rollout.values)

    def _update(
        self,
        observations: Sequence[GraphObservation],
        actions: Tensor,
        log_probabilities: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> list[float]:
        """One optimiser step on a minibatch; returns policy loss, value loss and entropy."""
        p = self.parameters
        # Steps that were taken back share their observation; the network evaluates it once.
        distinct = list({id(o): o for o in observations}.values())
        numbers = {id(o): n for n, o in enumerate(distinct)}
        observation_indices = torch.tensor([numbers[id(o)] for o in observations])
        scores, action_state, values = self.policy(distinct)
        first = torch.searchsorted(action_state, torch.arange(len(distinct)))
        ratio = torch.exp(scores[first[observation_indices] + actions] - log_probabilities)
        clipped = torch.clamp(ratio, 1 - p.clip, 1 + p.clip)
        policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
        value_loss = torch.nn.functional.mse_loss(values[observation_indices], returns)
        legal = torch.isfinite(scores)
        terms = -(scores[legal].exp() * scores[legal])
        entropies = torch.zeros(len(distinct)).index_add(0, action_state[legal], terms)
        entropy = entropies[observation_indices].mean()
        self.optimiser.zero_grad()
        (policy_loss - p.entropy * entropy + p.value * value_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), p.gradient)
        self.optimiser.step()
        return [policy_loss.item(), value_loss.item(), entropy.item()]


_HEADER = "nostall.training"


@dataclass(frozen=True)
class TrainingKernel:
    """A kernel to train on, and the objective over its schedules."""

    name: str
    space: ScheduleSpace
    objective: Objective[Schedule]


@dataclass(frozen=True)
class Progress:
    """Progress of a training after a number of rollouts of each kernel."""

    rollout: int
    metrics: dict[str, float]
    """Mean losses, entropy and reward of the last rollout."""
    best: dict[str, float]
    """Kernel -> best ratio (original / best) so far."""


def train(
    kernels: Sequence[TrainingKernel],
    parameters: GraphPpoParameters,
    rollouts: int,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    policy_path: Path | None = None,
    observe: Callable[[Progress], None] = lambda progress: None,
) -> GraphPolicy:
    """Train a policy with ``rollouts`` rollouts of each kernel.

    If the file ``checkpoint`` exists, the training resumes from it. After each rollout the
    checkpoint and the policy file ``policy_path`` are replaced.

    Raises :class:`BadInput` if no kernel has a legal action, and :class:`BadRun` for a checkpoint
    of another training. Call this inside ``isolated_random_state()``: the initial weights come from
    PyTorch's global generator.
    """
    trainees = [t for kernel in kernels if (t := _Trainee.start(kernel, parameters)) is not None]
    if not trainees:
        raise BadInput("no kernel of the corpus has a legal move; pass others with --corpus")
    torch.manual_seed(seed)
    learner = Learner(GraphPolicy(parameters.width, parameters.rounds), parameters, seed)
    about = {"settings": asdict(parameters), "seed": seed, "kernels": [t.name for t in trainees]}
    done = _load_checkpoint(checkpoint, learner, trainees, about) if checkpoint else 0
    for rollout in range(done + 1, rollouts + 1):
        metrics = learner.learn([trainee.environment for trainee in trainees])
        if checkpoint:
            write_atomically(checkpoint, _dump_checkpoint(learner, trainees, about, rollout))
        if policy_path:
            save_policy(learner.policy, policy_path, {**about, "rollouts": rollout})
        observe(Progress(rollout, metrics, {t.name: t.best_ratio for t in trainees}))
    return learner.policy


@dataclass
class _Trainee:
    """A kernel with its environment during the training."""

    name: str
    environment: TrainingEnvironment
    pool: StartStatePool

    @classmethod
    def start(cls, kernel: TrainingKernel, parameters: GraphPpoParameters) -> _Trainee | None:
        """Set up a kernel; None if the kernel does not run or nothing in it can move."""
        space, objective = kernel.space, kernel.objective
        start = objective.evaluate([space.start()])[0]
        if start.failure is not None:
            return None
        pool = StartStatePool()

        def evaluate(move: ScheduleMove, state: Schedule) -> Measurement:
            measurement = objective.evaluate([state])[0]
            if measurement.failure is None:
                pool.add(state, start.value / measurement.value)
            return measurement

        game = Game(space, ScheduleEdits(space.function, space.graph), evaluate, start.value)
        if not game.mask.any():
            return None
        environment = TrainingEnvironment(
            game, space.function, space.graph, parameters, pool.next_start
        )
        return cls(kernel.name, environment, pool)

    @property
    def best_ratio(self) -> float:
        """The best ratio (original / best) so far."""
        return max([1.0, *(speedup for _, speedup in self.pool.best)])

    def dump(self) -> list[Any]:
        """The state of the kernel's training, as JSON."""
        environment, pool = self.environment, self.pool
        space = environment.game.space
        best = [[space.dump(state), speedup] for state, speedup in pool.best]
        changes, rewards = astuple(environment.changes), astuple(environment.rewards)
        return [*changes, *rewards, pool.episodes, best]

    def load(self, saved: list[Any]) -> None:
        """Restore the state that :meth:`dump` returned."""
        *sizes, episodes, best = saved
        environment = self.environment
        environment.changes, environment.rewards = RunningRms(*sizes[:2]), RunningRms(*sizes[2:])
        space = environment.game.space
        self.pool.episodes = episodes
        self.pool.best = [(space.load(text), speedup) for text, speedup in best]


def _dump_checkpoint(
    learner: Learner, trainees: Sequence[_Trainee], about: dict[str, Any], rollout: int
) -> bytes:
    """A checkpoint: weights, optimiser and generator as tensors, the rest as a JSON header."""
    tensors: dict[str, Tensor] = {"generator": learner.generator.get_state()}
    for name, value in policy_weights(learner.policy).items():
        tensors[f"policy.{name}"] = value
    for number, state in learner.optimiser.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"adam.{number}.{name}"] = torch.as_tensor(value).contiguous()
    header = {
        **layout(),
        "about": about,
        "rollout": rollout,
        "pupils": [trainee.dump() for trainee in trainees],
    }
    data: bytes = save(tensors, {_HEADER: json.dumps(header)})
    return data


def _load_checkpoint(
    path: Path, learner: Learner, trainees: Sequence[_Trainee], about: dict[str, Any]
) -> int:
    """Restore a checkpoint if the file exists; returns the number of finished rollouts."""
    if not path.exists():
        return 0
    header, tensors = _read_checkpoint(path)
    expected = {**layout(), "about": about}
    differing = [
        key for key, value in expected.items() if header.get(key) != json.loads(json.dumps(value))
    ]
    if differing:
        raise BadRun(
            f"{path} is of another training ({', '.join(differing)} differ); resume with the same "
            "corpus, seed and settings, or start a new training in another directory"
        )
    optimiser_state: dict[int, dict[str, Tensor]] = {}
    weights = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "policy":
            weights[rest] = value
        elif kind == "adam":
            number, _, field = rest.partition(".")
            optimiser_state.setdefault(int(number), {})[field] = value
    load_weights(learner.policy, weights)
    state_dict = learner.optimiser.state_dict()
    learner.optimiser.load_state_dict({**state_dict, "state": optimiser_state})
    learner.generator.set_state(tensors["generator"])
    for trainee, saved in zip(trainees, header["pupils"], strict=True):
        trainee.load(saved)
    return int(header["rollout"])


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a checkpoint; raises :class:`BadRun` for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, Any] = parse_json((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise BadRun(
            f"{path} is no checkpoint of a training ({error}); start a new training"
        ) from error
    return header, tensors
