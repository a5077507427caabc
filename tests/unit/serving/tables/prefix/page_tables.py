"""Block tables, random and by hand, and what their sequences share by definition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from nostall.serving.batch.ragged import PrefixGroup

PAGE = 16


@dataclass(frozen=True)
class Pages:
    """Lengths and block table of a batch."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    """Pages of each sequence, of any number."""

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Block table, query lengths and KV lengths; rows are filled with 0."""
        width = max([1, *map(len, self.rows)])
        table = np.zeros((len(self.rows), width), np.int32)
        for place, row in enumerate(self.rows):
            table[place, : len(row)] = row
        return table, np.array(self.queries, np.int32), np.array(self.keys, np.int32)

    def visible(self, sequence: int) -> tuple[int, ...]:
        """Pages that a sequence may share: whole ones of its context, in front of page 0."""
        if not self.queries[sequence]:
            return ()
        count = max(self.keys[sequence] - self.queries[sequence], 0) // PAGE
        pages = (*self.rows[sequence][:count], 0)
        return pages[: pages.index(0)]

    def common(self, left: int, right: int) -> int:
        """Leading pages that two sequences have in common."""
        pairs = list(zip(self.visible(left), self.visible(right), strict=False))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def leader(self, sequence: int) -> tuple[int, int]:
        """The first earlier sequence with the most common pages, and their tokens."""
        shared = [self.common(sequence, other) for other in range(sequence)]
        most = max(shared, default=0)
        return (shared.index(most), most * PAGE) if most else (-1, 0)

    def groups(self) -> set[PrefixGroup]:
        """All sets of sequences that share more with each other than with all others."""
        every = range(len(self.rows))
        found = set()
        for left, right in combinations(every, 2):
            pages = self.common(left, right)
            members = tuple(i for i in every if i == left or self.common(left, i) >= pages)
            if pages:
                found.add(PrefixGroup(members, pages * PAGE))
        return found


def draw(rng: np.random.Generator, most: int = 24) -> Pages:
    """A batch of sequences that take their pages from a random tree.

    Some pages are 0, some lengths leave pages behind the context, and some pages are equal although
    pages before them differ.
    """
    rows: list[tuple[int, ...]] = []
    queries, keys = [], []
    fresh = 1
    for _ in range(int(rng.integers(0, most + 1))):
        row: list[int] = []
        if rows and rng.random() < 0.8:
            other = rows[int(rng.integers(len(rows)))]
            row = list(other[: int(rng.integers(0, len(other) + 1))])
        new = int(rng.integers(0, 7))
        row += range(fresh, fresh + new)
        fresh += new
        if row and rng.random() < 0.15:
            row[int(rng.integers(len(row)))] = int(rng.choice([0, fresh, *row]))
            fresh += 1
        query = int(rng.choice([0, 1, 1, 1, 2, 9, 40]))
        length = query + int(rng.integers(0, len(row) * PAGE + 1))
        rows.append(tuple(row))
        queries.append(query)
        keys.append(length)
    return Pages(tuple(queries), tuple(keys), tuple(rows))


LONG = tuple(range(1, 1300))
BY_HAND = {
    "two levels": Pages(
        (1,) * 6, (81,) * 6,
        ((1, 2, 3, 4, 9), (1, 2, 5, 6, 10), (1, 2, 3, 4, 11), (1, 2, 5, 6, 12), (1, 2, 3, 4, 13),
         (1, 2, 5, 7, 14)),
    ),
    "pages computed in this step": Pages(
        (1, 64, 1, 1), (100, 64, 100, 100),
        ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4), (1, 2, 3, 4, 5, 7), (1, 2, 3, 4, 5, 8)),
    ),
    "null pages": Pages((1, 1, 1), (81,) * 3, ((1, 0, 3, 4, 5), (1, 0, 3, 4, 5), (0, 0, 0, 0, 0))),
    "equal pages behind different ones": Pages(
        (1, 1, 1), (49,) * 3, ((1, 2, 3), (4, 5, 6), (1, 5, 6))
    ),
    "long rows": Pages(
        (1, 1, 1), (1299 * 16, 1200 * 16 + 1, 1299 * 16),
        (LONG, LONG[:1200], (*LONG[:1100], *range(2000, 2199))),
    ),
    "a chain": Pages(
        (1,) * 7, (7 * 16 + 1,) * 7,
        tuple((*range(1, n + 1), *range(100 * n, 100 * n + 7 - n)) for n in (6, 1, 4, 3, 5, 2, 7)),
    ),
}  # fmt: skip
"""Batches by name."""
