"""Gibbs step of the topics of tokens, given the categories of their documents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from nostall.workload.learning.topics.counts import (
    Counts,
    Floats,
    Ints,
    add_token,
    close_topic,
    open_topic,
)


class Documents(NamedTuple):
    """Tokens of all documents, one after another; equal words of a document are adjacent."""

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


@njit(cache=True, inline="always", fastmath={"reassoc", "contract", "nsz"})  # type: ignore[untyped-decorator]
def topic_weights(
    counts: Counts, category: int, word: int, hyper: Concentrations, weights: Floats
) -> float:
    """Unnormalised probability of each topic for a token, and their sum.

    Writes ``weights[: used + 1]``; the last entry is a new topic.  The sum divided by
    (n_c + a0) is the predictive probability of the word.
    """
    used = counts.used[0]
    mass, eta = hyper.categories, hyper.words
    total = 0.0
    for k in range(used):  # a free slot has neither tokens nor a stick: its weight is 0
        weight = counts.category_topics[category, k] + mass * counts.sticks[k]
        weight *= (counts.word_topics[word, k] + eta) * counts.inverse[k]
        weights[k] = weight
        total += weight
    weights[used] = mass * counts.rest[0] / counts.word_topics.shape[0]
    return float(total + weights[used])


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def place_token(
    counts: Counts,
    category: int,
    word: int,
    hyper: Concentrations,
    weights: Floats,
    rng: np.random.Generator,
) -> tuple[int, float]:
    """Draw a topic for a token and count it; returns it and the word's predictive probability."""
    total = topic_weights(counts, category, word, hyper, weights)
    used = counts.used[0]
    predictive = total / (counts.categories[category] + hyper.categories)
    remaining, topic = rng.random() * total, used
    for k in range(used):
        remaining -= weights[k]
        if remaining <= 0 and weights[k] > 0:
            topic = k
            break
    if topic == used:
        topic = open_topic(counts, rng.beta(1.0, hyper.topics))
    add_token(counts, category, topic, word, 1.0, hyper.words)
    return topic, predictive


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})  # type: ignore[untyped-decorator]
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
    slots = len(counts.topics)
    weights = np.empty(slots + 1)
    for d in range(first, len(category_of)):
        start, end, category = documents.starts[d], documents.starts[d + 1], category_of[d]
        if slots - counts.used[0] <= end - start:
            return d
        for i in range(start, end):
            word, topic = documents.words[i], topic_of[i]
            add_token(counts, category, topic, word, -1.0, hyper.words)
            if counts.topics[topic] == 0:
                close_topic(counts, topic)
            topic_of[i], _ = place_token(counts, category, word, hyper, weights, rng)
    return len(category_of)
