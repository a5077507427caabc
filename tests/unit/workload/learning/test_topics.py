"""The topic sampler against forward simulation (Geweke), and the classifier's interface."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the learners need the extra nostall[learn]")

from nostall.core.errors import BadInput
from nostall.workload.learning.topics.categories import UNLIMITED, Limits, draw_categories
from nostall.workload.learning.topics.classifier import NEW, OpenTopics
from nostall.workload.learning.topics.counts import add_token, empty_counts, whole_blocks
from nostall.workload.learning.topics.hyper import ConcentrationPriors, draw_concentrations
from nostall.workload.learning.topics.merges import split_or_merge
from nostall.workload.learning.topics.tokens import Concentrations, Documents, draw_topics
from nostall.workload.learning.topics.topic_merges import split_or_merge_topics

DOCUMENTS, TOKENS, WORDS, ETA = 4, 3, 4, 0.5
PRIORS = ConcentrationPriors((2.0, 2.0), (3.0, 2.0), (2.0, 2.0))
LABELLED = np.array([1, 0, 0, 0])
STARTS = np.arange(0, DOCUMENTS * TOKENS + 1, TOKENS)


def prior_concentrations(rng: np.random.Generator) -> Concentrations:
    pairs = (PRIORS.topics, PRIORS.categories, PRIORS.new_categories)
    return Concentrations(*(rng.gamma(shape, 1 / rate) for shape, rate in pairs), ETA)


def forward(
    rng: np.random.Generator, hyper: Concentrations
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sticks, categories and topics from the prior, by stick-breaking of 80 sticks."""
    shares = rng.beta(1, hyper.topics, 80)
    sticks = shares * np.concatenate([[1], np.cumprod(1 - shares)[:-1]])
    sticks[-1] += 1 - sticks.sum()
    categories, sizes = np.zeros(DOCUMENTS, int), [1.0]
    for d in range(1, DOCUMENTS):
        masses = np.array([*sizes, hyper.new_categories])
        categories[d] = rng.choice(len(masses), p=masses / masses.sum())
        if categories[d] == len(sizes):
            sizes.append(0.0)
        sizes[categories[d]] += 1
    topics, mixtures = np.zeros(DOCUMENTS * TOKENS, int), {}
    for d in range(DOCUMENTS):
        mixture = mixtures.setdefault(
            categories[d], rng.dirichlet(hyper.categories * sticks + 1e-12)
        )
        topics[STARTS[d] : STARTS[d + 1]] = rng.choice(80, size=TOKENS, p=mixture)
    return sticks, categories, topics


def words_of(rng: np.random.Generator, topics: np.ndarray) -> np.ndarray:
    """Words given the topics; the topics' distributions are drawn anew."""
    distributions: dict[int, np.ndarray] = {}
    for topic in topics:
        distributions.setdefault(topic, rng.dirichlet(np.full(WORDS, ETA)))
    return np.array([rng.choice(WORDS, p=distributions[topic]) for topic in topics])


def statistics(
    categories: np.ndarray, topics: np.ndarray, words: np.ndarray, hyper: Concentrations
) -> list[float]:
    def coincidences(values: np.ndarray) -> float:
        return float((values[:, None] == values[None, :]).mean())

    return [
        len(set(topics)),
        len(set(categories)),
        coincidences(categories),
        coincidences(topics),
        coincidences(words),
        float(categories[1] == 0),
        *np.log(hyper[:3]),
    ]


