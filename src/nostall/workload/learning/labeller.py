"""Labels programs with a known kind of work or *unknown*, by the operators that they call.

The classifier is a random forest; on the corpus of this package it wins over the Bayesian
classifier (docs/explanation/learners.md).  Probabilities are temperature-scaled and the threshold
of *unknown* is chosen on the known kinds alone: each is hidden once.

Groups programs of unknown kinds, and infers how many new kinds they are.

The topic model sees the labelled programs of the known kinds, and the unknown ones without labels.
The number of new kinds depends on the temper of the counts, so it is given for several tempers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from nostall.core.errors import BadInput
from nostall.workload.learning.diagnostics import fit_temperature, softmax
from nostall.workload.learning.documents import Document, Floats, count_matrix, vocabulary_of
from nostall.workload.learning.topics.classifier import UNLABELLED, OpenTopics

SEED = 0
TREES = 200
FLOOR = 0.5 / TREES
"""Votes of a kind that no tree votes for: half a tree."""
FOLDS = 4
"""Folds of documents and of hidden kinds that fit temperature and threshold."""
LEAST_TEMPERATURE = 0.5
"""Without errors in cross-validation the best temperature is 0: all labels would be certain."""
FOUND = 0.95
"""Share of the programs of unknown kinds that are flagged as unknown."""
DEFAULT_THRESHOLD = 0.5
"""Threshold for two kinds, of which none can be hidden."""
SMALLEST_KIND = 2
"""Documents that a kind needs."""
NEAREST = 3
BINS = 10
MAX_WORDS = 5


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A labelled program, and the cosine of its operator shares with those of another one."""

    name: str
    kind: str
    similarity: float


@dataclass(frozen=True, slots=True)
class Label:
    """What one program may be."""

    kind: str
    """The most probable known kind; it is only a guess if ``is_unknown``."""
    probability: float
    """Probability of ``kind`` given that the program is of a known kind."""
    novelty: float
    """1 minus the share of the trees that vote for ``kind``."""
    is_unknown: bool
    nearest: tuple[Neighbour, ...]
    words: tuple[tuple[str, float], ...]
    """Operators without which the share of the trees is lower, and by how much."""


class KindLabeller:
    """A classifier of programs that has been fitted to labelled documents."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Fit the forest, its temperature and the threshold of *unknown*.

        Raises :class:`~nostall.core.errors.BadInput` for fewer than two kinds, and for a kind with
        a single document.
        """
        _check(documents)
        self.documents = tuple(documents)
        self.vocabulary = vocabulary_of(d.operators for d in documents)
        self.features = self.features_of(documents)
        self.kinds, classes = np.unique([d.kind for d in documents], return_inverse=True)
        self.forest = self._forest().fit(self.features, classes)
        self.classes = classes
        self.held_out = self._held_out_votes(classes)
        """Votes by labelled program and kind, of forests that have not seen the program."""
        fitted = fit_temperature(np.log(self.held_out + FLOOR), classes)
        self.temperature = max(fitted, LEAST_TEMPERATURE)
        self.threshold = self._threshold(classes)

    def label(self, documents: Sequence[Document]) -> list[Label]:
        """The label of each document.

        Raises :class:`~nostall.core.errors.BadInput` for a document without known operators.
        """
        for document in documents:
            if not self.knows_operators_of(document):
                raise BadInput(
                    f"{document.name} calls no operator that the {len(self.documents)} labelled "
                    "programs call; record its operators with ProfilerActivity.CPU"
                )
        features = self.features_of(documents)
        votes = self.forest.predict_proba(features)
        probabilities = softmax(np.log(votes + FLOOR), self.temperature)
        return [
            self._label(features[row], votes[row], probabilities[row])
            for row in range(len(documents))
        ]

    def knows_operators_of(self, document: Document) -> bool:
        """Whether a labelled program calls an operator of the document."""
        return any(operator in self.vocabulary for operator in document.operators)

    def confusions(self) -> dict[tuple[str, str], int]:
        """(kind, label) of the labelled programs in cross-validation, and how many there are."""
        pairs: dict[tuple[str, str], int] = {}
        for actual, label in zip(self.classes, self.held_out.argmax(axis=1), strict=True):
            pair = (str(self.kinds[actual]), str(self.kinds[label]))
            pairs[pair] = pairs.get(pair, 0) + 1
        return pairs

    def reliability(self) -> list[tuple[float, float, int]]:
        """(mean probability, share of right labels, programs) by bins of the probability."""
        probabilities = softmax(np.log(self.held_out + FLOOR), self.temperature)
        confidence = probabilities.max(axis=1)
        is_right = probabilities.argmax(axis=1) == self.classes
        bin_of = np.minimum((confidence * BINS).astype(int), BINS - 1)
        return [
            (float(confidence[rows].mean()), float(is_right[rows].mean()), int(rows.sum()))
            for rows in (bin_of == b for b in range(BINS))
            if rows.any()
        ]

    def features_of(self, documents: Sequence[Document]) -> Floats:
        """Square roots of the operators' shares: rows of length 1."""
        counts = count_matrix([d.operators for d in documents], self.vocabulary)
        shares: Floats = np.sqrt(counts / np.maximum(1.0, counts.sum(axis=1, keepdims=True)))
        return shares

    def _forest(self) -> ExtraTreesClassifier:
        return ExtraTreesClassifier(TREES, random_state=SEED)

    def _held_out_votes(self, classes: NDArray[np.int64]) -> Floats:
        """Cross-validation over documents."""
        folds = min(FOLDS, int(np.bincount(classes).min()))
        splits = StratifiedKFold(folds, shuffle=True, random_state=SEED)
        votes: Floats = cross_val_predict(
            self._forest(), self.features, classes, cv=splits, method="predict_proba"
        )
        return votes

    def _threshold(self, classes: NDArray[np.int64]) -> float:
        """Novelty that the share :data:`FOUND` of programs reaches whose kind is hidden in turn."""
        rng = np.random.default_rng(SEED)
        order = rng.permutation(len(self.kinds))
        novelties = []
        for fold in range(min(FOLDS, len(self.kinds) - 1)):
            hidden = np.isin(classes, order[fold::FOLDS])
            if len(set(classes[~hidden])) < 2:
                continue
            forest = self._forest().fit(self.features[~hidden], classes[~hidden])
            novelties.append(1.0 - forest.predict_proba(self.features[hidden]).max(axis=1))
        if not novelties:
            return DEFAULT_THRESHOLD
        return float(np.quantile(np.concatenate(novelties), 1.0 - FOUND))

    def _label(self, features: Floats, votes: Floats, probabilities: Floats) -> Label:
        best = int(votes.argmax())
        similarity = self.features @ features
        nearest = np.argsort(-similarity)[:NEAREST]
        return Label(
            kind=str(self.kinds[best]),
            probability=float(probabilities[best]),
            novelty=float(1.0 - votes[best]),
            is_unknown=bool(1.0 - votes[best] >= self.threshold),
            nearest=tuple(
                Neighbour(self.documents[n].name, self.documents[n].kind, float(similarity[n]))
                for n in nearest
            ),
            words=self._words(features, best, float(votes[best])),
        )

    def _words(self, features: Floats, best: int, share: float) -> tuple[tuple[str, float], ...]:
        """Leave out one operator at a time, and see what the trees say."""
        present = np.flatnonzero(features)
        without = np.repeat(features[None], len(present), axis=0)
        without[np.arange(len(present)), present] = 0.0
        losses = share - self.forest.predict_proba(without)[:, best]
        order = np.argsort(-losses)[:MAX_WORDS]
        return tuple(
            (self.vocabulary[present[n]], float(losses[n])) for n in order if losses[n] > 0
        )


