"""One Markov chain of the topic model: its state, sweeps, and what is kept of a draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import gammaln
from sklearn.cluster import KMeans

from nostall.workload.learning.topics.categories import (
    Limits,
    category_scores,
    draw_categories,
    place_documents,
)
from nostall.workload.learning.topics.counts import (
    Counts,
    Floats,
    Ints,
    empty_counts,
    with_slots,
)
from nostall.workload.learning.topics.hyper import ConcentrationPriors, draw_concentrations
from nostall.workload.learning.topics.merges import split_or_merge
from nostall.workload.learning.topics.tokens import Concentrations, Documents, draw_topics
from nostall.workload.learning.topics.topic_merges import split_or_merge_topics

CATEGORY_PROPOSALS, TOPIC_PROPOSALS = 10, 4
"""Proposals of splits and merges in a sweep."""
MAX_CLUSTERS, DOCUMENTS_OF_CLUSTER = 40, 8
"""The start has at most MAX_CLUSTERS new categories, of 8 documents on average.  Later sweeps merge
those of one kind; documents seldom leave a category that two kinds share."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What predictions need of one draw."""

    counts: Counts
    hyper: Concentrations
    category_of: Ints
    """Category of each training document; new categories are numbered from ``known``."""


class Chain:
    """Documents, categories and topics, re-drawn by :meth:`sweep`."""

    def __init__(
        self,
        documents: Documents,
        labels: Ints,
        words: int,
        limits: Limits,
        eta: float,
        priors: ConcentrationPriors,
        rng: np.random.Generator,
    ) -> None:
        self.documents, self.limits, self.rng, self.priors = documents, limits, rng, priors
        self.hyper = Concentrations(5.0, 5.0, 1.0, eta)
        self.sweeps = 0
        self.accepted = 0.0
        """Share of accepted proposals of the last sweep."""
        self.labelled = int(documents.is_labelled.sum())
        longest = int(np.diff(documents.starts).max())
        categories = limits.known + max(MAX_CLUSTERS + 8, limits.new)
        self.counts = empty_counts(words, longest + 32, categories, eta)
        self.category_of = labels.copy()
        self.topic_of = np.zeros(len(documents.words), dtype=np.int64)
        self._place_first()

    def sweep(self) -> None:
        """Re-draw topics, categories with their topics, sticks and concentrations."""
        self._until_enough_slots(draw_topics)
        self.accepted = 0.0
        self._until_enough_slots(self._draw_categories)
        self._split_and_merge()
        new = int((self.counts.documents[self.limits.known :] > 0).sum())
        sizes = (self.labelled, new, len(self.category_of) - self.labelled)
        self.accepted /= max(1, sizes[2])
        self.hyper = draw_concentrations(self.rng, self.counts, self.hyper, self.priors, sizes)
        self.sweeps += 1

    def draw(self) -> Draw:
        """A copy of the present state without free slots."""
        used = np.flatnonzero(self.counts.topics)
        categories = int(np.flatnonzero(self.counts.documents).max()) + 1
        categories = max(categories, self.limits.known + max(0, self.limits.new))
        counts = Counts(
            np.ascontiguousarray(self.counts.word_topics[:, used]),
            self.counts.topics[used],
            self.counts.inverse[used],
            np.pad(self.counts.category_topics[:categories, used], ((0, 1), (0, 0))),
            np.pad(self.counts.categories[:categories], (0, 1)),
            np.pad(self.counts.documents[:categories], (0, 1)),
            self.counts.sticks[used],
            self.counts.rest.copy(),
            np.array([len(used)]),
        )
        return Draw(counts, self.hyper, self.category_of.copy())

    def log_density(self) -> float:
        """Log joint density of words, topics and categories given sticks and concentrations."""
        counts, hyper, known = self.counts, self.hyper, self.limits.known
        used, eta = counts.topics > 0, hyper.words
        words = counts.word_topics[:, used]
        vocabulary = len(words)
        density = (gammaln(words[words > 0] + eta) - gammaln(eta)).sum()
        density += (
            gammaln(vocabulary * eta) - gammaln(counts.topics[used] + vocabulary * eta)
        ).sum()
        masses = hyper.categories * counts.sticks[used]
        topics = gammaln(counts.category_topics[:, used] + masses) - gammaln(masses)
        density += topics.sum()
        sizes = counts.categories[counts.categories > 0]
        density += (gammaln(hyper.categories) - gammaln(sizes + hyper.categories)).sum()
        new = counts.documents[known:]
        base = hyper.new_categories / self.limits.new if self.limits.new > 0 else 0.0
        density += gammaln(new[new > 0] + base).sum() + gammaln(counts.documents[:known]).sum()
        founded = gammaln(base) if base else -np.log(hyper.new_categories)
        density -= founded * (new > 0).sum()
        labelled, total = self.labelled, len(self.category_of)
        prior = gammaln(labelled + hyper.new_categories) - gammaln(total + hyper.new_categories)
        return float(density + prior)

    def _place_first(self) -> None:
        """Start: labelled documents in their categories, the others in clusters of like words.

        If the number of new categories is given, the others draw their categories one by one.
        """
        order = np.argsort(1 - self.documents.is_labelled, kind="stable").astype(np.int64)
        if self.limits.new < 0:
            self._start_with_clusters()

        def place(*state: Any) -> int:
            *before, hyper, rng, first = state
            done: int = place_documents(*before, self.limits, hyper, rng, order, first)
            return done

        is_labelled = self.documents.is_labelled
        if self.limits.new < 0:  # the clusters are the categories of the start
            self.documents = self.documents._replace(is_labelled=np.ones_like(is_labelled))
        self._until_enough_slots(place)
        self.documents = self.documents._replace(is_labelled=is_labelled)

    def _start_with_clusters(self) -> None:
        """Give each cluster of unlabelled documents a new category."""
        free = np.flatnonzero(self.documents.is_labelled == 0)
        clusters = min(MAX_CLUSTERS, len(free) // DOCUMENTS_OF_CLUSTER)
        if clusters < 2:
            self.category_of[free] = self.limits.known
            return
        shares = np.zeros((len(free), len(self.counts.word_topics)))
        for row, d in enumerate(free):
            words = self.documents.words[self.documents.starts[d] : self.documents.starts[d + 1]]
            np.add.at(shares[row], words, 1.0 / len(words))
        seed = int(self.rng.integers(2**31))
        found = KMeans(clusters, n_init=1, random_state=seed).fit_predict(np.sqrt(shares))
        self.category_of[free] = self.limits.known + found

    def _draw_categories(self, *state: Any) -> int:
        *before, hyper, rng, first = state
        done, accepted = draw_categories(*before, self.limits, hyper, rng, first)
        self.accepted += accepted
        return int(done)

    def _split_and_merge(self) -> None:
        unlabelled = np.flatnonzero(self.documents.is_labelled == 0)
        for _ in range(CATEGORY_PROPOSALS):
            split_or_merge(
                self.documents,
                self.topic_of,
                self.category_of,
                self.counts,
                self.limits,
                self.hyper,
                self.rng,
                self.rng.permutation(unlabelled),
            )
        for _ in range(TOPIC_PROPOSALS):
            split_or_merge_topics(
                self.documents,
                self.topic_of,
                self.category_of,
                self.counts,
                self.hyper,
                self.rng,
            )

    def _until_enough_slots(self, step: Callable[..., int]) -> None:
        """Call a step until it has served all documents; it stops where slots are short."""
        first = 0
        while True:
            first = step(
                self.documents,
                self.topic_of,
                self.category_of,
                self.counts,
                self.hyper,
                self.rng,
                first,
            )
            if first == len(self.category_of):
                return
            topics, categories = 2 * len(self.counts.topics), 2 * len(self.counts.categories)
            self.counts = with_slots(self.counts, topics, categories, self.hyper.words)


def document_scores(draw: Draw, words: Ints, limits: Limits) -> Floats:
    """Probability of each category of a draw for an unseen document; the last is a further one.

    The document's topics are integrated out approximately: its words count as independent.
    """
    scores = np.empty(len(draw.counts.categories))
    category_scores(draw.counts, words, limits, draw.hyper, scores)
    shares = np.exp(scores - scores.max())
    result: Floats = shares / shares.sum()
    return result