@dataclass
class GewekeChain:
    """A chain of all unknowns whose words are re-drawn, too; its distribution is the prior."""

    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.hyper = prior_concentrations(self.rng)
        sticks, self.categories, drawn = forward(self.rng, self.hyper)
        used, topics = np.unique(drawn, return_inverse=True)
        self.topics, self.words = topics.astype(np.int64), words_of(self.rng, drawn)
        self.counts = empty_counts(WORDS, 64, 16, ETA)
        self.counts.sticks[: len(used)] = sticks[used]
        self.counts.used[0] = whole_blocks(len(used))
        self.counts.rest[0] = 1 - self.counts.sticks.sum()
        for i in range(len(topics)):
            category = self.categories[i // TOKENS]
            add_token(self.counts, category, self.topics[i], self.words[i], 1, ETA)
        self.counts.documents[:DOCUMENTS] = np.bincount(self.categories, minlength=DOCUMENTS)

    def step(self) -> list[float]:
        """One sweep and new words; returns the statistics of the state."""
        rng, limits = self.rng, Limits(1, UNLIMITED)
        documents = Documents(self.words, STARTS.astype(np.int64), LABELLED)
        state = (documents, self.topics, self.categories, self.counts)
        assert draw_topics(*state, self.of("topics"), rng, 0) == DOCUMENTS
        assert draw_categories(*state, limits, self.of("categories"), rng, 0)[0] == DOCUMENTS
        split_or_merge(*state, limits, self.of("category split"), rng, rng.permutation([1, 2, 3]))
        split_or_merge_topics(*state, self.of("topic split"), rng)
        new = int((self.counts.documents[1:] > 0).sum())
        self.hyper = draw_concentrations(
            rng, self.counts, self.of("concentrations"), PRIORS, self.sizes(new)
        )
        self.words = words_of(rng, self.topics)
        self.counts.word_topics[:] = 0
        np.add.at(self.counts.word_topics, (self.words, self.topics), 1)
        return statistics(self.categories, self.topics, self.words, self.hyper)

    def of(self, step: str) -> Concentrations:
        """Concentrations of a step; chains with a seeded error override it."""
        return self.hyper

    def sizes(self, new: int) -> tuple[int, int, int]:
        """Labelled documents, new categories, unlabelled documents."""
        return 1, new, 3


def geweke_scores(kind: type[GewekeChain], draws: int) -> np.ndarray:
    """z of each statistic: means of the chain against means of the prior."""
    rng = np.random.default_rng(1)
    prior = []
    for _ in range(draws):
        hyper = prior_concentrations(rng)
        _, categories, topics = forward(rng, hyper)
        prior.append(statistics(categories, topics, words_of(rng, topics), hyper))
    chain = kind(rng)
    posterior = np.array([chain.step() for _ in range(2 * draws)])
    batches = posterior.reshape(50, -1, posterior.shape[1]).mean(axis=1)
    variance = np.var(prior, axis=0) / draws + batches.var(axis=0, ddof=1) / len(batches)
    return (np.mean(prior, axis=0) - posterior.mean(axis=0)) / np.sqrt(variance)


@pytest.mark.slow
def test_the_sampler_has_the_prior_as_its_distribution() -> None:
    """Geweke: re-drawing words given topics, and the rest given words, keeps the prior."""
    z = geweke_scores(GewekeChain, 2000)
    assert np.abs(z).max() < 4, z


def corpus(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, labels and true categories: three known categories and one that nobody labelled."""
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.full(40, 0.1), 5)
    mixtures = 0.8 * np.eye(4, 5) + 0.2 * np.eye(5)[4]  # one topic is common to all categories
    truth = np.repeat(np.arange(4), 15)
    counts = np.array([rng.multinomial(60, mixtures[c] @ topics) for c in truth], dtype=float)
    labels = np.where((truth < 3) & (rng.random(len(truth)) < 0.6), truth, -1)
    return counts, labels, truth


def test_a_category_without_labels_is_found() -> None:
    counts, labels, truth = corpus(0)
    model = OpenTopics(eta=0.1, sweeps=60, burn_in=40).fit(counts, labels)
    predicted = model.predict(counts)
    assert (predicted[truth == 3] == NEW).mean() > 0.9
    assert (predicted[truth < 3] == truth[truth < 3]).mean() > 0.9
    assert model.training_novelty_[truth == 3].mean() > 0.9
    assert sum(model.new_kinds_.values()) == pytest.approx(1)
    assert len(model.partition()) == len(truth)
    assert model.predict_proba(counts).sum(axis=1) == pytest.approx(1)


def test_a_continued_chain_equals_an_uninterrupted_one() -> None:
    counts, labels, _ = corpus(1)
    whole = OpenTopics(sweeps=12, burn_in=4).fit(counts, labels)
    parts = OpenTopics(sweeps=6, burn_in=4, warm_start=True).fit(counts, labels)
    parts.set_params(sweeps=12).fit(counts, labels)
    assert np.array_equal(whole.category_draws_, parts.category_draws_)


@pytest.mark.parametrize(
    ("counts", "labels", "message"),
    [
        ([[1, 0], [0, 0]], [0, -1], "document 1 has no words"),
        ([[1, 0], [-1, 2]], [0, -1], "Negative values"),
        ([[1, 0], [0, 2]], [0, -3], "labels"),
        ([[1, 0], [0, 2]], ["a", "b"], "allowed are integers"),
    ],
)
def test_bad_input_is_named(counts: list[list[int]], labels: list[int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        OpenTopics(sweeps=4, burn_in=1).fit(counts, labels)


def test_one_document_and_words_never_seen_are_no_problem() -> None:
    model = OpenTopics(sweeps=6, burn_in=2).fit([[3, 1, 0]], [4])
    assert model.predict([[2, 2, 0]]).tolist() in ([4], [NEW])
    assert model.predict_proba([[0, 0, 5]]).tolist() == [[1.0]], "a word that training lacks"
    alone = OpenTopics(sweeps=6, burn_in=2).fit([[3, 1, 0]], [-1])
    assert alone.predict([[3, 1, 0]]).tolist() == [NEW]


def test_a_given_number_of_new_categories_is_a_limit() -> None:
    counts, labels, truth = corpus(0)
    model = OpenTopics(new_categories=2, eta=0.1, sweeps=40, burn_in=20).fit(counts, labels)
    assert model.category_draws_.max() <= 4
    assert (model.predict(counts)[truth == 3] == NEW).mean() > 0.9
    none = OpenTopics(new_categories=0, eta=0.1, sweeps=20, burn_in=10).fit(counts, labels)
    assert none.category_draws_.max() == 2


def test_several_chains_give_diagnostics_and_one_answer() -> None:
    counts, labels, _ = corpus(0)
    model = OpenTopics(eta=0.1, sweeps=30, burn_in=20, chains=2).fit(counts, labels)
    assert set(model.convergence_) >= {"log density", "topics", "categories"}
    assert model.chain_ in (0, 1)
    assert len(model.trace_) == 10


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        OpenTopics(sweeps=4, burn_in=1).fit([[1, np.nan]], [0])
