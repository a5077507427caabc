"""Groups programs of unknown kinds, and infers how many new kinds they are.

The topic model sees the labelled programs of the known kinds, and the unknown ones without labels.
The number of new kinds depends on the temper of the counts, so it is given for several tempers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nostall.workload.learning.documents import Document, count_matrix, vocabulary_of
from nostall.workload.learning.topics.classifier import UNLABELLED, OpenTopics

TEMPER, ETA = 0.15, 0.3
"""Chosen on known kinds of the corpus (python -m benchmarks run learners.operators)."""
OTHER_TEMPERS = (0.25, 0.5)
SWEEPS, BURN_IN, CHAINS = 60, 30, 2
SMALLEST_KIND = 2
MAX_WORDS = 5


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


def topic_model(temper: float = TEMPER, eta: float = ETA, seed: int = 0) -> OpenTopics:
    """The topic model with the settings of this module."""
    return OpenTopics(
        temper=temper,
        eta=eta,
        sweeps=SWEEPS,
        burn_in=BURN_IN,
        chains=CHAINS,
        smallest_kind=SMALLEST_KIND,
        random_state=seed,
    )


def find_new_kinds(
    labelled: Sequence[Document], unknown: Sequence[Document], *, seed: int = 0
) -> NewKinds:
    """Group the unknown programs; each group that is not of a known kind is a new kind."""
    bags = [d.operators for d in (*labelled, *unknown)]
    vocabulary = vocabulary_of(bags)
    counts = count_matrix(bags, vocabulary)
    _, classes = np.unique([d.kind for d in labelled], return_inverse=True)
    labels = np.concatenate([classes, np.full(len(unknown), UNLABELLED)])
    models = {
        temper: topic_model(temper, seed=seed).fit(counts, labels)
        for temper in (TEMPER, *OTHER_TEMPERS)
    }
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
