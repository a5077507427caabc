"""Joint move of a document's category and topics; without it topics hold a document in its
category.
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
    add_token,
    close_topic,
    place_token,
    take_stick,
    topic_weights,
)

UNIFORM_SHARE = 0.1
"""Share of the uniform distribution in the proposal of a document's category."""
UNLIMITED = -1
"""``Limits.new`` of a model whose number of new categories is inferred."""
_SMALL = 1e-200
"""Products of probabilities below this are replaced by their logarithm."""


class Limits(NamedTuple):
    """Numbers of categories."""

    known: int
    """L; categories 0 to L - 1 are known, all others are new."""
    new: int
    """Number of new categories, or :data:`UNLIMITED`."""


@njit(cache=True)  # type: ignore[untyped-decorator]
def prior_mass(counts: Counts, category: int, limits: Limits, hyper: Concentrations) -> float:
    """Prior mass of a category for one more document: its documents, or xi for a new one."""
    documents = float(counts.documents[category])
    if category < limits.known:
        return documents
    if limits.new >= 0:
        if category >= limits.known + limits.new:
            return 0.0
        return documents + hyper.new_categories / limits.new
    return documents if documents > 0 else hyper.new_categories


@njit(cache=True)  # type: ignore[untyped-decorator]
def first_free(counts: Counts, known: int) -> int:
    """The first slot of a new category without documents."""
    slot = known
    while counts.documents[slot] > 0:
        slot += 1
    return slot


@njit(cache=True)  # type: ignore[untyped-decorator]
def is_short_of_slots(counts: Counts, tokens: int, limits: Limits) -> bool:
    """Whether a document of ``tokens`` tokens may need more slots than there are."""
    if len(counts.topics) - counts.used[0] <= tokens:
        return True
    return limits.new < 0 and counts.documents[len(counts.documents) - 2] > 0


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})  # type: ignore[untyped-decorator]
def category_scores(
    counts: Counts, words: Ints, limits: Limits, hyper: Concentrations, scores: Floats
) -> None:
    """Log of prior mass times approximate likelihood of a document, for each category slot.

    The likelihood is the product of the words' predictive probabilities, without the counts of the
    document's own tokens.  Of the slots of new categories without documents, the first stands for
    all; the others get -inf.
    """
    used, vocabulary = counts.used[0], counts.word_topics.shape[0]
    by_word = np.empty((len(words), used))  # phi_kw of each distinct word
    repeats = np.empty(len(words), np.int64)
    distinct = 0
    for i in range(len(words)):
        if i > 0 and words[i] == words[i - 1]:
            repeats[distinct - 1] += 1
            continue
        row = counts.word_topics[words[i]]
        for k in range(used):
            by_word[distinct, k] = (row[k] + hyper.words) * counts.inverse[k]
        repeats[distinct] = 1
        distinct += 1
    mixture = np.empty(used)
    is_first_free = True
    for c in range(len(scores)):
        scores[c] = -np.inf
        mass = prior_mass(counts, c, limits, hyper)
        if c >= limits.known and counts.documents[c] == 0 and limits.new < 0:
            if not is_first_free:
                continue
            is_first_free = False
        if mass <= 0:
            continue
        total = counts.categories[c] + hyper.categories
        for k in range(used):
            mixture[k] = counts.category_topics[c, k] + hyper.categories * counts.sticks[k]
            mixture[k] /= total
        rest = hyper.categories * counts.rest[0] / (total * vocabulary)
        score, product = math.log(mass), 1.0
        for i in range(distinct):
            probability = rest
            for k in range(used):
                probability += mixture[k] * by_word[i, k]
            if repeats[i] > 4:
                score += repeats[i] * math.log(probability)
                continue
            for _ in range(repeats[i]):
                product *= probability
            if product < _SMALL:  # one logarithm for many words
                score += math.log(product)
                product = 1.0
        scores[c] = score + math.log(product)


@njit(cache=True)  # type: ignore[untyped-decorator]
def take_out(
    counts: Counts, category: int, words: Ints, topics: Ints, eta: float, sticks: Floats
) -> None:
    """Remove a document's tokens; writes the stick of each token's topic, for :func:`put_back`.

    A topic that only this document uses returns its stick to the rest.
    """
    for i in range(len(words)):
        sticks[i] = counts.sticks[topics[i]]
        add_token(counts, category, topics[i], words[i], -1.0, eta)
    for topic in topics:
        if counts.topics[topic] == 0 and counts.sticks[topic] > 0:
            close_topic(counts, topic)


