"""Stages and their order: what a planner returns and the simulator takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from nostall.parallel.errors import BadPlan

Policy = Literal["gpipe", "pa", "pb", "1f1b", "interleaved", "list", "zero-bubble"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
"""``gpipe`` all forwards first; ``pa`` and ``pb`` DAPPLE's warm-ups of min(S - i, D) and
min(2 (S - i) - 1, D) micro-batches (section 3); ``1f1b`` S - i without D; ``interleaved``
Megatron-LM's order for workers with several stages; ``list`` greedy, backward first;
``zero-bubble`` greedy with the backward pass split in two."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers ``first`` to ``end`` (exclusive) on ``gpus``, each micro-batch sliced over them."""

    first: int
    end: int
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in order of their layers, and how micro-batches run through them.

    ``in_flight`` caps, per stage, the micro-batches whose forward has begun and whose backward
    has not ended (DAPPLE's D, K for other orders); None for the policy's own number.  Stages with
    the same GPUs share a worker (interleaving); other stages have no GPU in common.
    """

    stages: tuple[Stage, ...]
    policy: Policy = "pb"
    in_flight: tuple[int, ...] | None = None
    recompute: bool = False

    @property
    def interleaved(self) -> bool:
        """Whether a GPU holds more than one stage."""
        return len({s.gpus for s in self.stages}) < len(self.stages)

    @property
    def split(self) -> str:
        """Replicas per stage, as the papers write it: ``14:2``, ``straight`` for all ones."""
        sizes = [len(s.gpus) for s in self.stages]
        return "straight" if len(sizes) > 1 and set(sizes) == {1} else ":".join(map(str, sizes))


def check_plan(plan: Plan, layers: int, gpus: int) -> None:
    """Raise :class:`BadPlan` unless the stages cover all layers in order on existing GPUs."""
    ends = [0, *(s.end for s in plan.stages)]
    if not plan.stages or [s.first for s in plan.stages] != ends[:-1] or ends[-1] != layers:
        cuts = [(s.first, s.end) for s in plan.stages]
        raise BadPlan(
            f"the plan's stages are {cuts[:8]}; they must begin at 0, join without gap and end at "
            f"{layers}, the number of layers; use the profile that the plan was made for"
        )
    for stage in plan.stages:
        _check_stage(stage, gpus)
    groups = {s.gpus for s in plan.stages}
    if sum(map(len, groups)) != len({g for group in groups for g in group}):
        raise BadPlan(
            "two stages share some of their GPUs; they may share all of them or none; give each "
            "stage GPUs of its own"
        )
    if plan.interleaved and plan.policy not in ("interleaved", "list", "zero-bubble"):
        raise BadPlan(
            f"policy {plan.policy!r} is for plans with one stage a GPU; with several, allowed are "
            "interleaved, list and zero-bubble"
        )
    _check_in_flight(plan.in_flight, len(plan.stages))


def _check_stage(stage: Stage, gpus: int) -> None:
    if stage.end <= stage.first:
        raise BadPlan(
            f"a stage has layers {stage.first} to {stage.end}; each needs at least one: there "
            "are more stages than layers, or a cut is there twice"
        )
    if not stage.gpus or len(set(stage.gpus)) != len(stage.gpus):
        raise BadPlan(f"a stage has GPUs {stage.gpus}; allowed are one or more, each once")
    if min(stage.gpus) < 0 or max(stage.gpus) >= gpus:
        raise BadPlan(
            f"a stage has GPUs {stage.gpus}; the cluster has 0 to {gpus - 1}; use the cluster "
            "that the plan was made for"
        )


def _check_in_flight(in_flight: Sequence[int] | None, stages: int) -> None:
    if in_flight is not None and (len(in_flight) != stages or min(in_flight) < 1):
        raise BadPlan(
            f"in_flight is {tuple(in_flight)[:8]} for {stages} stages; allowed is one number >= 1 "
            "per stage"
        )
