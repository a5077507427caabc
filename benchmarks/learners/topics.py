"""The topic model on documents of its own distribution, where the truth is known.

    python -m benchmarks run learners.topics --out benchmarks/learners/results/topics.json

Synthetic documents: 8 categories, of which 3 have no labels, 14 topics, 200 words.  The number of
new categories is inferred, or given: the true one, a too small one and a too large one.  Baselines
are k-means on the documents of the new categories and the novelty of a random forest.  With
tomotopy installed (``pip install tomotopy``), held-out perplexity with labels off is compared
with its sampler of hierarchical Dirichlet processes.  Times are CPU seconds.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.result_file import save
from benchmarks.learners.convergence import convergence_of, training_novelty
from nostall.workload.learning.topics.classifier import OpenTopics

SEEDS = range(100, 110)
"""Settings and moves of the sampler were chosen with seeds below 100."""
KNOWN, CATEGORIES, TOPICS, WORDS, DOCUMENTS, LENGTH = 5, 8, 14, 200, 340, 85
ETA = 0.1
SETTINGS = {"eta": ETA, "sweeps": 150, "burn_in": 75, "chains": 3}
Array = NDArray[Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


@dataclass(frozen=True)
class Synthetic:
    """Counts (documents, words), labels with -1 for none, and true categories."""

    counts: Array
    labels: Array
    truth: Array


def draw_documents(seed: int, documents: int = DOCUMENTS) -> Synthetic:
    """Documents of the model: topics, their use by categories, words."""
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.full(WORDS, ETA), TOPICS)
    sticks = rng.dirichlet(np.full(TOPICS, 2.0))
    mixtures = rng.dirichlet(3.0 * sticks, CATEGORIES)
    truth = np.arange(documents) % CATEGORIES
    lengths = rng.poisson(LENGTH, documents) + 1
    counts = [rng.multinomial(n, mixtures[c] @ topics) for n, c in zip(lengths, truth, strict=True)]
    is_labelled = (truth < KNOWN) & (rng.random(documents) < 0.5)
    return Synthetic(np.array(counts, float), np.where(is_labelled, truth, -1), truth)


def main(options: argparse.Namespace) -> None:
    OpenTopics(sweeps=2, burn_in=1).fit([[1, 2], [2, 1]], [0, -1])  # compiles
    body: dict[str, Any] = {"settings": SETTINGS, "inferred": [_inferred(s) for s in SEEDS]}
    exact = sum(row["new_kinds"] == CATEGORIES - KNOWN for row in body["inferred"])
    body["exact_number_of_new_kinds"] = f"{exact} of {len(SEEDS)}"
    body["least_rand_index"] = min(row["rand_index"] for row in body["inferred"])
    print(body["exact_number_of_new_kinds"], body["least_rand_index"])
    body["given"] = {n: _given(n) for n in (1, 3, 6)}
    print(body["given"])
    body["baselines"] = _baselines()
    print(body["baselines"])
    body["speed"] = _speed()
    print(body["speed"])
    body["perplexity"] = _perplexities() if find_spec("tomotopy") else "tomotopy is not installed"
    print(body["perplexity"])
    save(options.out, **body)


def _inferred(seed: int) -> dict[str, Any]:
    """The number of new kinds and the partition, for one seed."""
    from sklearn.metrics import adjusted_rand_score, roc_auc_score

    data = draw_documents(seed)
    model = OpenTopics(random_state=seed, **SETTINGS).fit(data.counts, data.labels)
    free = data.labels < 0
    kinds = model.new_kinds_
    partition = model.partition()[free]
    known = free & (data.truth < KNOWN)
    return {
        "seed": seed,
        "new_kinds": max(kinds, key=lambda n: kinds[n]),
        "posterior": kinds,
        "rand_index": round(adjusted_rand_score(data.truth[free], partition), 4),
        "novelty_auroc": roc_auc_score(data.truth[free] >= KNOWN, training_novelty(model)[free]),
        "known_accuracy": float((model.predict(data.counts)[known] == data.truth[known]).mean()),
        "convergence": {
            name: {"r_hat": round(c.r_hat, 3), "effective_draws": round(c.effective_draws)}
            for name, c in convergence_of(model.traces_).items()
        },
    }


def _given(number: int) -> dict[str, float]:
    """Means over the seeds of the parametric model with ``number`` new categories; one chain."""
    from sklearn.metrics import adjusted_rand_score

    indices, used = [], []
    for seed in SEEDS:
        data = draw_documents(seed)
        model = OpenTopics(new_categories=number, random_state=seed, **{**SETTINGS, "chains": 1})
        model.fit(data.counts, data.labels)
        free = data.labels < 0
        indices.append(adjusted_rand_score(data.truth[free], model.partition()[free]))
        used.append(max(model.new_kinds_, key=lambda n, kinds=model.new_kinds_: kinds[n]))
    return {"mean_rand_index": float(np.mean(indices)), "mean_new_kinds": float(np.mean(used))}


def _baselines() -> dict[str, Any]:
    """k-means on the documents of new categories, and the novelty of a random forest."""
    from sklearn.cluster import KMeans
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.metrics import adjusted_rand_score, roc_auc_score

    indices: dict[int, list[float]] = {1: [], 2: [], 3: [], 5: []}
    areas = []
    for seed in SEEDS:
        data = draw_documents(seed)
        shares = data.counts / data.counts.sum(axis=1, keepdims=True)
        free, is_new = data.labels < 0, data.truth >= KNOWN
        for k, values in indices.items():
            found = KMeans(k, n_init=10, random_state=seed).fit_predict(shares[is_new])
            values.append(adjusted_rand_score(data.truth[is_new], found))
        forest = RandomForestClassifier(300, random_state=seed)
        forest.fit(shares[~free], data.labels[~free])
        novelty = 1 - forest.predict_proba(shares[free]).max(axis=1)
        areas.append(roc_auc_score(is_new[free], novelty))
    return {
        "k_means_rand_index_by_k": {k: float(np.mean(v)) for k, v in indices.items()},
        "forest_novelty_auroc": float(np.mean(areas)),
    }


def _speed() -> dict[str, Any]:
    """CPU time per token and sweep, at 1 and at 16 times the documents."""
    times = {}
    for factor in (1, 16):
        data = draw_documents(0, DOCUMENTS * factor)
        model = OpenTopics(eta=ETA, sweeps=40, burn_in=30, warm_start=True)
        model.fit(data.counts, data.labels)
        model.set_params(sweeps=80)
        start = time.process_time()
        model.fit(data.counts, data.labels)
        seconds = time.process_time() - start
        times[factor] = {
            "tokens": int(data.counts.sum()),
            "seconds": seconds,
            "microseconds_per_token_and_sweep": seconds / 40 / data.counts.sum() * 1e6,
            "topics": int((model.draws_[-1].counts.topics > 0).sum()),
        }
    return {**times, "ratio": times[16]["seconds"] / times[1]["seconds"]}


def _perplexities() -> list[dict[str, float]]:
    """Held-out perplexity of a tenth of the tokens; each document is its own category."""
    return [_perplexity(seed) for seed in range(3)]


def _perplexity(seed: int) -> dict[str, float]:
    data = draw_documents(seed)
    rng = np.random.default_rng(seed)
    held_out = rng.binomial(data.counts.astype(int), 0.1)
    train = data.counts.astype(int) - held_out
    model = OpenTopics(eta=ETA, sweeps=300, burn_in=150, random_state=seed)
    model.fit(train, np.arange(len(train)))
    probabilities = np.zeros(train.shape)
    for draw in model.draws_:
        counts, hyper = draw.counts, draw.hyper
        words = (counts.word_topics + hyper.words) * counts.inverse
        use = counts.category_topics[: len(train)] + hyper.categories * counts.sticks
        rest = hyper.categories * counts.rest[0] / train.shape[1]
        total = counts.categories[: len(train), None] + hyper.categories
        probabilities += (use @ words.T + rest) / total
    ours = _per_word(probabilities / len(model.draws_), held_out)
    oracle = _per_word(_tomotopy(train, seed), held_out)
    return {"ours": ours, "tomotopy": oracle, "ratio": ours / oracle}


def _tomotopy(train: Array, seed: int) -> Array:
    """Probability of each word in each document, a mean over draws of tomotopy's HDPModel."""
    tomotopy = import_module("tomotopy")
    model = tomotopy.HDPModel(alpha=1.0, gamma=1.0, eta=ETA, initial_k=20, seed=seed)
    for row in train:
        model.add_doc([str(w) for w in np.repeat(np.arange(len(row)), row)])
    model.train(1000, workers=1)
    columns = [int(word) for word in model.used_vocabs]
    total = np.zeros(train.shape)
    draws = 30
    for _ in range(draws):
        model.train(10, workers=1)
        live = [k for k in range(model.k) if model.is_live_topic(k)]
        words = np.full((len(live), train.shape[1]), 1e-12)
        words[:, columns] = [model.get_topic_word_dist(k) for k in live]
        use = np.array([np.asarray(d.get_topic_dist())[live] for d in model.docs])
        total += use / use.sum(axis=1, keepdims=True) @ words
    return total / draws


def _per_word(probabilities: Array, held_out: Array) -> float:
    return float(np.exp(-(held_out * np.log(probabilities)).sum() / held_out.sum()))
