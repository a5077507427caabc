"""States of the topic model drawn from its joint distribution, and each step of its sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nostall.workload.learning.topics.categories import UNLIMITED, Limits, draw_categories
from nostall.workload.learning.topics.classifier import ConcentrationPriors, draw_concentrations
from nostall.workload.learning.topics.merges import split_or_merge
from nostall.workload.learning.topics.tokens import (
    Concentrations,
    Counts,
    Documents,
    add_token,
    draw_topics,
    empty_counts,
    whole_blocks,
)
from nostall.workload.learning.topics.topic_merges import split_or_merge_topics
from tests.unit.workload.learning.invariance import Statistics

DOCUMENTS, TOKENS, WORDS, ETA = 4, 3, 4, 0.5
PRIORS = ConcentrationPriors((2.0, 2.0), (3.0, 2.0), (2.0, 2.0))
LABELLED = np.array([1, 0, 0, 0])
"""The first document is of the known category 0."""
STARTS = np.arange(0, DOCUMENTS * TOKENS + 1, TOKENS)
CATEGORY_OF_TOKEN = np.arange(DOCUMENTS * TOKENS) // TOKENS
LIMITS = Limits(1, UNLIMITED)
STICKS, SLOTS = 80, 16
NEW_SLOTS = 8
"""Slots that new categories of the first state may have; some stay free between them."""
REPEATS = 3
"""Times that a step is applied."""


def prior_concentrations(rng: np.random.Generator) -> Concentrations:
    pairs = (PRIORS.topics, PRIORS.categories, PRIORS.new_categories)
    return Concentrations(*(rng.gamma(shape, 1 / rate) for shape, rate in pairs), ETA)


def forward(
    rng: np.random.Generator, hyper: Concentrations
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sticks, categories and topics from the prior, by stick-breaking of 80 sticks."""
    shares = rng.beta(1, hyper.topics, STICKS)
    sticks = shares * np.concatenate([[1], np.cumprod(1 - shares)[:-1]])
    sticks[-1] += 1 - sticks.sum()
    categories, sizes = np.zeros(DOCUMENTS, int), [1.0]
    for d in range(1, DOCUMENTS):
        masses = np.cumsum([*sizes, hyper.new_categories])
        categories[d] = np.searchsorted(masses, rng.random() * masses[-1], side="right")
        if categories[d] == len(sizes):
            sizes.append(0.0)
        sizes[categories[d]] += 1
    topics, mixtures = np.zeros(DOCUMENTS * TOKENS, int), {}
    for d in range(DOCUMENTS):
        category = categories[d]
        if category not in mixtures:
            mixtures[category] = rng.dirichlet(hyper.categories * sticks + 1e-12)
        topics[STARTS[d] : STARTS[d + 1]] = _choose(rng, mixtures[category], TOKENS)
    return sticks, categories, topics


def _choose(rng: np.random.Generator, shares: np.ndarray, size: int) -> np.ndarray:
    bounds = np.cumsum(shares)
    return np.searchsorted(bounds, rng.random(size) * bounds[-1], side="right")


def words_of(rng: np.random.Generator, topics: np.ndarray) -> np.ndarray:
    """Words given the topics; the topics' distributions are drawn anew."""
    distributions: dict[int, np.ndarray] = {}
    for topic in topics:
        if topic not in distributions:
            distributions[topic] = rng.dirichlet(np.full(WORDS, ETA))
    return np.array([_choose(rng, distributions[topic], 1)[0] for topic in topics])


