"""FusionStitching's explorer as one story: candidates, beam, fusion of what is left, choice.

Our reading of the last step of arXiv:2009.10924: patterns of the dynamic programming begin with one
vertex, so kernels that several vertices begin come from joining patterns afterwards, first those
that share data, while that gains, then remote ones (kernel packing).  Which pair comes first
decides where that ends: the one that gains most, or the one nearest to the results; both are tried.
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
from nostall.fusion.graph.partition import Mask, Plan
from nostall.search import Anneal

_ROUNDS = 10
_STUCK, _THROWS = 30, 10
"""Small graphs have few plans; annealing ends soon after it knows them."""


@dataclass(frozen=True, slots=True)
class Explored:
    """``plan`` is what to generate; ``connected`` the same before remote fusion, ``composed`` what
    the beam search alone had come to."""

    plan: Plan
    connected: Plan
    composed: Plan


def explore(delta: Delta, *, top: int = TOP, width: int = WIDTH) -> Explored:
    """The published explorer: the delta-evaluator inside, the latency-evaluator at the end."""
    latency = Latency(delta)
    found = []
    for composed in beam(delta, candidates(delta, top), width):
        for score in (_gained(delta), _last(delta)):
            connected = joined(delta, composed, score, _ROUNDS)
            found.append(Explored(packed(delta, connected), connected, composed))
    return min(found, key=lambda explored: latency.cost(explored.plan))


def refined(delta: Delta, plan: Plan, *, evaluations: int = 300, seed: int = 0) -> Explored:
    """nostall's own addition: annealing from a plan of connected patterns, then remote fusion.

    By the delta-evaluator ``connected`` is never worse than ``plan``; same seed, same result.
    """
    space = PlanSpace(delta, plan)
    search = Anneal(perturb_after=_STUCK, max_perturbations=_THROWS)
    budget = Budget(evaluations=evaluations)
    best = search.run(space, DeltaObjective(delta), budget, seed=seed).best
    return Explored(packed(delta, best), best, plan)


def _gained(delta: Delta) -> Score:
    """What one kernel gains over two, by the delta-evaluator."""

    def score(one: Mask, other: Mask) -> float | None:
        both = delta.gain(one | other)
        apart = (delta.gain(one) or 0.0) + (delta.gain(other) or 0.0)
        return None if both is None else both - apart

    return score


def _last(delta: Delta) -> Score:
    """Of pairs that gain, those nearest to the results first: kernels grow along producers."""
    gained = _gained(delta)

    def score(one: Mask, other: Mask) -> float | None:
        gain = gained(one, other)
        return None if gain is None or gain <= 0 else float(max(one, other).bit_length())

    return score
