"""Counts of a topic model's state, and what opening and closing a topic does to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Counts(NamedTuple):
    """Token counts and stick lengths; slots of topics and categories that are not in use are 0."""

    topic_words: Ints
    """n_kw, shape (topic slots, words)."""
    topics: Ints
    """n_k, shape (topic slots,)."""
    category_topics: Ints
    """n_ck, shape (category slots, topic slots)."""
    categories: Ints
    """n_c, shape (category slots,)."""
    documents: Ints
    """D_c, documents of each category, shape (category slots,)."""
    sticks: Floats
    """beta_k, shape (topic slots,); 0 if the slot is free."""
    rest: Floats
    """beta_u, the stick of all topics without tokens, shape (1,)."""


def empty_counts(words: int, topic_slots: int, category_slots: int) -> Counts:
    """Counts of a state without documents."""
    return Counts(
        np.zeros((topic_slots, words), np.int64),
        np.zeros(topic_slots, np.int64),
        np.zeros((category_slots, topic_slots), np.int64),
        np.zeros(category_slots, np.int64),
        np.zeros(category_slots, np.int64),
        np.zeros(topic_slots),
        np.ones(1),
    )


def with_slots(counts: Counts, topic_slots: int, category_slots: int) -> Counts:
    """The same counts with more slots."""
    larger = empty_counts(counts.topic_words.shape[1], topic_slots, category_slots)
    k, c = len(counts.topics), len(counts.categories)
    larger.topic_words[:k] = counts.topic_words
    larger.topics[:k] = counts.topics
    larger.category_topics[:c, :k] = counts.category_topics
    larger.categories[:c] = counts.categories
    larger.documents[:c] = counts.documents
    larger.sticks[:k] = counts.sticks
    larger.rest[:] = counts.rest
    return larger


@njit(cache=True)  # type: ignore[untyped-decorator]
def used_slots(sizes: Floats) -> int:
    """One more than the number of the last slot in use."""
    for k in range(len(sizes) - 1, -1, -1):
        if sizes[k] > 0:
            return k + 1
    return 0


@njit(cache=True)  # type: ignore[untyped-decorator]
def free_slots(sizes: Floats) -> int:
    """Number of slots that are not in use."""
    free = 0
    for size in sizes:
        if size <= 0:
            free += 1
    return free


@njit(cache=True)  # type: ignore[untyped-decorator]
def open_topic(counts: Counts, share: float) -> int:
    """Give the first free slot ``share`` of the rest of the stick; returns the slot."""
    slot = 0
    while counts.sticks[slot] > 0:
        slot += 1
    counts.sticks[slot] = share * counts.rest[0]
    counts.rest[0] -= counts.sticks[slot]
    return slot


@njit(cache=True)  # type: ignore[untyped-decorator]
def close_topic(counts: Counts, topic: int) -> None:
    """Return the stick of a topic without tokens to the rest."""
    counts.rest[0] += counts.sticks[topic]
    counts.sticks[topic] = 0.0


@njit(cache=True)  # type: ignore[untyped-decorator]
def add_token(counts: Counts, category: int, topic: int, word: int, change: int) -> None:
    """Add (``change`` 1) or remove (-1) one token."""
    counts.topic_words[topic, word] += change
    counts.topics[topic] += change
    counts.category_topics[category, topic] += change
    counts.categories[category] += change
