"""Kinds of models by their operators: labels, unknown kinds, and the number of new kinds.

    python -m benchmarks run learners.operators --out benchmarks/learners/results/operators.json

Settings are chosen on the development splits of ``hidden_kinds``; the kinds of the test splits are
hidden in no development split.  A method gives each document a label and a novelty; the area under
the ROC curve (AUROC) says how well the novelty tells hidden kinds from known ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.result_file import save
from benchmarks.learners.convergence import training_novelty
from benchmarks.learners.figures import calibration_error
from benchmarks.learners.hidden_kinds import (
    Split,
    development_splits,
    held_out_splits,
    hidden_pool,
    load,
)
from nostall.papers.multiview.classifier import MaxMarginMultiView
from nostall.workload.learning.diagnostics import softmax
from nostall.workload.learning.documents import count_matrix, vocabulary_of
from nostall.workload.learning.labeller import FLOOR, KindLabeller, topic_model

Array = NDArray[Any]
SWEEP = (
    ("operators", 0.15, 0.3),
    ("operators", 0.25, 0.3),
    ("operators", 0.5, 0.3),
    ("operators", 0.25, 0.1),
    ("sizes", 0.25, 0.3),
)
"""Words, temper of the counts and eta."""
SWEEP_SPLITS = 4
"""Development splits of the sweep: one for each number of hidden kinds."""
WORDS = ("operators", "sizes")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    documents = load()
    kinds = sorted({d.kind for d in documents})
    development, test = list(development_splits(documents)), list(held_out_splits(documents))
    body: dict[str, Any] = {
        "documents": len(documents),
        "kinds": kinds,
        "hidden_in_tests_only": hidden_pool(kinds),
    }
    body["methods_test"] = {
        method: _mean([_judge(split, *run(split)) for split in test])
        for method, run in METHODS.items()
    }
    print(body["methods_test"], flush=True)
    sweep = [
        {"words": words, "temper": temper, "eta": eta}
        | _group_all(development[:SWEEP_SPLITS], words, temper, eta)
        for words, temper, eta in SWEEP
    ]
    best = max(sweep, key=lambda row: row["hungarian_accuracy"] + row["number_within_1"])
    print(sweep, flush=True)
    chosen = (best["words"], best["temper"], best["eta"])
    body |= {
        "temper_sweep_development": sweep,
        "chosen": best,
        "grouping_test": _group_all(test, *chosen),
        "pipeline_test": [_pipeline(split, *chosen) for split in test],
        "k_means_test": {
            str(factor): _mean([_k_means(split, factor) for split in test])
            for factor in (0.5, 1.0, 1.5)
        },
    }
    rows = body["pipeline_test"]
    body["pipeline_mean"] = _mean(rows) | {
        "number_within_1": float(np.mean([abs(r["number_error"]) <= 1 for r in rows]))
    }
    print(body["grouping_test"], body["pipeline_mean"], body["k_means_test"])
    save(options.out, **body)


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def _forest(split: Split) -> tuple[Array, Array, Array]:
    """Kinds, and by unlabelled document: probabilities of the kinds, novelty."""
    train = [d for d, labelled in zip(split.documents, split.is_labelled, strict=True) if labelled]
    free = [
        d for d, labelled in zip(split.documents, split.is_labelled, strict=True) if not labelled
    ]
    labeller = KindLabeller(train)
    votes = labeller.forest.predict_proba(labeller.features_of(free))
    probabilities = softmax(np.log(votes + FLOOR), labeller.temperature)
    return labeller.kinds, probabilities, 1 - votes.max(axis=1)


def _regression(split: Split) -> tuple[Array, Array, Array]:
    from sklearn.linear_model import LogisticRegression

    features = np.sqrt(_shares(split))
    model = LogisticRegression(C=100.0, max_iter=2000)
    model.fit(features[split.is_labelled], split.kinds[split.is_labelled])
    probabilities = model.predict_proba(features[~split.is_labelled])
    return model.classes_, probabilities, 1 - probabilities.max(axis=1)


def _max_margin(split: Split) -> tuple[Array, Array, Array]:
    """Two views: operators, and operators by the size of their result."""
    views = [np.sqrt(_shares(split, words)) for words in WORDS]
    views = [view[:, view[split.is_labelled].std(axis=0) > 0] for view in views]
    features = np.hstack(views)
    widths = [view.shape[1] for view in views]
    model = MaxMarginMultiView(widths, spectrum="fixed", sweeps=30, burn_in=15)
    model.fit(features[split.is_labelled], split.kinds[split.is_labelled])
    probabilities = model.predict_proba(features[~split.is_labelled])
    return model.classes_, probabilities, 1 - probabilities.max(axis=1)


def _topics(split: Split) -> tuple[Array, Array, Array]:
    counts = _counts(split, "operators")
    kinds, classes = np.unique(split.kinds[split.is_labelled], return_inverse=True)
    labels = np.full(len(counts), -1)
    labels[split.is_labelled] = classes
    model = topic_model().fit(counts, labels)
    free = counts[~split.is_labelled]
    return kinds, model.predict_proba(free), training_novelty(model)[~split.is_labelled]


METHODS: dict[str, Callable[[Split], tuple[Array, Array, Array]]] = {
    "forest": _forest,
    "logistic regression": _regression,
    "max-margin, fixed spectrum": _max_margin,
    "topics": _topics,
}


def _counts(split: Split, words: str) -> Array:
    bags = [d.operators if words == "operators" else d.counts for d in split.documents]
    return count_matrix(bags, vocabulary_of(bags))


def _shares(split: Split, words: str = "operators") -> Array:
    counts = _counts(split, words)
    return counts / counts.sum(axis=1, keepdims=True)


def _judge(split: Split, kinds: Array, probabilities: Array, novelty: Array) -> dict[str, float]:
    from sklearn.metrics import roc_auc_score

    is_new, truth = split.is_new[~split.is_labelled], split.kinds[~split.is_labelled]
    right = kinds[probabilities.argmax(axis=1)] == truth
    classes = np.searchsorted(kinds, truth[~is_new])
    return {
        "known_accuracy": float(right[~is_new].mean()),
        "unknown_auroc": float(roc_auc_score(is_new, novelty)),
        "calibration_error": calibration_error(probabilities[~is_new], classes),
    }


def _hungarian(truth: Array, found: Array) -> float:
    """Share of documents in the best one-to-one matching of kinds and groups."""
    from scipy.optimize import linear_sum_assignment

    _, rows = np.unique(truth, return_inverse=True)
    _, columns = np.unique(found, return_inverse=True)
    table = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(table, (rows, columns), 1)
    return float(table[linear_sum_assignment(-table)].sum() / len(truth))


def _fit_groups(
    split: Split, is_free: Array, words: str, temper: float, eta: float
) -> tuple[Array, int]:
    """Category of each document of ``is_free``, and the number of new kinds."""
    use = split.is_labelled | is_free
    counts = _counts(split, words)[use]
    _, classes = np.unique(split.kinds, return_inverse=True)
    _, classes = np.unique(np.where(split.is_labelled, classes, -1), return_inverse=True)
    model = topic_model(temper, eta).fit(counts, (classes - 1)[use])
    kinds = model.new_kinds_
    return model.partition()[is_free[use]], max(kinds, key=lambda n: kinds[n])


def _group_all(splits: list[Split], words: str, temper: float, eta: float) -> dict[str, float]:
    """Grouping of exactly the documents of hidden kinds."""
    accuracies, errors = [], []
    for split in splits:
        found, number = _fit_groups(split, split.is_new, words, temper, eta)
        accuracies.append(_hungarian(split.kinds[split.is_new], found))
        errors.append(number - len(split.hidden))
    return {
        "hungarian_accuracy": float(np.mean(accuracies)),
        "number_within_1": float(np.mean(np.abs(errors) <= 1)),
        "mean_number_error": float(np.mean(errors)),
    }


def _pipeline(split: Split, words: str, temper: float, eta: float) -> dict[str, float]:
    """The forest flags documents; the topic model groups the flagged ones."""
    train = [d for d, labelled in zip(split.documents, split.is_labelled, strict=True) if labelled]
    labeller = KindLabeller(train)
    votes = labeller.forest.predict_proba(labeller.features_of(split.documents))
    flagged = ~split.is_labelled & (1.0 - votes.max(axis=1) >= labeller.threshold)
    found = np.full(len(split.kinds), -1)
    number = 0
    if flagged.any():
        found[flagged], number = _fit_groups(split, flagged, words, temper, eta)
    known = ~split.is_labelled & ~split.is_new
    return {
        "hidden": len(split.hidden),
        "flagged_of_new": float(flagged[split.is_new].mean()),
        "flagged_of_known": float(flagged[known].mean()),
        "hungarian_accuracy": _hungarian(split.kinds[split.is_new], found[split.is_new]),
        "number_error": number - len(split.hidden),
    }


def _k_means(split: Split, factor: float) -> dict[str, float]:
    """k-means on the documents of hidden kinds, with ``factor`` times the true number."""
    from sklearn.cluster import KMeans

    shares = np.sqrt(_shares(split)[split.is_new])
    k = max(1, round(factor * len(split.hidden)))
    found = KMeans(k, n_init=10, random_state=0).fit_predict(shares)
    return {"hungarian_accuracy": _hungarian(split.kinds[split.is_new], found)}
