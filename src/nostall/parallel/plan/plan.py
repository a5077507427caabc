"""A pipeline plan: stages of layers on GPUs and the order of their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from nostall.parallel.errors import BadPlan

Policy = Literal["gpipe", "pa", "pb", "1f1b", "interleaved", "list", "zero-bubble"]
"""Order of forward and backward passes of micro-batches on a worker.

- ``gpipe``: all forward passes before the first backward pass.
- ``pa``, ``pb``: DAPPLE's early backward scheduling, with min(S - i, D) and min(2 (S - i) - 1, D)
  warm-up micro-batches in stage i of S (section 3); D is the number that fits into memory.
- ``1f1b``: one forward, one backward pass, with S - i warm-up micro-batches.
- ``interleaved``: Megatron-LM's order for workers with several stages.
- ``list``: greedy list scheduling, backward passes first.
- ``zero-bubble``: greedy, with the backward pass split into gradients of inputs and of weights.
"""
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers and the GPUs that each run a slice of every micro-batch through them."""

    first: int
    """Number of the first layer."""
    end: int
    """Number of the last layer, plus 1."""
    gpus: tuple[int, ...]
    """One replica of the stage per GPU."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in the order of their layers, and how micro-batches run through them.

    Stages with the same GPUs share a worker (interleaving); all other stages have no GPU in common.
    """

    stages: tuple[Stage, ...]
    policy: Policy = "pb"
    in_flight: tuple[int, ...] | None = None
    """Per stage, the maximum number of micro-batches whose forward pass has started and whose
    backward pass has not ended (DAPPLE's D); None for the default of the policy."""
    recompute: bool = False
    """Whether stages keep only their inputs and run the forward pass again before the backward
    pass (re-computation of activations)."""

    @property
    def interleaved(self) -> bool:
        """Whether a GPU holds more than one stage."""
        return len({s.gpus for s in self.stages}) < len(self.stages)

    @property
    def split(self) -> str:
        """Replicas per stage as the papers write it: ``14:2``; ``straight`` if all have one GPU."""
        sizes = [len(s.gpus) for s in self.stages]
        return "straight" if len(sizes) > 1 and set(sizes) == {1} else ":".join(map(str, sizes))


def check_plan(plan: Plan, layers: int, gpus: int) -> None:
    """Check a plan for a model of ``layers`` layers and a cluster of ``gpus`` GPUs.

    Raises :class:`BadPlan` unless the stages cover all layers in order on existing GPUs, share all
    of their GPUs or none, and have limits and a policy that are allowed for them.
    """
    ends = [0, *(s.end for s in plan.stages)]
    if not plan.stages or [s.first for s in plan.stages] != ends[:-1] or ends[-1] != layers:
        cuts = [(s.first, s.end) for s in plan.stages]
        raise BadPlan(
            f"the plan's stages are {cuts[:8]}; they must begin at 0, follow each other without a "
            f"gap and end at {layers}, the number of layers; use the profile that the plan was "
            "made for"
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
            f"policy {plan.policy!r} is for plans with one stage per GPU; for plans with several "
            "stages per GPU, allowed are interleaved, list and zero-bubble"
        )
    _check_in_flight(plan.in_flight, len(plan.stages))


def _check_stage(stage: Stage, gpus: int) -> None:
    if stage.end <= stage.first:
        raise BadPlan(
            f"a stage has layers {stage.first} to {stage.end}; each stage needs at least one "
            "layer; there are more stages than layers, or a cut is repeated"
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
