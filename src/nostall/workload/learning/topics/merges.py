"""Moves that split a category into two, or merge a new category into another one.

Moves of single documents seldom empty or found a category of many documents.  A split allocates
the documents one after another, each given those before it (sequentially allocated merge-split,
Dahl 2005); topics of tokens and sticks stay.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from nostall.workload.learning.topics.categories import Limits, first_free
from nostall.workload.learning.topics.tokens import Concentrations, Counts, Documents, Floats, Ints

_SMALL = 1e-200
"""Products of probabilities below this are replaced by their logarithm."""


class Sides(NamedTuple):
    """Two categories while documents are allocated to them: 0 is founded, 1 is kept."""

    rows: Floats
    """Tokens by topic, shape (2, topic slots)."""
    tokens: Floats
    """Tokens, shape (2,)."""
    sizes: Floats
    """Documents, shape (2,)."""
    base: Floats
    """Prior masses beyond the documents, shape (2,)."""


@njit(cache=True)  # type: ignore[untyped-decorator]
def split_or_merge(
    documents: Documents,
    topic_of: Ints,
    category_of: Ints,
    counts: Counts,
    limits: Limits,
    hyper: Concentrations,
    rng: np.random.Generator,
    order: Ints,
) -> bool:
    """One proposal; returns whether it is accepted.

    ``order`` holds the unlabelled documents in random order; i and j are the first two.  If they
    share a category, i founds a new one and the other documents follow i or stay with j.
    Otherwise the category of i, if it is new, is merged into that of j.
    """
    if len(order) < 2 or counts.documents[len(counts.documents) - 1] > 0:
        return False
    founded, kept = category_of[order[0]], category_of[order[1]]
    is_split = founded == kept
    if is_split:
        if _free_categories(counts, limits) == 0:
            return False
        founded = first_free(counts, limits.known)
    elif founded < limits.known:
        return False
    is_member = (category_of[order] == kept) | (category_of[order] == founded)
    members = order[is_member]
    whole = counts.category_topics[kept] + counts.category_topics[founded]
    size = counts.documents[kept] + counts.documents[founded]
    sides = _without_members(documents, topic_of, members, whole, size)
    sides.base[0] = _base_mass(founded, limits, hyper)
    sides.base[1] = _base_mass(kept, limits, hyper)
    side_of = np.where(category_of[members] == founded, 0, 1)
    log_proposal = _allocate(
        documents, topic_of, members, side_of, sides, counts.sticks, hyper, rng, is_split
    )
    free = _free_categories(counts, limits) + (0 if is_split else 1)
    log_split = _log_split(counts, sides, whole, hyper)
    # Slots of new categories are exchangeable: the founded one can be any of the free ones.
    log_split += math.log(hyper.new_categories if limits.new < 0 else free)
    log_ratio = log_split - log_proposal
    if math.log(rng.random()) >= (log_ratio if is_split else -log_ratio):
        return False
    if not is_split:
        side_of[:] = 1
        sides.rows[1] = whole
        sides.rows[0] = 0.0
        sides.sizes[1], sides.sizes[0] = size, 0
    for side, category in ((0, founded), (1, kept)):
        counts.category_topics[category] = sides.rows[side]
        counts.categories[category] = sides.rows[side].sum()
        counts.documents[category] = int(sides.sizes[side])
    for m in range(len(members)):
        category_of[members[m]] = founded if side_of[m] == 0 else kept
    return True


@njit(cache=True)  # type: ignore[untyped-decorator]
def _without_members(
    documents: Documents, topic_of: Ints, members: Ints, whole: Floats, size: int
) -> Sides:
    """Side 1 has what stays of both categories without ``members``: labelled documents."""
    sides = Sides(np.zeros((2, len(whole))), np.zeros(2), np.zeros(2), np.zeros(2))
    sides.rows[1] = whole
    sides.tokens[1] = whole.sum()
    sides.sizes[1] = size
    for d in members:
        _add(sides, 1, topic_of[documents.starts[d] : documents.starts[d + 1]], -1.0)
    return sides


@njit(cache=True)  # type: ignore[untyped-decorator]
def _allocate(
    documents: Documents,
    topic_of: Ints,
    members: Ints,
    side_of: Ints,
    sides: Sides,
    sticks: Floats,
    hyper: Concentrations,
    rng: np.random.Generator,
    is_drawn: bool,
) -> float:
    """Add the members to their sides; returns the log of the probability of that allocation.

    With ``is_drawn``, sides are drawn and written to ``side_of``.
    """
    log_proposal = 0.0
    for m in range(len(members)):
        topics = topic_of[documents.starts[members[m]] : documents.starts[members[m] + 1]]
        if m < 2:
            side_of[m] = m
        else:
            log_odds = math.log(sides.sizes[0] + sides.base[0])
            log_odds -= math.log(sides.sizes[1] + sides.base[1])
            log_odds += _log_topics(sides, 0, topics, sticks, hyper.categories)
            log_odds -= _log_topics(sides, 1, topics, sticks, hyper.categories)
            log_odds = min(max(log_odds, -700.0), 700.0)
            if is_drawn:
                side_of[m] = 0 if rng.random() * (1.0 + math.exp(-log_odds)) < 1.0 else 1
            log_proposal -= math.log1p(math.exp(-log_odds if side_of[m] == 0 else log_odds))
        _add(sides, side_of[m], topics, 1.0)
    return log_proposal


@njit(cache=True)  # type: ignore[untyped-decorator]
def _free_categories(counts: Counts, limits: Limits) -> int:
    """Free slots of new categories if their number is given, else 1."""
    if limits.new < 0:
        return 1
    return int((counts.documents[limits.known : limits.known + limits.new] == 0).sum())


@njit(cache=True)  # type: ignore[untyped-decorator]
def _base_mass(category: int, limits: Limits, hyper: Concentrations) -> float:
    """Mass of a category beyond its documents: xi / new if the number of new ones is given."""
    if category < limits.known or limits.new < 0:
        return 0.0
    return hyper.new_categories / limits.new


@njit(cache=True)  # type: ignore[untyped-decorator]
def _add(sides: Sides, side: int, topics: Ints, change: float) -> None:
    """Add (``change`` 1) or remove (-1) one document."""
    for topic in topics:
        sides.rows[side, topic] += change
    sides.tokens[side] += change * len(topics)
    sides.sizes[side] += change


@njit(cache=True)  # type: ignore[untyped-decorator]
def _log_topics(sides: Sides, side: int, topics: Ints, sticks: Floats, mass: float) -> float:
    """Log probability of a document's topics given the topics of a category."""
    score, product, row = 0.0, 1.0, sides.rows[side]
    for i in range(len(topics)):
        k = topics[i]
        product *= (row[k] + mass * sticks[k]) / (sides.tokens[side] + i + mass)
        row[k] += 1.0
        if product < _SMALL:
            score += math.log(max(product, 1e-320))
            product = 1.0
    for k in topics:
        row[k] -= 1.0
    return score + math.log(max(product, 1e-320))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _log_marginal(row: Floats, sticks: Floats, mass: float) -> float:
    """Log probability of a category's topics: a Dirichlet-multinomial with masses a0 beta."""
    score = math.lgamma(mass) - math.lgamma(mass + row.sum())
    for k in range(len(row)):
        if row[k] > 0:
            score += math.lgamma(mass * sticks[k] + row[k]) - math.lgamma(mass * sticks[k])
    return score


@njit(cache=True)  # type: ignore[untyped-decorator]
def _log_split(counts: Counts, sides: Sides, whole: Floats, hyper: Concentrations) -> float:
    """Log posterior of two categories minus that of their union, but for the factor of slots."""
    sizes, base = sides.sizes, sides.base
    score = math.lgamma(sizes[0] + base[0]) + math.lgamma(sizes[1] + base[1])
    score -= math.lgamma(sizes[0] + sizes[1] + base[1])
    if base[0] > 0:
        score -= math.lgamma(base[0])
    sticks, mass = counts.sticks, hyper.categories
    score += _log_marginal(sides.rows[0], sticks, mass)
    score += _log_marginal(sides.rows[1], sticks, mass)
    return float(score - _log_marginal(whole, sticks, mass))