@dataclass
class TopicState:
    """All unknowns and the words of a small corpus."""

    hyper: Concentrations
    categories: np.ndarray
    topics: np.ndarray
    words: np.ndarray
    counts: Counts

    @classmethod
    def draw(cls, rng: np.random.Generator) -> TopicState:
        """A state from the joint distribution; new categories are in random slots."""
        hyper = prior_concentrations(rng)
        sticks, categories, drawn = forward(rng, hyper)
        slots = np.concatenate([[0], 1 + rng.permutation(NEW_SLOTS)])
        categories = slots[categories]
        used, topics = np.unique(drawn, return_inverse=True)
        words = words_of(rng, drawn)
        counts = empty_counts(WORDS, 64, SLOTS, ETA)
        counts.sticks[: len(used)] = sticks[used]
        counts.used[0] = whole_blocks(len(used))
        counts.rest[0] = 1 - counts.sticks.sum()
        for i, topic in enumerate(topics):
            add_token(counts, categories[CATEGORY_OF_TOKEN[i]], topic, words[i], 1, ETA)
        counts.documents[:] = np.bincount(categories, minlength=SLOTS)
        return cls(hyper, categories, topics.astype(np.int64), words, counts)

    def arrays(self) -> tuple[Documents, np.ndarray, np.ndarray, Counts]:
        """The arguments with which each step begins."""
        documents = Documents(self.words, STARTS.astype(np.int64), LABELLED)
        return documents, self.topics, self.categories, self.counts

    def new_categories(self) -> int:
        return int((self.counts.documents[1:] > 0).sum())

    def statistics(self) -> Statistics:
        """Scalars and products of two, which also see errors that keep each one's mean."""

        def same(values: np.ndarray) -> np.ndarray:
            return values[:, None] == values[None, :]

        topics, new = len(set(self.topics.tolist())), self.new_categories()
        same_topic, same_category = same(self.topics), same(self.categories[CATEGORY_OF_TOKEN])
        coincidence = float(same_topic.mean())
        gamma, mass, xi = np.log(self.hyper[:3]).tolist()
        rest, squares = float(self.counts.rest[0]), float((self.counts.sticks**2).sum())
        return {
            "topics": topics,
            "new categories": new,
            "same topic": coincidence,
            "same category": float(same(self.categories).mean()),
            "same topic and category": float((same_topic & same_category).mean()),
            "same topic and word": float((same_topic & same(self.words)).mean()),
            "documents of the known category": float((self.categories == 0).sum()),
            "rest": rest,
            "sum of sticks and rest": round(float(self.counts.sticks.sum()) + rest, 9),
            "squares of sticks": squares,
            "log gamma": gamma,
            "log a0": mass,
            "log xi": xi,
            "log gamma, topics": gamma * topics,
            "log gamma, rest": gamma * rest,
            "log a0, same topic": mass * coincidence,
            "log a0, new categories": mass * new,
            "log a0, same topic and category": mass * float((same_topic & same_category).mean()),
            "log xi, new categories": xi * new,
            "rest, topics": rest * topics,
            "squares of sticks, same topic": squares * coincidence,
        }


Step = Callable[[np.random.Generator, TopicState, Concentrations], None]
"""Re-draws a part of a state; the concentrations are those of the state, or wrong ones."""


def _topics(rng: np.random.Generator, state: TopicState, hyper: Concentrations) -> None:
    assert draw_topics(*state.arrays(), hyper, rng, 0) == DOCUMENTS


def _categories(rng: np.random.Generator, state: TopicState, hyper: Concentrations) -> None:
    assert draw_categories(*state.arrays(), LIMITS, hyper, rng, 0)[0] == DOCUMENTS


def _category_split(rng: np.random.Generator, state: TopicState, hyper: Concentrations) -> None:
    split_or_merge(*state.arrays(), LIMITS, hyper, rng, rng.permutation([1, 2, 3]))


def _topic_split(rng: np.random.Generator, state: TopicState, hyper: Concentrations) -> None:
    split_or_merge_topics(*state.arrays(), hyper, rng)


def _concentrations(rng: np.random.Generator, state: TopicState, hyper: Concentrations) -> None:
    sizes = (1, state.new_categories(), 3)
    state.hyper = draw_concentrations(rng, state.counts, hyper, PRIORS, sizes)


STEPS: dict[str, Step] = {
    "topics": _topics,
    "categories": _categories,
    "category split": _category_split,
    "topic split": _topic_split,
    "concentrations": _concentrations,
}


def topic_pair(
    step: Step, change: Callable[[Concentrations], Concentrations] = lambda hyper: hyper
) -> Callable[[np.random.Generator], tuple[Statistics, Statistics]]:
    """Statistics before and after a step; ``change`` seeds an error into its concentrations."""

    def pair(rng: np.random.Generator) -> tuple[Statistics, Statistics]:
        state = TopicState.draw(rng)
        before = state.statistics()
        for _ in range(REPEATS):
            step(rng, state, change(state.hyper))
        return before, state.statistics()

    return pair
