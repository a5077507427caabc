"""Counts of a topic model's state, and the Gibbs step of the topics of tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


BLOCK = 16
"""Loops over topics visit blocks of slots, so that the compiler's vectors have no remainder."""


class Counts(NamedTuple):
    """Token counts and stick lengths; slots of topics and categories that are not in use are 0.

    Token counts are floating-point numbers: the loops over topics multiply them by sticks and are
    faster without conversions.
    """

    word_topics: Floats
    """n_wk, shape (words, topic slots)."""
    topics: Floats
    """n_k, shape (topic slots,)."""
    inverse: Floats
    """1 / (n_k + words * eta), shape (topic slots,)."""
    category_topics: Floats
    """n_ck, shape (category slots, topic slots)."""
    categories: Floats
    """n_c, shape (category slots,)."""
    documents: Ints
    """D_c, documents of each category, shape (category slots,)."""
    sticks: Floats
    """beta_k, shape (topic slots,); 0 if the slot is free."""
    rest: Floats
    """beta_u, the stick of all topics without tokens, shape (1,)."""
    used: Ints
    """Topic slots that loops visit: a multiple of :data:`BLOCK` that covers all in use; (1,)."""


@njit(cache=True)  # type: ignore[untyped-decorator]
def whole_blocks(slots: int) -> int:
    """``slots`` rounded up to a multiple of :data:`BLOCK`."""
    return (slots + BLOCK - 1) // BLOCK * BLOCK


def empty_counts(words: int, topic_slots: int, category_slots: int, eta: float) -> Counts:
    """Counts of a state without documents; ``topic_slots`` is rounded up to whole blocks."""
    topic_slots = whole_blocks(topic_slots)
    return Counts(
        np.zeros((words, topic_slots)),
        np.zeros(topic_slots),
        np.full(topic_slots, 1.0 / (words * eta)),
        np.zeros((category_slots, topic_slots)),
        np.zeros(category_slots),
        np.zeros(category_slots, np.int64),
        np.zeros(topic_slots),
        np.ones(1),
        np.zeros(1, np.int64),
    )


def with_slots(counts: Counts, topic_slots: int, category_slots: int, eta: float) -> Counts:
    """The same counts with more slots."""
    larger = empty_counts(counts.word_topics.shape[0], topic_slots, category_slots, eta)
    k, c = len(counts.topics), len(counts.categories)
    larger.word_topics[:, :k] = counts.word_topics
    larger.topics[:k] = counts.topics
    larger.inverse[:k] = counts.inverse
    larger.category_topics[:c, :k] = counts.category_topics
    larger.categories[:c] = counts.categories
    larger.documents[:c] = counts.documents
    larger.sticks[:k] = counts.sticks
    larger.rest[:] = counts.rest
    larger.used[:] = counts.used
    return larger


@njit(cache=True)  # type: ignore[untyped-decorator]
def open_topic(counts: Counts, share: float) -> int:
    """Give the first free slot ``share`` of the rest of the stick; returns the slot."""
    slot = 0
    while counts.sticks[slot] > 0:
        slot += 1
    take_stick(counts, slot, share * counts.rest[0])
    return slot


@njit(cache=True)  # type: ignore[untyped-decorator]
def take_stick(counts: Counts, topic: int, stick: float) -> None:
    """Give a free slot a part ``stick`` of the rest."""
    counts.sticks[topic] = max(stick, 1e-300)
    counts.rest[0] = max(counts.rest[0] - stick, 1e-300)
    counts.used[0] = max(counts.used[0], whole_blocks(topic + 1))


@njit(cache=True)  # type: ignore[untyped-decorator]
def close_topic(counts: Counts, topic: int) -> None:
    """Return the stick of a topic without tokens to the rest."""
    counts.rest[0] += counts.sticks[topic]
    counts.sticks[topic] = 0.0
    while counts.used[0] > 0 and counts.sticks[counts.used[0] - BLOCK : counts.used[0]].max() <= 0:
        counts.used[0] -= BLOCK


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def add_token(
    counts: Counts, category: int, topic: int, word: int, change: float, eta: float
) -> None:
    """Add (``change`` 1) or remove (-1) one token."""
    counts.word_topics[word, topic] += change
    counts.topics[topic] += change
    counts.inverse[topic] = 1.0 / (counts.topics[topic] + counts.word_topics.shape[0] * eta)
    counts.category_topics[category, topic] += change
    counts.categories[category] += change


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
