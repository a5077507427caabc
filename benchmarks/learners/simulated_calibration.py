"""Simulation-based calibration of both samplers: are the ranks of true values uniform?

    python -m benchmarks run learners.simulated_calibration \\
        --out benchmarks/learners/results/simulated_calibration.json

Each replication draws unknowns and data from the joint distribution, runs a chain from another
start, and ranks the true value among thinned draws (Talts et al., "Validating Bayesian inference
algorithms with simulation-based calibration", 2018).  If the sampler is right, ranks are uniform; a
chi-square test of their histogram says so.  The label term of the multi-view model is switched off,
because labels cannot be drawn from it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from scipy.stats import chi2
from tests.unit.papers import view_states
from tests.unit.workload.learning import topic_states
from tests.unit.workload.learning.topic_states import TopicState

from benchmarks.harness.result_file import save
from nostall.papers.multiview.sampler import State, first_state, sweep
from nostall.workload.learning.topics.classifier import Chain
from nostall.workload.learning.topics.tokens import Documents

BURN_IN, DRAWS, THINNING, BINS = 60, 31, 5, 8
"""Sweeps that are dropped; draws that a value is ranked among; sweeps between two of them."""
LEAST_P = 0.001
Values = Mapping[str, float]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replications", type=int, default=200)


def topics(rng: np.random.Generator) -> tuple[Values, Iterator[Values]]:
    """True values of one corpus, and those of the chain after each sweep."""
    state = TopicState.draw(rng)
    truth = _topic_values(state.hyper, len(set(state.topics.tolist())))
    words = np.sort(state.words.reshape(topic_states.DOCUMENTS, -1), axis=1).ravel()
    documents = Documents(words, topic_states.STARTS.astype(np.int64), topic_states.LABELLED)
    labels = np.zeros(topic_states.DOCUMENTS, np.int64)
    chain = Chain(documents, labels, topic_states.WORDS, topic_states.LIMITS, topic_states.ETA,
                  topic_states.PRIORS, rng)  # fmt: skip

    def draws() -> Iterator[Values]:
        while True:
            chain.sweep()
            yield _topic_values(chain.hyper, int((chain.counts.topics > 0).sum()))

    return truth, draws()


def _topic_values(hyper: topic_states.Concentrations, count: int) -> Values:
    return {"gamma": hyper.topics, "a0": hyper.categories, "xi": hyper.new_categories,
            "topics": float(count)}  # fmt: skip


def views(rng: np.random.Generator) -> tuple[Values, Iterator[Values]]:
    """True values of one data set in two views, and those of the chain after each sweep."""
    model, truth, _ = view_states.draw_state(rng)
    start = first_state(rng, model, view_states.FREQUENCIES)

    def draws() -> Iterator[Values]:
        state = start
        while True:
            state = sweep(rng, model, state, adapt=state.sweeps < BURN_IN)
            yield _view_values(state)

    return _view_values(truth), draws()


def _view_values(state: State) -> Values:
    first, second = state.parameters
    return {
        "tau of view 1": first.noise_precision,
        "tau of view 2": second.noise_precision,
        "mu of view 1": float(first.offset[0]),
        "squared loadings of view 1": float((first.loadings**2).sum()),
        "squared loadings of view 2": float((second.loadings**2).sum()),
        "alpha": state.concentration,
        "nu": state.variance,
        "components": float(state.assignments.max() + 1),
    }


Problem = Callable[[np.random.Generator], tuple[Values, Iterator[Values]]]
PROBLEMS: dict[str, Problem] = {"topic model": topics, "multi-view model without labels": views}


def ranks(problem: Problem, replications: int) -> dict[str, list[int]]:
    """Rank of each true value, 0 to :data:`DRAWS`, by replication; ties are broken at random."""
    result: dict[str, list[int]] = {}
    for replication in range(replications):
        rng = np.random.default_rng([2018, replication])
        truth, draws = problem(rng)
        kept = [values for values, _ in zip(draws, range(BURN_IN + DRAWS * THINNING), strict=False)]
        kept = kept[BURN_IN::THINNING]
        for name, value in truth.items():
            drawn = np.array([values[name] for values in kept])
            below, equal = int((drawn < value).sum()), int((drawn == value).sum())
            result.setdefault(name, []).append(below + int(rng.integers(equal + 1)))
    return result


def uniformity(values: list[int]) -> tuple[list[int], float]:
    """The histogram of ranks, and the p-value of the chi-square test."""
    counts = np.bincount(np.array(values) * BINS // (DRAWS + 1), minlength=BINS)
    expected = len(values) / BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return counts.tolist(), float(chi2.sf(statistic, BINS - 1))


def main(options: argparse.Namespace) -> None:
    body: dict[str, dict[str, dict[str, object]]] = {}
    p_values = []
    for title, problem in PROBLEMS.items():
        body[title] = {}
        for name, values in ranks(problem, options.replications).items():
            histogram, p = uniformity(values)
            body[title][name] = {"p": p, "histogram": histogram}
            p_values.append(p)
            print(f"{title}, {name}: p {p:.3f} {histogram}", flush=True)
    save(options.out, replications=options.replications, draws=DRAWS, least_p=LEAST_P, values=body)
    sys.exit(min(p_values) < LEAST_P)