def _check(documents: Sequence[Document]) -> None:
    counts: dict[str, int] = {}
    for document in documents:
        if not document.kind:
            raise BadInput(f"{document.name} has no kind; give --kind when you learn from it")
        if not document.counts:
            raise BadInput(f"{document.name} calls no operators; leave it out")
        counts[document.kind] = counts.get(document.kind, 0) + 1
    if len(counts) < 2:
        raise BadInput(
            f"the labelled programs are of {len(counts)} kinds ({', '.join(counts) or 'none'}); "
            "at least two kinds are needed; learn from programs of another kind, too"
        )
    single = [kind for kind, count in counts.items() if count < SMALLEST_KIND]
    if single:
        raise BadInput(
            f"the kind {single[0]!r} has one program; at least {SMALLEST_KIND} are needed; learn "
            "from another program of this kind"
        )


TEMPER, ETA = 0.15, 0.3
"""Chosen on known kinds of the corpus (python -m benchmarks run learners.operators)."""
OTHER_TEMPERS = (0.25, 0.5)
SWEEPS, BURN_IN, CHAINS = 60, 30, 2


@dataclass(frozen=True, slots=True)
class NewKind:
    """One group of programs."""

    members: tuple[str, ...]
    """Names of the programs; those that are most alike come first."""
    words: tuple[str, ...]
    """Operators that the group calls more often than all programs do."""


@dataclass(frozen=True, slots=True)
class NewKinds:
    """The new kinds, and how sure their number is."""

    kinds: tuple[NewKind, ...]
    counts: Mapping[float, Mapping[int, float]]
    """Posterior of the number of new kinds, by temper."""
    model: OpenTopics
    """The fitted model of :data:`TEMPER`."""


def topic_model(temper: float = TEMPER, eta: float = ETA) -> OpenTopics:
    """The topic model with the settings of this module."""
    return OpenTopics(
        temper=temper,
        eta=eta,
        sweeps=SWEEPS,
        burn_in=BURN_IN,
        chains=CHAINS,
        smallest_kind=SMALLEST_KIND,
        random_state=SEED,
    )


def find_new_kinds(labelled: Sequence[Document], unknown: Sequence[Document]) -> NewKinds:
    """Group the unknown programs; each group that is not of a known kind is a new kind."""
    bags = [d.operators for d in (*labelled, *unknown)]
    vocabulary = vocabulary_of(bags)
    counts = count_matrix(bags, vocabulary)
    _, classes = np.unique([d.kind for d in labelled], return_inverse=True)
    labels = np.concatenate([classes, np.full(len(unknown), UNLABELLED)])
    tempers = (TEMPER, *OTHER_TEMPERS)
    models = {temper: topic_model(temper).fit(counts, labels) for temper in tempers}
    model = models[TEMPER]
    partition = model.partition()[len(labelled) :]
    shares = counts / counts.sum(axis=1, keepdims=True)
    common = shares.mean(axis=0)
    kinds = []
    for category in np.unique(partition[partition > classes.max()]):
        members = np.flatnonzero(partition == category)
        if len(members) < SMALLEST_KIND:
            continue
        rows = shares[len(labelled) + members]
        centre = rows.mean(axis=0)
        order = np.argsort(np.abs(rows - centre).sum(axis=1))
        best = np.argsort(common - centre)[:MAX_WORDS]
        kinds.append(
            NewKind(
                tuple(unknown[m].name for m in members[order]),
                tuple(vocabulary[w] for w in best if centre[w] > common[w]),
            )
        )
    kinds.sort(key=lambda kind: -len(kind.members))
    return NewKinds(tuple(kinds), {t: m.new_kinds_ for t, m in models.items()}, model)
