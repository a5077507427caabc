"""Auto-MAP's pipeline explorer (section 3.4 and 4.4): cuts of a linear list of devices into stages.

The number of stages is given.  Cut i of the devices lies within :data:`RADIUS` of its centre, the
border between servers, and layers are cut where their share of the compute time is closest to the
share of the devices.  Each stage has at least one parameter.  The latency is DAPPLE's L.

Profile of a model whose times are modelled, for Auto-MAP's pipeline explorer.

The operator costs of the cost model take the place of a measured profile, as the paper's profiler
takes an HLO instruction's.  The time between two possible cuts is divided equally among the layers
there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import numpy as np

from nostall.core.compile_clock import planning_clock
from nostall.papers.automap.dqn import DqnAgent, DqnParameters, Mask, Observation, train
from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.module.model import Model
from nostall.parallel.module.profiler import profile_tensors
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.closed_form import closed_form
from nostall.parallel.planners.memory_fit import fit_to_memory
from nostall.parallel.profile import Layer, Profile
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.hybrid.planner import first_gpus, sends_its_own
from nostall.parallel.sharding.hybrid.run import capture_stage
from nostall.parallel.sharding.hybrid.signature import signature
from nostall.parallel.simulate import costs

RADIUS = 3
STEPS = 10_000
"""Steps over which epsilon falls (section 5)."""
LEARNING_RATE = 1e-3
Reward = Literal["1/L", "1/sqrt(L)"]
"""Section 4.4 and section 3.4 of the paper disagree."""
Cuts = tuple[int, ...]
"""Numbers of devices before each cut."""


@dataclass(frozen=True)
class PipelineExploration:
    """Result of the explorer."""

    cuts: Cuts
    plan: Plan
    latency_s: float
    episodes: int
    states: int
    """Different lists of cuts that were evaluated."""


class PipelineGame:
    """One episode chooses the cuts from the first to the last; L is in units of the ideal time."""

    def __init__(self, workload: Workload, stages: int, reward: Reward = "1/L") -> None:
        """Raises :class:`BadPlan` if there are fewer devices or layers than stages."""
        devices, layers = len(workload.cluster), len(workload.profile)
        if not 2 <= stages <= min(devices, layers):
            raise BadPlan(
                f"{stages} stages for {layers} layers on {devices} GPUs; Auto-MAP's pipeline "
                f"explorer needs 2 to {min(devices, layers)} stages"
            )
        self.workload, self.stages, self.reward = workload, stages, reward
        self.centres = _centres(workload, stages)
        self.actions = 2 * RADIUS + 1
        self.observation_size = 3 * self.actions + 1
        self.ideal_s = workload.sequential_s / devices
        self.latencies: dict[Cuts, float] = {}
        """L of each complete list of cuts in units of the ideal time; negative without memory."""
        self.episodes = 0
        self._states: dict[Cuts, tuple[float, float, float]] = {}
        self._cuts: Cuts = ()
        if not self._observe()[1].any():
            raise BadPlan(
                f"no cut of {devices} GPUs near {self.centres[0]} leaves each of {stages} stages "
                "layers with parameters; give fewer stages"
            )

    def reset(self) -> tuple[Observation, Mask]:
        """Start an episode."""
        self._cuts = ()
        return self._observe()

    def step(self, action: int) -> tuple[Observation, Mask, float, bool]:
        """Choose the next cut by its distance from its centre."""
        self._cuts = self._with(action)
        if len(self._cuts) < self.stages - 1:
            observation, mask = self._observe()
            if mask.any():
                return observation, mask, 0.0, False
            self.episodes += 1
            return observation, np.ones(self.actions, dtype=np.bool_), -1.0, True
        self.episodes += 1
        latency = self.latency(self._cuts)
        power = 1.0 if self.reward == "1/L" and latency > 0 else 0.5
        reward = math.copysign(abs(latency) ** -power, latency)
        zeros = np.zeros(self.observation_size, dtype=np.float32)
        return zeros, np.ones(self.actions, dtype=np.bool_), reward, True

    def latency(self, cuts: Cuts) -> float:
        """L of a complete list of cuts in units of the ideal time; negative without memory."""
        if cuts not in self.latencies:
            plan = self.plan(cuts)
            seconds = closed_form(self.workload, plan).total_s / self.ideal_s
            fits = fit_to_memory(self.workload, plan) is not None
            self.latencies[cuts] = seconds if fits else -seconds
        return self.latencies[cuts]

    def plan(self, cuts: Cuts) -> Plan:
        """The plan of cuts; the last stage has all devices that are left."""
        devices = [0, *cuts, len(self.workload.cluster)]
        layers = [0, *(self.layer_cut(cut) for cut in cuts), len(self.workload.profile)]
        return Plan(
            tuple(
                Stage(layers[i], layers[i + 1], tuple(range(devices[i], devices[i + 1])))
                for i in range(len(cuts) + 1)
            ),
            "pb",
        )

    def layer_cut(self, devices: int) -> int:
        """Number of layers whose share of the time is closest to the share of the devices."""
        forward, backward = self.workload.forward_s, self.workload.backward_s
        time = np.array(forward) + np.array(backward)
        return int(np.abs(time / time[-1] - devices / len(self.workload.cluster)).argmin())

    def allowed(self, cuts: Cuts) -> bool:
        """Whether the first cuts are in order and leave each stage devices and parameters."""
        devices, left = [0, *cuts], self.stages - 1 - len(cuts)
        layers = [0, *(self.layer_cut(cut) for cut in cuts)]
        has_room = devices[-1] + left < len(self.workload.cluster) and layers[-1] + left < len(
            self.workload.profile
        )
        weights = self.workload.parameter_bytes
        ends = [*layers, len(self.workload.profile)] if not left else layers
        return (
            has_room
            and all(a < b for a, b in pairwise(devices))
            and all(weights[b] > weights[a] for a, b in pairwise(ends))
        )

    def complete(self) -> list[Cuts]:
        """All complete lists of cuts that the masks allow."""
        offsets = product(range(self.actions), repeat=self.stages - 1)
        lists = (tuple(c + o - RADIUS for c, o in zip(self.centres, own, strict=True))
                 for own in offsets)  # fmt: skip
        return [
            cuts for cuts in lists if all(self.allowed(cuts[: i + 1]) for i in range(len(cuts)))
        ]

    def _with(self, action: int) -> Cuts:
        return (*self._cuts, self.centres[len(self._cuts)] + action - RADIUS)

    def _observe(self) -> tuple[Observation, Mask]:
        """All-reduce and transfer seconds over the ideal time, and balance, for each next cut."""
        nexts = [self._with(action) for action in range(self.actions)]
        mask = np.array([self.allowed(cuts) for cuts in nexts])
        values = [self._state(c) if m else (0.0,) * 3 for c, m in zip(nexts, mask, strict=True)]
        flat = [value for column in zip(*values, strict=True) for value in column]
        return np.array([*flat, len(self._cuts)], dtype=np.float32), mask

    def _state(self, cuts: Cuts) -> tuple[float, float, float]:
        if cuts not in self._states:
            found = costs(self.workload, self.plan(cuts))
            transfers = (*found.forward_transfers, *found.backward_transfers)
            compute = [f + b for f, b in zip(found.forward, found.backward, strict=True)]
            self._states[cuts] = (
                max(t.seconds for t in found.allreduce) / self.ideal_s,
                max(t.seconds for t in transfers) / self.ideal_s,
                min(compute) / max(compute),
            )
        return self._states[cuts]


def _centres(workload: Workload, stages: int) -> Cuts:
    """Borders of servers if there is one server a stage, equal numbers of devices otherwise."""
    sizes = [len(gpus) for gpus in workload.cluster.servers]
    if len(sizes) == stages:
        return tuple(sum(sizes[: i + 1]) for i in range(stages - 1))
    return tuple(round(len(workload.cluster) * (i + 1) / stages) for i in range(stages - 1))


def explore_pipeline(
    workload: Workload, stages: int, seed: int = 0, reward: Reward = "1/L", steps: int = STEPS,
    seconds: float = math.inf,
) -> PipelineExploration:  # fmt: skip
    """Play the game with a DQN; the best episode is the result.

    The game ends after ``steps`` or ``seconds``, or once all lists of cuts are evaluated.  Raises
    :class:`Infeasible` if no list of cuts that was played fits into memory.
    """
    game = PipelineGame(workload, stages, reward)
    parameters = DqnParameters(learning_rate=LEARNING_RATE, epsilon_steps=steps)
    agent = DqnAgent(game.observation_size, game.actions, parameters, seed)
    lists, until = game.complete(), planning_clock() + seconds
    train(game, agent, steps, lambda: len(game.latencies) >= len(lists) or planning_clock() > until)
    # A limit that ends the first episode leaves the cuts that are closest to the centres.
    return best_of(game, None if game.latencies else lists[len(lists) // 2 :][:1])


def best_of(game: PipelineGame, lists: Sequence[Cuts] | None = None) -> PipelineExploration:
    """The fastest of complete lists of cuts; without ``lists`` those that were played."""
    for cuts in lists or ():
        game.latency(cuts)
    fitting = {cuts: latency for cuts, latency in game.latencies.items() if latency > 0}
    if not fitting:
        raise Infeasible(
            f"no pipeline of {game.stages} stages near the borders of the servers fits into the "
            "GPUs' memory; use more GPUs, another number of stages, or the planner dapple"
        )
    cuts = min(fitting, key=lambda own: (fitting[own], own))
    plan = fit_to_memory(game.workload, game.plan(cuts))
    assert plan is not None  # the latency of plans that do not fit is negative
    return PipelineExploration(
        cuts, plan, fitting[cuts] * game.ideal_s, game.episodes, len(game.latencies)
    )


def modelled_profile(model: Model, cluster: Cluster, rates: DeviceRates, samples: int) -> Profile:
    """The profile of a micro-batch of ``samples`` samples on one GPU of the cluster."""
    ends = [0, *(c for c in range(1, len(model)) if sends_its_own(model, c)), len(model)]
    known: dict[object, tuple[float, float, float]] = {}
    layers: list[Layer] = []
    charged: set[int] = set()
    for first, end in pairwise(ends):
        key = signature(model, first, end, samples)
        if key not in known:
            known[key] = _times(model, first, end, cluster, rates, samples)
        forward, backward, stored = (value / (end - first) for value in known[key])
        for number in range(first, end):
            own = [p for p in model.stage_parameters(number, number + 1) if id(p) not in charged]
            charged |= {id(p) for p in own}
            size = float(sum(p.numel() * p.element_size() for p in own))
            layers.append(Layer(model.layer_names[number], forward, backward, size, stored))
    title = type(model.job.module).__name__
    return Profile(title, tuple(layers), profile_tensors(model, samples), samples)


def _times(
    model: Model, first: int, end: int, cluster: Cluster, rates: DeviceRates, samples: int
) -> tuple[float, float, float]:
    """Seconds of the forward and of the backward pass, and bytes of the stored activations."""
    graph = capture_stage(model, first, end, samples, 1).step.graph
    prices = Prices(graph, ClusterMesh(first_gpus(cluster, 1), (1,)), rates)
    whole = replicated(graph)
    seconds = [prices.operators_s(whole, forward=is_forward) for is_forward in (True, False)]
    tensors = [graph.tensors[t] for t in graph.saved_tensors]
    stored = float(sum(tensor.elements * tensor.itemsize for tensor in tensors))
    return seconds[0], seconds[1], stored
