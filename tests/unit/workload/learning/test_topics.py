"""The topic sampler against forward simulation (Geweke), and the classifier's interface.

Compiling the sampler takes half a minute, so what samples is a slow test.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the learners need the extra nostall[learn]")

from nostall.core.errors import BadInput
from nostall.workload.learning.topics.classifier import NEW, OpenTopics
from tests.unit.workload.learning.invariance import LIMIT, largest_z
from tests.unit.workload.learning.topic_states import STEPS, TopicState, topic_pair, words_of


class GewekeChain:
    """A chain of all unknowns whose words are re-drawn, too; its distribution is the prior."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.state = rng, TopicState.draw(rng)

    def step(self) -> dict[str, float]:
        """One sweep and new words; returns the statistics of the state."""
        state = self.state
        for step in STEPS.values():
            step(self.rng, state, state.hyper)
        state.words[:] = words_of(self.rng, state.topics)
        state.counts.word_topics[:] = 0
        np.add.at(state.counts.word_topics, (state.words, state.topics), 1)
        return dict(state.statistics())


@pytest.mark.slow
def test_the_sampler_has_the_prior_as_its_distribution() -> None:
    """Geweke: re-drawing words given topics, and the rest given words, keeps the prior."""
    rng, draws = np.random.default_rng(1), 1000
    prior = np.array([list(TopicState.draw(rng).statistics().values()) for _ in range(draws)])
    chain = GewekeChain(rng)
    posterior = np.array([list(chain.step().values()) for _ in range(2 * draws)])
    batches = posterior.reshape(50, -1, posterior.shape[1]).mean(axis=1)
    variance = prior.var(axis=0) / draws + batches.var(axis=0, ddof=1) / len(batches)
    z = (prior.mean(axis=0) - posterior.mean(axis=0)) / np.sqrt(np.maximum(variance, 1e-12))
    assert np.abs(z).max() < LIMIT, z


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_each_step_keeps_the_joint_distribution(step: str) -> None:
    z, statistic = largest_z(topic_pair(STEPS[step]), 300)
    assert z < LIMIT, statistic


@pytest.mark.slow
@pytest.mark.parametrize(("step", "field"), [("topics", "topics"), ("topic split", "topics")])
def test_a_step_with_a_wrong_concentration_is_caught(step: str, field: str) -> None:
    wrong = topic_pair(
        STEPS[step], lambda hyper: hyper._replace(**{field: 4 * getattr(hyper, field)})
    )
    assert largest_z(wrong, 300)[0] > LIMIT


def corpus(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, labels and true categories: three known categories and one that nobody labelled."""
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.full(40, 0.1), 5)
    mixtures = 0.8 * np.eye(4, 5) + 0.2 * np.eye(5)[4]  # one topic is common to all categories
    truth = np.repeat(np.arange(4), 15)
    counts = np.array([rng.multinomial(60, mixtures[c] @ topics) for c in truth], dtype=float)
    labels = np.where((truth < 3) & (rng.random(len(truth)) < 0.6), truth, -1)
    return counts, labels, truth


@pytest.mark.slow
def test_a_category_without_labels_is_found() -> None:
    counts, labels, truth = corpus(0)
    model = OpenTopics(eta=0.1, sweeps=60, burn_in=40).fit(counts, labels)
    predicted = model.predict(counts)
    assert (predicted[truth == 3] == NEW).mean() > 0.9
    assert (predicted[truth < 3] == truth[truth < 3]).mean() > 0.9
    assert (model.category_draws_[:, truth == 3] >= len(model.classes_)).mean() > 0.9
    assert sum(model.new_kinds_.values()) == pytest.approx(1)
    assert len(model.partition()) == len(truth)
    assert model.predict_proba(counts).sum(axis=1) == pytest.approx(1)


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_document_and_words_never_seen_are_no_problem() -> None:
    model = OpenTopics(sweeps=6, burn_in=2).fit([[3, 1, 0]], [4])
    assert model.predict([[2, 2, 0]]).tolist() in ([4], [NEW])
    assert model.predict_proba([[0, 0, 5]]).tolist() == [[1.0]], "a word that training lacks"
    alone = OpenTopics(sweeps=6, burn_in=2).fit([[3, 1, 0]], [-1])
    assert alone.predict([[3, 1, 0]]).tolist() == [NEW]


@pytest.mark.slow
def test_a_given_number_of_new_categories_is_a_limit() -> None:
    counts, labels, truth = corpus(0)
    model = OpenTopics(new_categories=2, eta=0.1, sweeps=40, burn_in=20).fit(counts, labels)
    assert model.category_draws_.max() <= 4
    assert (model.predict(counts)[truth == 3] == NEW).mean() > 0.9
    none = OpenTopics(new_categories=0, eta=0.1, sweeps=20, burn_in=10).fit(counts, labels)
    assert none.category_draws_.max() == 2


@pytest.mark.slow
def test_several_chains_give_diagnostics_and_one_answer() -> None:
    counts, labels, _ = corpus(0)
    model = OpenTopics(eta=0.1, sweeps=30, burn_in=20, chains=2).fit(counts, labels)
    assert set(model.traces_[1][0]) >= {"log density", "topics", "categories"}
    assert model.chain_ in (0, 1)
    assert len(model.trace_) == 10


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        OpenTopics(sweeps=4, burn_in=1).fit([[1, np.nan]], [0])
