"""Sampler of a topic model with known and new categories: direct assignment.

One sweep re-draws the topic of each token given its document's category, then proposes for each
document a category and its topics together.  Without that joint move a document's topics hold it in
its category.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from nostall.workload.learning.topics.counts import (
    Counts,
    Floats,
    Ints,
    add_token,
    close_topic,
    free_slots,
    open_topic,
    used_slots,
)

UNIFORM_SHARE = 0.1
"""Share of the uniform distribution in the proposal of a document's category."""


_SMALL = 1e-200
"""Products of probabilities below this are replaced by their logarithm."""


class Documents(NamedTuple):
    """Tokens of all documents, one after another."""

    words: Ints
    """Word of each token."""
    starts: Ints
    """First token of each document, and the number of tokens, shape (documents + 1,)."""
    is_labelled: Ints
    """1 for documents whose category is known."""


class Concentrations(NamedTuple):
    """Hyper-parameters of the Dirichlet processes and of the topics."""

    topics: float
    """gamma: how many topics there are."""
    categories: float
    """a0: how alike the topics of different categories are."""
    new_categories: float
    """xi: how many new categories there are."""
    words: float
    """eta: how many words a topic has."""


@njit(cache=True)  # type: ignore[untyped-decorator]
def token_weights(
    counts: Counts, category: int, word: int, hyper: Concentrations, weights: Floats
) -> float:
    """Unnormalised probability of each topic slot for a token; the last entry is a new topic.

    Writes ``weights[: used + 1]`` and returns their sum divided by the category's mass, which is
    the predictive probability of the word.
    """
    used = used_slots(counts.sticks)
    vocabulary = counts.topic_words.shape[1]
    total = 0.0
    for k in range(used):
        weights[k] = 0.0
        if counts.sticks[k] > 0:
            mass = counts.category_topics[category, k] + hyper.categories * counts.sticks[k]
            weights[k] = (
                mass
                * (counts.topic_words[k, word] + hyper.words)
                / (counts.topics[k] + vocabulary * hyper.words)
            )
            total += weights[k]
    weights[used] = hyper.categories * counts.rest[0] / vocabulary
    total += weights[used]
    return float(total / (counts.categories[category] + hyper.categories))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _place(
    counts: Counts,
    category: int,
    word: int,
    hyper: Concentrations,
    weights: Floats,
    rng: np.random.Generator,
) -> tuple[int, float]:
    """Draw a topic for a token and count it; returns it and the word's predictive probability."""
    predictive = token_weights(counts, category, word, hyper, weights)
    used = used_slots(counts.sticks)
    total = 0.0
    for k in range(used + 1):
        total += weights[k]
    remaining, topic = rng.random() * total, used
    for k in range(used + 1):
        if weights[k] > 0:
            remaining -= weights[k]
            if remaining <= 0:
                topic = k
                break
    if topic == used:
        topic = open_topic(counts, rng.beta(1.0, hyper.topics))
    add_token(counts, category, topic, word, 1)
    return topic, predictive


@njit(cache=True)  # type: ignore[untyped-decorator]
def draw_topics(
    documents: Documents,
    topic_of: Ints,
    category_of: Ints,
    counts: Counts,
    hyper: Concentrations,
    rng: np.random.Generator,
    first: int,
) -> int:
    """Re-draw the topic of each token of the documents from number ``first`` on.

    Returns the number of the first document that was left out because topic slots are short.
    """
    weights = np.empty(len(counts.topics) + 1)
    for d in range(first, len(category_of)):
        start, end = documents.starts[d], documents.starts[d + 1]
        if free_slots(counts.sticks) < 2:
            return d
        for i in range(start, end):
            if free_slots(counts.sticks) < 1:
                return d
            word, topic = documents.words[i], topic_of[i]
            add_token(counts, category_of[d], topic, word, -1)
            if counts.topics[topic] == 0:
                close_topic(counts, topic)
            topic_of[i], _ = _place(counts, category_of[d], word, hyper, weights, rng)
    return len(category_of)


