"""Moves that split a category into two, or merge a new category into another one.

Moves of single documents seldom empty or found a category of many documents.  A split allocates
the documents one after another, each given those before it (sequentially allocated merge-split,
Dahl 2005); topics of tokens and sticks stay.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from nostall.workload.learning.topics.categories import Limits, first_free
from nostall.workload.learning.topics.counts import Counts, Floats, Ints
from nostall.workload.learning.topics.tokens import Concentrations, Documents

_SMALL = 1e-200
"""Products of probabilities below this are replaced by their logarithm."""


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
    i, j = order[0], order[1]
    merged, is_split = category_of[j], category_of[i] == category_of[j]
    founded = category_of[i]
    if is_split:
        if _free_categories(counts, limits) == 0:
            return False
        founded = first_free(counts, limits.known)
    elif founded < limits.known:
        return False
    rows = np.zeros((2, len(counts.topics)))
    sizes, tokens = np.zeros(2), np.zeros(2)
    whole = counts.category_topics[merged].copy()
    if not is_split:
        whole += counts.category_topics[founded]
    rows[1] = whole
    tokens[1] = whole.sum()
    sizes[1] = counts.documents[merged] + (0 if is_split else counts.documents[founded])
    members = np.empty(len(order), np.int64)
    count = 0
    for d in order:
        if category_of[d] == merged or category_of[d] == founded:
            members[count] = d
            count += 1
            topics = topic_of[documents.starts[d] : documents.starts[d + 1]]
            _add(rows[1], tokens, 1, topics, -1.0)
            sizes[1] -= 1
    side_of = np.zeros(count, np.int64)
    log_proposal = 0.0
    base = _base_mass(merged, limits, hyper), _base_mass(founded, limits, hyper)
    for m in range(count):
        d = members[m]
        topics = topic_of[documents.starts[d] : documents.starts[d + 1]]
        if m < 2:
            side = m
        else:
            first = _log_topics(rows[0], tokens[0], topics, counts.sticks, hyper.categories)
            second = _log_topics(rows[1], tokens[1], topics, counts.sticks, hyper.categories)
            first += math.log(sizes[0] + base[1])
            second += math.log(sizes[1] + base[0])
            log_odds = min(max(first - second, -700.0), 700.0)
            share = 1.0 / (1.0 + math.exp(-log_odds))
            if is_split:
                side = 0 if rng.random() < share else 1
            else:
                side = 0 if category_of[d] == founded else 1
            log_proposal -= math.log1p(math.exp(-log_odds if side == 0 else log_odds))
        side_of[m] = side
        _add(rows[side], tokens, side, topics, 1.0)
        sizes[side] += 1
    free = _free_categories(counts, limits) + (0 if is_split else 1)
    log_split = _log_split(counts, rows, whole, sizes, base, hyper)
    # Slots of new categories are exchangeable: the founded one can be any of the free ones.
    log_split += math.log(hyper.new_categories if limits.new < 0 else free)
    log_ratio = log_split - log_proposal
    if not is_split:
        log_ratio = -log_ratio
    if math.log(rng.random()) >= log_ratio:
        return False
    if is_split:
        _write(counts, merged, rows[1], tokens[1], int(sizes[1]))
        _write(counts, founded, rows[0], tokens[0], int(sizes[0]))
        for m in range(count):
            if side_of[m] == 0:
                category_of[members[m]] = founded
    else:
        _write(counts, merged, whole, whole.sum(), int(sizes[0] + sizes[1]))
        rows[0] = 0.0
        _write(counts, founded, rows[0], 0.0, 0)
        for m in range(count):
            category_of[members[m]] = merged
    return True


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
def _add(row: Floats, tokens: Floats, side: int, topics: Ints, change: float) -> None:
    for topic in topics:
        row[topic] += change
    tokens[side] += change * len(topics)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _log_topics(row: Floats, tokens: float, topics: Ints, sticks: Floats, mass: float) -> float:
    """Log probability of a document's topics given the topics of a category; ``row`` stays."""
    score, product = 0.0, 1.0
    for i in range(len(topics)):
        k = topics[i]
        product *= (row[k] + mass * sticks[k]) / (tokens + i + mass)
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
def _log_split(
    counts: Counts,
    rows: Floats,
    whole: Floats,
    sizes: Floats,
    base: tuple[float, float],
    hyper: Concentrations,
) -> float:
    """Log posterior of two categories minus that of their union, but for the factor of slots."""
    score = math.lgamma(sizes[0] + base[1]) + math.lgamma(sizes[1] + base[0])
    score -= math.lgamma(sizes[0] + sizes[1] + base[0])
    if base[1] > 0:
        score -= math.lgamma(base[1])
    sticks, mass = counts.sticks, hyper.categories
    score += _log_marginal(rows[0], sticks, mass) + _log_marginal(rows[1], sticks, mass)
    return float(score - _log_marginal(whole, sticks, mass))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _write(counts: Counts, category: int, row: Floats, tokens: float, size: int) -> None:
    counts.category_topics[category] = row
    counts.categories[category] = tokens
    counts.documents[category] = size