@njit(cache=True)  # type: ignore[untyped-decorator]
def put_back(
    counts: Counts, category: int, words: Ints, topics: Ints, eta: float, sticks: Floats
) -> None:
    """Add the tokens that :func:`take_out` has removed."""
    for i in range(len(words)):
        if counts.sticks[topics[i]] <= 0:
            take_stick(counts, topics[i], sticks[i])
        add_token(counts, category, topics[i], words[i], 1.0, eta)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _log_predictive(
    counts: Counts,
    category: int,
    words: Ints,
    topics: Ints,
    hyper: Concentrations,
    sticks: Floats,
    weights: Floats,
) -> float:
    """Add tokens one by one; returns the log of their predictive probabilities."""
    score, product = 0.0, 1.0
    for i in range(len(words)):
        total = topic_weights(counts, category, words[i], hyper, weights)
        product *= total / (counts.categories[category] + hyper.categories)
        if product < _SMALL:
            score += math.log(product)
            product = 1.0
        if counts.sticks[topics[i]] <= 0:
            take_stick(counts, topics[i], sticks[i])
        add_token(counts, category, topics[i], words[i], 1.0, hyper.words)
    return score + math.log(product)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _place_document(
    counts: Counts,
    category: int,
    words: Ints,
    topics: Ints,
    hyper: Concentrations,
    weights: Floats,
    rng: np.random.Generator,
) -> float:
    """Draw topics one by one; returns the log of the words' predictive probabilities."""
    score, product = 0.0, 1.0
    for i in range(len(words)):
        topics[i], predictive = place_token(counts, category, words[i], hyper, weights, rng)
        product *= predictive
        if product < _SMALL:
            score += math.log(product)
            product = 1.0
    return score + math.log(product)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _propose_category(
    counts: Counts,
    scores: Floats,
    current: int,
    limits: Limits,
    hyper: Concentrations,
    rng: np.random.Generator,
) -> tuple[int, float]:
    """Draw a category; returns it and the log of p(new) q(current) / (p(current) q(new))."""
    best, candidates = scores.max(), 0
    total = 0.0
    for score in scores:
        if score > -np.inf:
            candidates += 1
            total += math.exp(score - best)
    remaining, proposed = rng.random(), current
    for c in range(len(scores)):
        if scores[c] > -np.inf:
            proposed = c
            remaining -= _proposal(scores[c], best, total, candidates)
            if remaining <= 0:
                break
    log_ratio = (
        math.log(prior_mass(counts, proposed, limits, hyper))
        - math.log(prior_mass(counts, current, limits, hyper))
        + math.log(_proposal(scores[current], best, total, candidates))
        - math.log(_proposal(scores[proposed], best, total, candidates))
    )
    return proposed, log_ratio


@njit(cache=True)  # type: ignore[untyped-decorator]
def _proposal(score: float, best: float, total: float, candidates: int) -> float:
    """Probability with which a category is proposed."""
    return (1 - UNIFORM_SHARE) * math.exp(score - best) / total + UNIFORM_SHARE / candidates


@njit(cache=True)  # type: ignore[untyped-decorator]
def place_documents(
    documents: Documents,
    topic_of: Ints,
    category_of: Ints,
    counts: Counts,
    limits: Limits,
    hyper: Concentrations,
    rng: np.random.Generator,
    order: Ints,
    first: int,
) -> int:
    """Place the documents one by one in ``order``, from its entry ``first`` on: a start of a chain.

    A labelled document has its category; another one draws it from :func:`category_scores`.
    Returns the first entry that was left out because slots are short.
    """
    weights = np.empty(len(counts.topics) + 1)
    scores = np.empty(len(counts.categories))
    for entry in range(first, len(order)):
        d = order[entry]
        start, end = documents.starts[d], documents.starts[d + 1]
        if is_short_of_slots(counts, end - start, limits):
            return entry
        words = documents.words[start:end]
        if documents.is_labelled[d] == 0:
            category_scores(counts, words, limits, hyper, scores)
            best = scores.max()
            remaining = rng.random() * np.exp(scores - best).sum()
            for c in range(len(scores)):
                if scores[c] > -np.inf:
                    category_of[d] = c
                    remaining -= math.exp(scores[c] - best)
                    if remaining <= 0:
                        break
        topics = topic_of[start:end]
        _place_document(counts, category_of[d], words, topics, hyper, weights, rng)
        counts.documents[category_of[d]] += 1
    return len(order)


@njit(cache=True)  # type: ignore[untyped-decorator]
def draw_categories(
    documents: Documents,
    topic_of: Ints,
    category_of: Ints,
    counts: Counts,
    limits: Limits,
    hyper: Concentrations,
    rng: np.random.Generator,
    first: int,
) -> tuple[int, int]:
    """Propose category and topics of each unlabelled document together (Metropolis-Hastings).

    The topics are drawn token by token from their conditional given the tokens placed before, so
    the chain rule cancels all of the posterior but prior, proposal and predictive probabilities.
    Returns the first document that was left out because slots are short, and the number of accepted
    proposals.
    """
    longest = 0
    for d in range(len(category_of)):
        longest = max(longest, documents.starts[d + 1] - documents.starts[d])
    drawn, kept = np.empty(longest, np.int64), np.empty(longest, np.int64)
    drawn_sticks, kept_sticks = np.empty(longest), np.empty(longest)
    weights = np.empty(len(counts.topics) + 1)
    scores = np.empty(len(counts.categories))
    eta, accepted = hyper.words, 0
    for d in range(first, len(category_of)):
        if documents.is_labelled[d] == 1:
            continue
        start, end = documents.starts[d], documents.starts[d + 1]
        if is_short_of_slots(counts, end - start, limits):
            return d, accepted
        words, length = documents.words[start:end], end - start
        current, proposed = kept[:length], drawn[:length]
        current[:] = topic_of[start:end]
        before = category_of[d]
        counts.documents[before] -= 1
        take_out(counts, before, words, current, eta, kept_sticks)
        if limits.new < 0 and before >= limits.known and counts.documents[before] == 0:
            before = first_free(counts, limits.known)
        category_scores(counts, words, limits, hyper, scores)
        after, log_ratio = _propose_category(counts, scores, before, limits, hyper, rng)
        log_ratio += _place_document(counts, after, words, proposed, hyper, weights, rng)
        take_out(counts, after, words, proposed, eta, drawn_sticks)
        log_ratio -= _log_predictive(counts, before, words, current, hyper, kept_sticks, weights)
        if math.log(rng.random()) < log_ratio:
            take_out(counts, before, words, current, eta, kept_sticks)
            put_back(counts, after, words, proposed, eta, drawn_sticks)
            topic_of[start:end] = proposed
            before = after
            accepted += 1
        category_of[d] = before
        counts.documents[before] += 1
    return len(category_of), accepted
