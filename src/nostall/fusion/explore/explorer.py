"""FusionStitching's explorer: candidate patterns, beam search, joining, packing, final selection.

Our reading of the last step of arXiv:2009.10924: a pattern of the dynamic programming starts at one
vertex. Kernels that start at several vertices arise afterwards by joining patterns: first patterns
that share data, as long as that gains, then independent ones (kernel packing). The result depends
on which pair is joined first. Two orders are tried: the largest gain first, and the pair closest to
the graph's results first.
"""

from __future__ import annotations

from dataclasses import dataclass

from nostall.core import Budget
from nostall.fusion.evaluate.delta import DeltaEvaluator, DeltaObjective
from nostall.fusion.evaluate.latency import LatencyEvaluator
from nostall.fusion.explore.beam import WIDTH, beam_search
from nostall.fusion.explore.joining import Score, join_kernels
from nostall.fusion.explore.packing import pack_kernels
from nostall.fusion.explore.patterns import TOP, candidate_patterns
from nostall.fusion.explore.space import PartitionSpace
from nostall.fusion.graph.partition import Mask, Partition
from nostall.search import Anneal

_MAX_ROUNDS = 10
_STUCK, _THROWS = 30, 10
"""Parameters of annealing. They are low because small graphs have few partitions: the search ends
soon after it has seen them."""


@dataclass(frozen=True, slots=True)
class ExplorationResult:
    """A partition with the intermediate results that led to it."""

    partition: Partition
    """The partition to generate."""
    connected: Partition
    """The partition before packing: all kernels are connected."""
    from_beam: Partition
    """The partition before joining and packing, or the one that :func:`refine` started from."""


def explore(delta: DeltaEvaluator, *, top: int = TOP, width: int = WIDTH) -> ExplorationResult:
    """Run the explorer: it searches by the delta-evaluator and selects by the latency-evaluator.

    ``top`` patterns are kept for each vertex, ``width`` partitions in the beam search.
    """
    latency = LatencyEvaluator(delta)
    results = []
    for from_beam in beam_search(delta, candidate_patterns(delta, top), width):
        for score in (_gain_score(delta), _position_score(delta)):
            connected = join_kernels(delta, from_beam, score, _MAX_ROUNDS)
            packed = pack_kernels(delta, connected)
            results.append(ExplorationResult(packed, connected, from_beam))
    return min(results, key=lambda result: latency.cost(result.partition))


def refine(
    delta: DeltaEvaluator, partition: Partition, *, evaluations: int = 300, seed: int = 0
) -> ExplorationResult:
    """Anneal from a partition of connected kernels, then pack; not part of FusionStitching.

    By the delta-evaluator, the result's ``connected`` partition is never worse than ``partition``.
    The same seed gives the same result.
    """
    space = PartitionSpace(delta, partition)
    search = Anneal(perturb_after=_STUCK, max_perturbations=_THROWS)
    budget = Budget(evaluations=evaluations)
    best = search.run(space, DeltaObjective(delta), budget, seed=seed).best
    return ExplorationResult(pack_kernels(delta, best), best, partition)


def _gain_score(delta: DeltaEvaluator) -> Score:
    """Score of joining two kernels: the seconds gained by the delta-evaluator."""

    def score(first: Mask, second: Mask) -> float | None:
        joined = delta.gain(first | second)
        separate = (delta.gain(first) or 0.0) + (delta.gain(second) or 0.0)
        return None if joined is None else joined - separate

    return score


def _position_score(delta: DeltaEvaluator) -> Score:
    """Score of joining two kernels that gain: their last operator, so kernels grow to producers."""
    gain_score = _gain_score(delta)

    def score(first: Mask, second: Mask) -> float | None:
        gain = gain_score(first, second)
        return None if gain is None or gain <= 0 else float(max(first, second).bit_length())

    return score
