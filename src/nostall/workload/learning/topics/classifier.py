"""The topic model with scikit-learn's interface for semi-supervised classifiers.

One Markov chain of the topic model: its state, sweeps, and what is kept of a draw.

Sticks and concentrations are drawn by Gibbs steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.special import gammaln
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.cluster import KMeans
from sklearn.utils.validation import check_is_fitted, validate_data

from nostall.core.errors import BadInput
from nostall.workload.learning.topics.categories import (
    UNLIMITED,
    Limits,
    category_scores,
    draw_categories,
    place_documents,
)
from nostall.workload.learning.topics.merges import split_or_merge
from nostall.workload.learning.topics.tokens import (
    Concentrations,
    Counts,
    Documents,
    Floats,
    Ints,
    draw_topics,
    empty_counts,
    whole_blocks,
    with_slots,
)
from nostall.workload.learning.topics.topic_merges import split_or_merge_topics


@dataclass(frozen=True, slots=True)
class ConcentrationPriors:
    """Gamma priors (shape, rate) of the concentrations that are sampled."""

    topics: tuple[float, float] = (1.0, 0.1)
    categories: tuple[float, float] = (1.0, 0.1)
    new_categories: tuple[float, float] = (1.0, 1.0)


def draw_tables(rng: np.random.Generator, counts: Counts, mass: float) -> Ints:
    """m_ck, the tables of category c that serve topic k, shape (category slots, topic slots).

    A Chinese-restaurant table distribution: sum over i < n_ck of Bernoulli(a / (a + i)) with
    a = a0 beta_k.
    """
    tables: Ints = _draw_tables(rng, counts.category_topics, mass * counts.sticks)
    return tables


@njit(cache=True)  # type: ignore[untyped-decorator]
def _draw_tables(rng: np.random.Generator, sizes: Floats, masses: Floats) -> Ints:
    tables = np.zeros(sizes.shape, np.int64)
    for c in range(sizes.shape[0]):
        for k in range(sizes.shape[1]):
            for i in range(int(sizes[c, k])):
                if rng.random() * (masses[k] + i) < masses[k]:
                    tables[c, k] += 1
    return tables


def draw_sticks(rng: np.random.Generator, counts: Counts, tables: Ints, gamma: float) -> None:
    """Draw beta ~ Dirichlet(tables of each topic, gamma) and write it to ``counts``."""
    used = np.flatnonzero(counts.topics)
    masses = np.append(tables.sum(axis=0)[used], gamma)
    shares = np.maximum(rng.dirichlet(masses), 1e-300)
    counts.sticks[:] = 0.0
    counts.sticks[used] = shares[:-1]
    counts.rest[0] = shares[-1]
    counts.used[0] = whole_blocks(int(used[-1]) + 1)


def draw_topic_concentration(
    rng: np.random.Generator, gamma: float, topics: int, tables: int, prior: tuple[float, float]
) -> float:
    """gamma given K topics at T tables (Escobar and West, 1995).

    Also the concentration of any Dirichlet process of K components and T members.
    """
    shape, rate = prior
    auxiliary = rng.beta(gamma + 1.0, tables)
    rate = rate - math.log(auxiliary)
    odds = (shape + topics - 1.0) / (tables * rate)
    is_first = rng.random() < odds / (1.0 + odds)
    return float(rng.gamma(shape + topics - (0 if is_first else 1), 1.0 / rate))


def draw_category_concentration(
    rng: np.random.Generator, mass: float, sizes: Floats, tables: int, prior: tuple[float, float]
) -> float:
    """a0 given the tokens of each category and the tables of all (Teh et al., 2006)."""
    shape, rate = prior
    sizes = sizes[sizes > 0]
    shares = rng.beta(mass + 1.0, sizes)
    is_first = rng.random(len(sizes)) < sizes / (sizes + mass)
    shape = shape + tables - int(is_first.sum())
    return float(rng.gamma(shape, 1.0 / (rate - float(np.log(shares).sum()))))


def draw_new_concentration(
    rng: np.random.Generator, documents: tuple[int, int, int], prior: tuple[float, float]
) -> float:
    """xi given (labelled documents s, new categories n, unlabelled documents u).

    The labelled documents are seated first, so p(xi | n) is the prior times
    xi^n Gamma(xi + s) / Gamma(xi + s + u).  It is drawn on a grid of log xi.
    """
    labelled, new, unlabelled = documents
    shape, rate = prior
    grid = np.geomspace(1e-6, 1e3, 600)
    log_density = (
        (shape + new) * np.log(grid)
        - rate * grid
        + gammaln(grid + labelled)
        - gammaln(grid + labelled + unlabelled)
    )
    weights = np.exp(log_density - log_density.max())
    return float(rng.choice(grid, p=weights / weights.sum()))


def draw_concentrations(
    rng: np.random.Generator,
    counts: Counts,
    hyper: Concentrations,
    priors: ConcentrationPriors,
    documents: tuple[int, int, int],
) -> Concentrations:
    """Draw tables, sticks and all concentrations but eta; writes the sticks to ``counts``.

    ``documents``: labelled documents, new categories, unlabelled documents.
    """
    tables = draw_tables(rng, counts, hyper.categories)
    total, topics = int(tables.sum()), int((counts.topics > 0).sum())
    gamma = draw_topic_concentration(rng, hyper.topics, topics, total, priors.topics)
    draw_sticks(rng, counts, tables, gamma)
    mass = draw_category_concentration(
        rng, hyper.categories, counts.categories, total, priors.categories
    )
    xi = draw_new_concentration(rng, documents, priors.new_categories)
    return Concentrations(gamma, mass, xi, hyper.words)


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


UNLABELLED = -1
"""Label of a document whose category is unknown, as in scikit-learn's semi-supervised module."""
NEW = -2
"""Prediction for a document of a new category."""


