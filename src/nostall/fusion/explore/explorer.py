"""FusionStitching's explorer as one story: candidates, beam, fusion of what is left, choice.

Our reading of the last step of arXiv:2009.10924: patterns of the dynamic programming begin with one
vertex, so kernels that several vertices begin come from joining patterns afterwards, first those
that share data, while that gains, then remote ones (kernel packing).
"""

from __future__ import annotations

from dataclasses import dataclass

from nostall.core import Budget
from nostall.fusion.evaluate.delta import Delta, DeltaObjective
from nostall.fusion.evaluate.latency import Latency
from nostall.fusion.explore.beam import WIDTH, beam
from nostall.fusion.explore.joining import Score, joined
from nostall.fusion.explore.packing import packed
from nostall.fusion.explore.patterns import TOP, candidates
from nostall.fusion.explore.space import PlanSpace
from nostall.fusion.plan import Mask, Plan
from nostall.search import Anneal

_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Explored:
    """``plan`` is what to generate; ``connected`` the same before remote fusion."""

    plan: Plan
    connected: Plan


def explore(delta: Delta, *, top: int = TOP, width: int = WIDTH) -> Explored:
    """The published explorer: the delta-evaluator inside, the latency-evaluator at the end."""
    plans = beam(delta, candidates(delta, top), width)
    return _chosen(delta, [joined(delta, plan, _gained(delta), _ROUNDS) for plan in plans])


def _gained(delta: Delta) -> Score:
    """What one kernel gains over two, by the delta-evaluator."""

    def score(one: Mask, other: Mask) -> float | None:
        both = delta.gain(one | other)
        apart = (delta.gain(one) or 0.0) + (delta.gain(other) or 0.0)
        return None if both is None else both - apart

    return score


def refined(delta: Delta, plan: Plan, *, evaluations: int = 3000, seed: int = 0) -> Explored:
    """nostall's own addition: annealing from a plan of connected patterns, then remote fusion.

    Never worse than ``plan`` by the delta-evaluator; same seed, same result.
    """
    space = PlanSpace(delta, plan)
    budget = Budget(evaluations=evaluations)
    result = Anneal().run(space, DeltaObjective(delta), budget, seed=seed)
    return _chosen(delta, [result.best])


def _chosen(delta: Delta, plans: list[Plan]) -> Explored:
    latency = Latency(delta)
    pairs = [Explored(packed(delta, plan), plan) for plan in plans]
    return min(pairs, key=lambda pair: latency.cost(pair.plan))