@njit(cache=True)  # type: ignore[untyped-decorator]
def category_scores(
    counts: Counts,
    words: Ints,
    known: int,
    hyper: Concentrations,
    new_slots: int,
    scores: Floats,
) -> None:
    """Log of prior mass times approximate likelihood of a document, for each category slot.

    The likelihood is the product of the words' predictive probabilities, without the counts of the
    document's own tokens.  ``new_slots``: number of new categories if it is given, else -1; then
    the first free slot stands for all further new categories.  Other free slots get -inf.
    """
    used = used_slots(counts.sticks)
    vocabulary = counts.topic_words.shape[1]
    weights = np.empty(used + 1)
    is_first_free = True
    for c in range(len(scores)):
        scores[c] = -np.inf
        mass = prior_mass(counts, c, known, hyper, new_slots)
        if c >= known and counts.documents[c] == 0 and new_slots < 0:
            if not is_first_free:
                continue
            is_first_free = False
        if mass <= 0:
            continue
        total = counts.categories[c] + hyper.categories
        for k in range(used):  # free slots have no tokens and no stick, so their weight is 0
            mass_of_topic = counts.category_topics[c, k] + hyper.categories * counts.sticks[k]
            weights[k] = mass_of_topic / (total * (counts.topics[k] + vocabulary * hyper.words))
        rest = hyper.categories * counts.rest[0] / (total * vocabulary)
        score, product = math.log(mass), 1.0
        for word in words:
            probability = rest
            for k in range(used):
                probability += weights[k] * (counts.topic_words[k, word] + hyper.words)
            product *= probability
            if product < _SMALL:  # one logarithm for many words
                score += math.log(product)
                product = 1.0
        scores[c] = score + math.log(product)


@njit(cache=True)  # type: ignore[untyped-decorator]
def prior_mass(
    counts: Counts, category: int, known: int, hyper: Concentrations, new_slots: int
) -> float:
    """Prior mass of a category for one more document: its documents, or xi for a new one."""
    documents = float(counts.documents[category])
    if category < known:
        return documents
    if new_slots >= 0:
        if category >= known + new_slots:
            return 0.0
        return documents + hyper.new_categories / new_slots
    return documents if documents > 0 else hyper.new_categories


@njit(cache=True)  # type: ignore[untyped-decorator]
def _take_out(counts: Counts, category: int, words: Ints, topics: Ints) -> Floats:
    """Remove a document's tokens; returns the stick of each token's topic, for :func:`_put_back`.

    A topic that only this document uses returns its stick to the rest.
    """
    sticks = np.empty(len(words))
    for i in range(len(words)):
        sticks[i] = counts.sticks[topics[i]]
        add_token(counts, category, topics[i], words[i], -1)
    for topic in topics:
        if counts.topics[topic] == 0 and counts.sticks[topic] > 0:
            close_topic(counts, topic)
    return sticks


@njit(cache=True)  # type: ignore[untyped-decorator]
def _put_back(
    counts: Counts,
    category: int,
    words: Ints,
    topics: Ints,
    sticks: Floats,
    hyper: Concentrations,
    weights: Floats,
) -> float:
    """Add a document's tokens one by one; returns the log of their predictive probabilities."""
    log_predictive = 0.0
    for i in range(len(words)):
        log_predictive += math.log(token_weights(counts, category, words[i], hyper, weights))
        if counts.sticks[topics[i]] <= 0:
            counts.sticks[topics[i]] = sticks[i]
            counts.rest[0] = max(counts.rest[0] - sticks[i], 1e-300)
        add_token(counts, category, topics[i], words[i], 1)
    return log_predictive


@njit(cache=True)  # type: ignore[untyped-decorator]
def _first_free(counts: Counts, known: int) -> int:
    """The first slot of a new category without documents."""
    slot = known
    while counts.documents[slot] > 0:
        slot += 1
    return slot


