"""One Markov chain of the topic model: its state, sweeps, and what is kept of a draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nostall.workload.learning.topics.counts import (
    Counts,
    Floats,
    Ints,
    empty_counts,
    with_slots,
)
from nostall.workload.learning.topics.gibbs import (
    Concentrations,
    Documents,
    category_scores,
    draw_categories,
    draw_topics,
    place_documents,
)
from nostall.workload.learning.topics.hyper import ConcentrationPriors, draw_concentrations

_UNLIMITED = -1
"""``new_slots`` of a model whose number of new categories is inferred."""

OPENING_SWEEPS, OPENING_CONCENTRATION = 20, 200.0
"""The first sweeps have this xi, so that they open many new categories.  Later sweeps merge those
of one kind; documents seldom leave a category that two kinds share."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What predictions need of one draw."""

    counts: Counts
    hyper: Concentrations
    category_of: Ints
    """Category of each training document; new categories are numbered from ``known``."""


class Chain:
    """Documents, categories and topics, re-drawn by :meth:`sweep`.

    :param known: L, the number of known categories
    :param new_categories: number of new categories, or None to infer it
    """

    def __init__(
        self,
        documents: Documents,
        labels: Ints,
        words: int,
        known: int,
        new_categories: int | None,
        eta: float,
        priors: ConcentrationPriors,
        rng: np.random.Generator,
    ) -> None:
        self.documents, self.known, self.rng, self.priors = documents, known, rng, priors
        self.new_slots = _UNLIMITED if new_categories is None else new_categories
        self.hyper = Concentrations(5.0, 5.0, OPENING_CONCENTRATION, eta)
        self.sweeps = 0
        self.accepted = 0.0
        """Share of accepted proposals of the last sweep."""
        self.labelled = int(documents.is_labelled.sum())
        longest = int(np.diff(documents.starts).max())
        categories = known + max(8, self.new_slots)
        self.counts = empty_counts(words, longest + 16, categories)
        self.category_of = labels.copy()
        self.topic_of = np.zeros(len(documents.words), dtype=np.int64)
        self._place_first()

    def sweep(self) -> None:
        """Re-draw topics, categories with their topics, sticks and concentrations."""
        first = 0
        while first < len(self.category_of):
            first = draw_topics(
                self.documents,
                self.topic_of,
                self.category_of,
                self.counts,
                self.hyper,
                self.rng,
                first,
            )
            self._grow_if(first < len(self.category_of))
        first = accepted = 0
        while first < len(self.category_of):
            first, more = draw_categories(
                self.documents,
                self.topic_of,
                self.category_of,
                self.counts,
                self.known,
                self.new_slots,
                self.hyper,
                self.rng,
                first,
            )
            accepted += more
            self._grow_if(first < len(self.category_of))
        self.accepted = accepted / max(1, len(self.category_of))
        new = int((self.counts.documents[self.known :] > 0).sum())
        sizes = (self.labelled, new, len(self.category_of) - self.labelled)
        self.hyper = draw_concentrations(self.rng, self.counts, self.hyper, self.priors, sizes)
        self.sweeps += 1
        if self.sweeps < OPENING_SWEEPS:
            self.hyper = self.hyper._replace(new_categories=OPENING_CONCENTRATION)

    def draw(self) -> Draw:
        """A copy of the present state without free slots."""
        used = np.flatnonzero(self.counts.topics)
        categories = int(np.flatnonzero(self.counts.documents).max()) + 1
        categories = max(categories, self.known + max(0, self.new_slots))
        counts = Counts(
            self.counts.topic_words[used],
            self.counts.topics[used],
            np.pad(self.counts.category_topics[:categories, used], ((0, 1), (0, 0))),
            np.pad(self.counts.categories[:categories], (0, 1)),
            np.pad(self.counts.documents[:categories], (0, 1)),
            self.counts.sticks[used],
            self.counts.rest.copy(),
        )
        return Draw(counts, self.hyper, self.category_of.copy())

    def _place_first(self) -> None:
        """Start: labelled documents in their categories, then the others one by one."""
        order = np.argsort(1 - self.documents.is_labelled, kind="stable").astype(np.int64)
        first = 0
        while first < len(order):
            first = place_documents(
                self.documents,
                self.topic_of,
                self.category_of,
                self.counts,
                self.known,
                self.new_slots,
                self.hyper,
                self.rng,
                first,
                order,
            )
            self._grow_if(first < len(order))

    def _grow_if(self, is_short: bool) -> None:
        if is_short:
            topics, categories = len(self.counts.topics), len(self.counts.categories)
            self.counts = with_slots(self.counts, 2 * topics, 2 * categories)


def document_scores(draw: Draw, words: Ints, known: int, new_slots: int) -> Floats:
    """Probability of each category of a draw for an unseen document; the last is a further one.

    The document's topics are integrated out approximately: its words count as independent.
    """
    scores = np.empty(len(draw.counts.categories))
    category_scores(draw.counts, words, known, draw.hyper, new_slots, scores)
    shares = np.exp(scores - scores.max())
    result: Floats = shares / shares.sum()
    return result
