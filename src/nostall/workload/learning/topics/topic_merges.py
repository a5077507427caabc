"""Moves that split a topic into two, or merge two topics.

Chains start with more topics than documents need; re-drawing one token at a time seldom empties a
topic.  A split allocates the tokens one after another, each given those before it (sequentially
allocated merge-split, Dahl 2005), and divides the stick uniformly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from nostall.workload.learning.topics.tokens import (
    Concentrations,
    Counts,
    Documents,
    Floats,
    Ints,
    close_topic,
    take_stick,
)


class Sides(NamedTuple):
    """Two topics while tokens are allocated to them: 0 is founded, 1 is kept."""

    by_category: Floats
    """Tokens by category, shape (2, category slots)."""
    by_word: Floats
    """Tokens by word, shape (2, words)."""
    totals: Floats
    """Tokens, shape (2,)."""
    sticks: Floats
    """Parts of the stick, shape (2,)."""


@njit(cache=True)  # type: ignore[untyped-decorator]
def split_or_merge_topics(
    documents: Documents,
    topic_of: Ints,
    category_of: Ints,
    counts: Counts,
    hyper: Concentrations,
    rng: np.random.Generator,
) -> bool:
    """One proposal for the topics of two random tokens; returns whether it is accepted.

    If they share a topic, the first founds a new one.  Otherwise the topic of the first is merged
    into that of the second.
    """
    i, j = int(rng.random() * len(topic_of)), int(rng.random() * len(topic_of))
    if i == j:
        return False
    founded, kept = topic_of[i], topic_of[j]
    is_split = founded == kept
    if is_split:
        founded = _free_topic(counts)
        if founded < 0:
            return False
    tokens, category = _tokens_of(documents, topic_of, category_of, kept, founded, i, j, rng)
    stick = counts.sticks[kept] + counts.sticks[founded]
    share = rng.random() if is_split else counts.sticks[founded] / stick
    share = min(max(share, 1e-12), 1 - 1e-12)
    sides = Sides(
        np.zeros((2, len(counts.categories))),
        np.zeros((2, counts.word_topics.shape[0])),
        np.zeros(2),
        np.array([share * stick, (1 - share) * stick]),
    )
    words = documents.words[tokens]
    side_of = np.where(topic_of[tokens] == founded, 0, 1)
    log_proposal = _allocate(words, category, side_of, sides, hyper, rng, is_split)
    log_ratio = _log_split(sides, hyper) - log_proposal
    log_ratio += math.log(hyper.topics) - math.log(share) - math.log1p(-share)
    if math.log(rng.random()) >= (log_ratio if is_split else -log_ratio):
        return False
    close_topic(counts, kept)
    if not is_split:
        close_topic(counts, founded)
        side_of[:] = 1
        sides.by_category[1] += sides.by_category[0]
        sides.by_word[1] += sides.by_word[0]
        sides.by_category[0] = 0.0
        sides.by_word[0] = 0.0
    _write(counts, founded, sides, 0, hyper.words)
    _write(counts, kept, sides, 1, hyper.words)
    take_stick(counts, kept, sides.sticks[1] if is_split else stick)
    if is_split:
        take_stick(counts, founded, sides.sticks[0])
    for t in range(len(tokens)):
        topic_of[tokens[t]] = founded if side_of[t] == 0 else kept
    return True


@njit(cache=True)  # type: ignore[untyped-decorator]
def _allocate(
    words: Ints,
    category: Ints,
    side_of: Ints,
    sides: Sides,
    hyper: Concentrations,
    rng: np.random.Generator,
    is_drawn: bool,
) -> float:
    """Add the tokens to their sides; returns the log of the probability of that allocation.

    With ``is_drawn``, sides are drawn and written to ``side_of``.
    """
    log_proposal, product = 0.0, 1.0
    eta, mass = hyper.words, hyper.categories
    vocabulary = sides.by_word.shape[1]
    weights = np.empty(2)
    for t in range(len(words)):
        w, c = words[t], category[t]
        if t < 2:
            side_of[t] = t
        else:
            for side in range(2):
                weights[side] = sides.by_category[side, c] + mass * sides.sticks[side]
                weights[side] *= sides.by_word[side, w] + eta
                weights[side] /= sides.totals[side] + vocabulary * eta
            total = weights[0] + weights[1]
            if is_drawn:
                side_of[t] = 0 if rng.random() * total < weights[0] else 1
            product *= weights[side_of[t]] / total
            if product < 1e-200:
                log_proposal += math.log(max(product, 1e-320))
                product = 1.0
        side = side_of[t]
        sides.by_category[side, c] += 1
        sides.by_word[side, w] += 1
        sides.totals[side] += 1
    return log_proposal + math.log(product)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _free_topic(counts: Counts) -> int:
    for k in range(len(counts.sticks)):
        if counts.sticks[k] <= 0:
            return k
    return -1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _tokens_of(
    documents: Documents,
    topic_of: Ints,
    category_of: Ints,
    kept: int,
    founded: int,
    i: int,
    j: int,
    rng: np.random.Generator,
) -> tuple[Ints, Ints]:
    """Tokens of two topics, and their categories: i, j, then the others in random order."""
    count = 0
    for topic in topic_of:
        if topic in (kept, founded):
            count += 1
    tokens, category = np.empty(count, np.int64), np.empty(count, np.int64)
    count = 2
    for d in range(len(category_of)):
        for token in range(documents.starts[d], documents.starts[d + 1]):
            if token in (i, j):
                place = 0 if token == i else 1
            elif topic_of[token] in (kept, founded):
                place = count
                count += 1
            else:
                continue
            tokens[place], category[place] = token, category_of[d]
    for place in range(count - 1, 2, -1):  # Fisher-Yates
        other = 2 + int(rng.random() * (place - 1))
        tokens[place], tokens[other] = tokens[other], tokens[place]
        category[place], category[other] = category[other], category[place]
    return tokens, category


@njit(cache=True)  # type: ignore[untyped-decorator]
def _log_split(sides: Sides, hyper: Concentrations) -> float:
    """Log probability of topics and words of two topics minus that of their union."""
    eta, masses = hyper.words, hyper.categories * sides.sticks
    vocabulary = sides.by_word.shape[1]
    score = _log_rising(sides.by_category, masses, masses.sum())
    score += _log_rising(sides.by_word, np.full(2, eta), eta)
    score += math.lgamma(vocabulary * eta) + math.lgamma(sides.totals.sum() + vocabulary * eta)
    for total in sides.totals:
        score -= math.lgamma(total + vocabulary * eta)
    return float(score)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _log_rising(rows: Floats, masses: Floats, union: float) -> float:
    """Log of rising factorials of two rows minus those of their sum, whose mass is ``union``."""
    score = 0.0
    for column in range(rows.shape[1]):
        total = rows[0, column] + rows[1, column]
        if total == 0:
            continue
        for side in range(2):
            if rows[side, column] > 0:
                score += math.lgamma(masses[side] + rows[side, column])
                score -= math.lgamma(masses[side])
        score -= math.lgamma(union + total) - math.lgamma(union)
    return score


@njit(cache=True)  # type: ignore[untyped-decorator]
def _write(counts: Counts, topic: int, sides: Sides, side: int, eta: float) -> None:
    counts.category_topics[:, topic] = sides.by_category[side]
    counts.word_topics[:, topic] = sides.by_word[side]
    total = sides.by_word[side].sum()
    counts.topics[topic] = total
    counts.inverse[topic] = 1.0 / (total + sides.by_word.shape[1] * eta)