@njit(cache=True)  # type: ignore[untyped-decorator]
def _propose_category(
    counts: Counts,
    scores: Floats,
    before: int,
    known: int,
    new_slots: int,
    hyper: Concentrations,
    rng: np.random.Generator,
) -> tuple[int, float]:
    """Draw a category; returns it and the log of p(after) q(before) / (p(before) q(after))."""
    best, candidates = scores.max(), 0
    total = 0.0
    for score in scores:
        if score > -np.inf:
            candidates += 1
            total += math.exp(score - best)
    remaining, after = rng.random(), before
    for c in range(len(scores)):
        if scores[c] > -np.inf:
            after = c
            remaining -= _proposal(scores[c], best, total, candidates)
            if remaining <= 0:
                break
    log_ratio = (
        math.log(prior_mass(counts, after, known, hyper, new_slots))
        - math.log(prior_mass(counts, before, known, hyper, new_slots))
        + math.log(_proposal(scores[before], best, total, candidates))
        - math.log(_proposal(scores[after], best, total, candidates))
    )
    return after, log_ratio


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
    known: int,
    new_slots: int,
    hyper: Concentrations,
    rng: np.random.Generator,
    first: int,
    order: Ints,
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
        if free_slots(counts.sticks) <= end - start:
            return entry
        if new_slots < 0 and counts.documents[len(counts.documents) - 2] > 0:
            return entry
        words = documents.words[start:end]
        if documents.is_labelled[d] == 0:
            category_scores(counts, words, known, hyper, new_slots, scores)
            best = scores.max()
            remaining = rng.random() * np.exp(scores - best).sum()
            for c in range(len(scores)):
                if scores[c] > -np.inf:
                    category_of[d] = c
                    remaining -= math.exp(scores[c] - best)
                    if remaining <= 0:
                        break
        for i in range(start, end):
            topic_of[i], _ = _place(counts, category_of[d], documents.words[i], hyper, weights, rng)
        counts.documents[category_of[d]] += 1
    return len(order)


@njit(cache=True)  # type: ignore[untyped-decorator]
def draw_categories(
    documents: Documents,
    topic_of: Ints,
    category_of: Ints,
    counts: Counts,
    known: int,
    new_slots: int,
    hyper: Concentrations,
    rng: np.random.Generator,
    first: int,
) -> tuple[int, int]:
    """Propose category and topics of each document together (Metropolis-Hastings).

    The topics are drawn token by token from their conditional given the tokens placed before, so
    the chain rule cancels all of the posterior but prior, proposal and predictive probabilities.
    Labelled documents propose topics only.  Returns the first document that was left out because
    slots are short, and the number of accepted proposals.
    """
    longest = 0
    for d in range(len(category_of)):
        longest = max(longest, documents.starts[d + 1] - documents.starts[d])
    drawn = np.empty(longest, np.int64)
    weights = np.empty(len(counts.topics) + 1)
    scores = np.empty(len(counts.categories))
    accepted = 0
    for d in range(first, len(category_of)):
        start, end = documents.starts[d], documents.starts[d + 1]
        if free_slots(counts.sticks) <= end - start:
            return d, accepted
        if new_slots < 0 and counts.documents[len(counts.documents) - 2] > 0:
            return d, accepted
        words, proposed = documents.words[start:end], drawn[: end - start]
        current = topic_of[start:end].copy()
        before, log_ratio = category_of[d], 0.0
        counts.documents[before] -= 1
        sticks = _take_out(counts, before, words, current)
        if new_slots < 0 and before >= known and counts.documents[before] == 0:
            before = _first_free(counts, known)
        after = before
        if documents.is_labelled[d] == 0:
            category_scores(counts, words, known, hyper, new_slots, scores)
            after, log_ratio = _propose_category(
                counts, scores, before, known, new_slots, hyper, rng
            )
        log_after = 0.0
        for i in range(len(words)):
            proposed[i], predictive = _place(counts, after, words[i], hyper, weights, rng)
            log_after += math.log(predictive)
        proposed_sticks = _take_out(counts, after, words, proposed)
        log_before = _put_back(counts, before, words, current, sticks, hyper, weights)
        if math.log(rng.random()) < log_ratio + log_after - log_before:
            _take_out(counts, before, words, current)
            _put_back(counts, after, words, proposed, proposed_sticks, hyper, weights)
            topic_of[start:end] = proposed
            before = after
            accepted += 1
        category_of[d] = before
        counts.documents[before] += 1
    return len(category_of), accepted
