"""Fixed splits of the operator corpus: which kinds are hidden, and which documents have labels.

The kinds of :func:`hidden_pool` are never hidden while settings are chosen; settings are chosen by
hiding the other kinds (:func:`development_splits`), and measured by hiding those of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.workload.learning.documents import Document, read_documents

Array = NDArray[Any]
CORPUS = Path(__file__).parents[2] / "src/nostall/workload/learning/corpus.json.gz"
POOL = 8
"""Kinds that are hidden in tests only."""
RUNS = 10


@dataclass(frozen=True)
class Split:
    """Documents of one run."""

    kinds: Array
    """Kind of each document."""
    hidden: tuple[str, ...]
    is_labelled: Array
    documents: tuple[Document, ...]

    @property
    def is_new(self) -> Array:
        return np.isin(self.kinds, self.hidden)


def load() -> list[Document]:
    return read_documents(CORPUS)


def hidden_pool(kinds: list[str]) -> list[str]:
    chosen = np.random.default_rng(20261126).choice(sorted(kinds), POOL, replace=False)
    return sorted(str(kind) for kind in chosen)


def held_out_splits(documents: list[Document]) -> Iterator[Split]:
    """Hide 1 to 4 kinds of the pool; half of the documents of all other kinds have labels."""
    kinds = sorted({d.kind for d in documents})
    yield from _splits(documents, hidden_pool(kinds), 1)


def development_splits(documents: list[Document]) -> Iterator[Split]:
    """Hide 1 to 4 kinds outside the pool; there are no documents of the pool's kinds."""
    pool = hidden_pool(sorted({d.kind for d in documents}))
    rest = [d for d in documents if d.kind not in pool]
    yield from _splits(rest, sorted({d.kind for d in rest}), 2)


def _splits(documents: list[Document], candidates: list[str], seed: int) -> Iterator[Split]:
    rng = np.random.default_rng(seed)
    kinds = np.array([d.kind for d in documents])
    for run in range(RUNS):
        hidden = tuple(str(k) for k in rng.choice(candidates, 1 + run % 4, replace=False))
        is_labelled = ~np.isin(kinds, hidden) & (rng.random(len(kinds)) < 0.5)
        yield Split(kinds, hidden, is_labelled, tuple(documents))