@dataclass(eq=False, repr=False, kw_only=True)
class OpenTopics(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Labels documents with known categories or *new*; implements the model of arXiv:1910.04420.

    X holds word counts (documents x words); y holds categories as integers of at least 0, and -1
    for documents whose category is unknown.  Time is linear in the number of tokens.
    """

    new_categories: int | None = None
    """Number of new categories (parametric model), or None to infer it."""
    eta: float = 0.3
    """Concentration of the words of a topic."""
    temper: float = 1.0
    """Exponent of the counts: a count n becomes round(n ** temper).  Repeated layers of a model are
    not independent tokens; with raw counts each size of a model is a kind of its own."""
    sweeps: int = 150
    """Sweeps of each chain, of which ``burn_in`` are dropped."""
    burn_in: int = 75
    chains: int = 1
    """Predictions use the chain with the greatest mean density; chains seldom leave a mode."""
    kept_draws: int = 25
    """Draws of each chain that predictions use."""
    smallest_kind: int = 3
    """Documents of a new category that counts as a new kind."""
    warm_start: bool = False
    """``fit`` continues the chains of the last ``fit`` on the same data up to ``sweeps``; the
    result is that of one longer ``fit``."""
    random_state: int = 0

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        return tags

    def fit(self, X: Any, y: Any) -> OpenTopics:
        """Run the chains on counts X (documents, words) with labels y (documents,)."""
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64)
        y = _checked_labels(y)
        self.classes_ = np.unique(y[y != UNLABELLED])
        documents = self._documents(X, (y != UNLABELLED).astype(np.int64))
        labels = np.where(y == UNLABELLED, 0, np.searchsorted(self.classes_, y))
        self._is_unlabelled = y == UNLABELLED
        if not (self.warm_start and hasattr(self, "_chains")):
            seeds = np.random.SeedSequence(self.random_state).spawn(self.chains)
            self._chains = [
                Chain(
                    documents,
                    labels.astype(np.int64),
                    X.shape[1],
                    self._limits(),
                    self.eta,
                    ConcentrationPriors(),
                    np.random.default_rng(seed),
                )
                for seed in seeds
            ]
            self._draws: list[list[Draw]] = [[] for _ in seeds]
            self.traces_: list[list[dict[str, float]]] = [[] for _ in seeds]
            """The monitored scalars of each chain after each sweep that follows burn-in."""
        for chain, draws, trace in zip(self._chains, self._draws, self.traces_, strict=True):
            self._run(chain, draws, trace)
        return self

    def predict(self, X: Any) -> Ints:
        """The most probable known category of each document, or ``NEW``."""
        known, novelty = self._probabilities(X)
        best = self.classes_[known.argmax(axis=1)] if len(self.classes_) else NEW
        return np.where(novelty > 0.5, NEW, best).astype(np.int64)

    def predict_proba(self, X: Any) -> Floats:
        """Probabilities of the known categories given that it is one of them."""
        known, _ = self._probabilities(X)
        known = known + 1e-300  # documents that are certainly new get equal probabilities
        shares: Floats = known / known.sum(axis=1, keepdims=True)
        return shares

    def novelty(self, X: Any) -> Floats:
        """Probability that each document is of a new category."""
        return self._probabilities(X)[1]

    @property
    def chain_(self) -> int:
        """Number of the chain with the greatest mean log density after burn-in."""
        check_is_fitted(self, "classes_")
        means = [np.mean([row["log density"] for row in trace]) for trace in self.traces_]
        return int(np.argmax(means))

    @property
    def draws_(self) -> list[Draw]:
        """The kept draws of the best chain."""
        return self._draws[self.chain_]

    @property
    def trace_(self) -> list[dict[str, float]]:
        """The monitored scalars of the best chain after each sweep that follows burn-in."""
        return list(self.traces_[self.chain_])

    @property
    def category_draws_(self) -> Ints:
        """Category of each training document by draw; new ones are numbered after the known."""
        check_is_fitted(self, "classes_")
        return np.array([draw.category_of for draw in self.draws_])

    @property
    def new_kinds_(self) -> dict[int, float]:
        """Posterior of the number of new kinds (of at least ``smallest_kind`` documents)."""
        counts = [self._count_new(draw) for draw in self.category_draws_]
        return {n: counts.count(n) / len(counts) for n in sorted(set(counts))}

    def partition(self) -> Ints:
        """One category for each training document: the draw with the least Binder loss."""
        draws = self.category_draws_
        together = np.zeros((draws.shape[1], draws.shape[1]))
        for draw in draws:
            together += draw[:, None] == draw[None, :]
        together /= len(draws)
        losses = [np.abs((d[:, None] == d[None, :]) - together).sum() for d in draws]
        best: Ints = draws[int(np.argmin(losses))]
        return best

    def _count_new(self, categories: Ints) -> int:
        new = categories[categories >= len(self.classes_)]
        return int((np.bincount(new) >= self.smallest_kind).sum()) if len(new) else 0

    def _check_parameters(self) -> None:
        for name in ("sweeps", "chains", "kept_draws"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)}; allowed is a number of at least 1")
        if not 0 <= self.burn_in < self.sweeps:
            raise BadInput(
                f"burn_in={self.burn_in} with sweeps={self.sweeps}; allowed is 0 to sweeps - 1"
            )
        for name in ("eta", "temper"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name}={getattr(self, name)}; allowed is a number above 0")
        if self.new_categories is not None and self.new_categories < 0:
            raise BadInput(
                f"new_categories={self.new_categories}; allowed is None or a number of at least 0"
            )

    def _documents(self, X: Floats, is_labelled: Ints) -> Documents:
        if (X < 0).any():
            raise BadInput(
                f"Negative values in data: a word count is {X.min():g}; counts are at least 0"
            )
        counts = np.where(X > 0, np.maximum(1, np.round(X**self.temper)), 0).astype(np.int64)
        tokens = [np.repeat(np.arange(X.shape[1]), row) for row in counts]
        if empty := [d for d, row in enumerate(tokens) if len(row) == 0]:
            raise BadInput(f"document {empty[0]} has no words; leave out documents without words")
        starts = np.concatenate([[0], np.cumsum([len(row) for row in tokens])])
        words = np.concatenate(tokens)
        return Documents(words.astype(np.int64), starts.astype(np.int64), is_labelled)

    def _limits(self) -> Limits:
        new = UNLIMITED if self.new_categories is None else self.new_categories
        return Limits(len(self.classes_), new)

    def _run(self, chain: Chain, draws: list[Draw], trace: list[dict[str, float]]) -> None:
        """Continue one chain up to ``sweeps`` sweeps; keep evenly spaced draws."""
        interval = max(1, (self.sweeps - self.burn_in) // self.kept_draws)
        while chain.sweeps < self.sweeps:
            chain.sweep()
            after = chain.sweeps - self.burn_in
            if after > 0:
                trace.append(_monitored(chain))
                if after % interval == 0:
                    draws.append(chain.draw())

    def _probabilities(self, X: Any) -> tuple[Floats, Floats]:
        check_is_fitted(self, "classes_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        documents = self._documents(X, np.zeros(len(X), np.int64))
        limits = self._limits()
        known = limits.known
        draws = self.draws_
        total = np.zeros((len(X), known))
        for d in range(len(X)):
            words = documents.words[documents.starts[d] : documents.starts[d + 1]]
            for draw in draws:
                total[d] += document_scores(draw, words, limits)[:known]
        total /= len(draws)
        return total, 1.0 - total.sum(axis=1)


def _monitored(chain: Chain) -> dict[str, float]:
    """Scalars whose convergence is monitored."""
    return {
        "topics": float((chain.counts.topics > 0).sum()),
        "categories": float((chain.counts.documents > 0).sum()),
        "log gamma": float(np.log(chain.hyper.topics)),
        "log a0": float(np.log(chain.hyper.categories)),
        "accepted": chain.accepted,
        "log density": chain.log_density(),
    }


def _checked_labels(y: NDArray[Any]) -> Ints:
    is_number = y.dtype.kind in "iuf"
    labels = y.astype(np.int64) if is_number else np.zeros(len(y), np.int64)
    if not is_number or (labels != y).any() or (labels < UNLABELLED).any():
        raise BadInput(
            f"labels {sorted(set(y.tolist()))[:6]}; allowed are integers of at "
            "least 0, and -1 for documents without a label"
        )
    return labels
