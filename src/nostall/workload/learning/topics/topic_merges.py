"""Moves that split a topic into two, or merge two topics.

Chains start with more topics than documents need; re-drawing one token at a time seldom empties a
topic.  A split allocates the tokens one after another, each given those before it (sequentially
allocated merge-split, Dahl 2005), and divides the stick uniformly.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from nostall.workload.learning.topics.counts import (
    Counts,
    Floats,
    Ints,
    close_topic,
    take_stick,
)
from nostall.workload.learning.topics.tokens import Concentrations, Documents


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
    kept, founded, is_split = topic_of[j], topic_of[i], topic_of[i] == topic_of[j]
    if is_split:
        founded = _free_topic(counts)
        if founded < 0:
            return False
    tokens, category = _tokens_of(documents, topic_of, category_of, kept, founded, i, j, rng)
    stick = counts.sticks[kept] + (0.0 if is_split else counts.sticks[founded])
    share = rng.random() if is_split else counts.sticks[founded] / stick
    share = min(max(share, 1e-12), 1 - 1e-12)
    sticks = np.array([share * stick, (1 - share) * stick])
    vocabulary, eta, mass = counts.word_topics.shape[0], hyper.words, hyper.categories
    by_category = np.zeros((2, len(counts.categories)))
    by_word, totals = np.zeros((2, vocabulary)), np.zeros(2)
    side_of = np.empty(len(tokens), np.int64)
    log_proposal, product = 0.0, 1.0
    for t in range(len(tokens)):
        token, c = tokens[t], category[t]
        w, side = documents.words[token], t
        if t >= 2:
            first = (by_category[0, c] + mass * sticks[0]) * (by_word[0, w] + eta)
            first /= totals[0] + vocabulary * eta
            second = (by_category[1, c] + mass * sticks[1]) * (by_word[1, w] + eta)
            second /= totals[1] + vocabulary * eta
            if is_split:
                side = 0 if rng.random() * (first + second) < first else 1
            else:
                side = 0 if topic_of[token] == founded else 1
            product *= (first if side == 0 else second) / (first + second)
            if product < 1e-200:
                log_proposal += math.log(max(product, 1e-320))
                product = 1.0
        side_of[t] = side
        by_category[side, c] += 1
        by_word[side, w] += 1
        totals[side] += 1
    log_proposal += math.log(product)
    log_ratio = math.log(hyper.topics) - math.log(share) - math.log1p(-share) - log_proposal
    log_ratio += _log_split(by_category, mass * sticks, 0.0)
    log_ratio += _log_split(by_word, np.full(2, eta), eta)
    for total in totals:
        log_ratio += math.lgamma(vocabulary * eta) - math.lgamma(total + vocabulary * eta)
    whole = totals.sum() + vocabulary * eta
    log_ratio -= math.lgamma(vocabulary * eta) - math.lgamma(whole)
    if math.log(rng.random()) >= (log_ratio if is_split else -log_ratio):
        return False
    if not is_split:
        by_category[1] += by_category[0]
        by_word[1] += by_word[0]
    if is_split:
        _write(counts, founded, by_category[0], by_word[0], eta)
    else:
        _write(counts, founded, np.zeros(len(by_category[0])), np.zeros(vocabulary), eta)
        close_topic(counts, founded)
    _write(counts, kept, by_category[1], by_word[1], eta)
    counts.rest[0] += counts.sticks[kept]
    counts.sticks[kept] = 0.0
    take_stick(counts, kept, sticks[1] if is_split else stick)
    if is_split:
        take_stick(counts, founded, sticks[0])
    for t in range(len(tokens)):
        topic_of[tokens[t]] = founded if is_split and side_of[t] == 0 else kept
    return True


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
def _log_split(rows: Floats, masses: Floats, union: float) -> float:
    """Log of rising factorials of two rows minus that of their sum.

    ``masses``: base mass of each row; ``union``: that of the sum, or 0 for the sum of both.
    """
    whole = union if union > 0 else masses.sum()
    score = 0.0
    for column in range(rows.shape[1]):
        total = rows[0, column] + rows[1, column]
        if total == 0:
            continue
        for side in range(2):
            count = rows[side, column]
            if count > 0:
                score += math.lgamma(masses[side] + count) - math.lgamma(masses[side])
        score -= math.lgamma(whole + total) - math.lgamma(whole)
    return score


@njit(cache=True)  # type: ignore[untyped-decorator]
def _write(counts: Counts, topic: int, by_category: Floats, by_word: Floats, eta: float) -> None:
    counts.category_topics[:, topic] = by_category
    counts.word_topics[:, topic] = by_word
    counts.topics[topic] = by_word.sum()
    counts.inverse[topic] = 1.0 / (by_word.sum() + len(by_word) * eta)
