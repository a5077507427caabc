"""Read the mined tables of an architecture family and combine their sources.

There are three sources.  ``floors/sm_N.json`` is mined from a corpus of cubins, over all paths
(:mod:`.mining`), and ``floors/own/sm_N.json`` in the same way from code that was written for pairs
that this corpus hardly has.  ``floors/libraries/sm_N.json`` is mined from the libraries in wheels,
in straight-line code (``python -m tools.mining``).  A smaller distance that a compiler kept often
enough is safe, so the smallest row counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table."""

    distance: int
    """Distance in cycles."""
    seen: int
    """Number of occurrences in compiler output."""


Rows = dict[str, dict[str, Row]]
"""Kind of pair (RAW, WAW, WAR, ISSUE, AFTER, BEFORE) -> name of the pair -> its row."""


@dataclass(frozen=True, slots=True)
class MinedTables:
    """The tables of one architecture family."""

    floors: Rows
    """Smallest distance for each class of pairs, on any path."""
    attested: Rows
    """Smallest distance for each exact pair, in straight-line code."""
    sufficient: Rows
    """Largest attested distance of the well-seen pairs of a class or producer."""
    ceilings: dict[str, int]
    """Producer class -> cycles after which its result has arrived everywhere."""


_DATA_HAZARDS = ("RAW", "WAW", "WAR")
"""Kinds of pairs of register accesses."""


def load(family: int) -> MinedTables | None:
    """The tables of an architecture family; None if there are none."""
    folder = resources.files("nostall.sass.safety").joinpath("floors")
    corpus_path = folder.joinpath(f"sm_{family}.json")
    if not corpus_path.is_file():
        return None
    corpus = json.loads(corpus_path.read_text())
    further = [folder.joinpath(name, f"sm_{family}.json") for name in ("own", "libraries")]
    return combine(corpus, *(json.loads(p.read_text()) for p in further if p.is_file()))


def combine(corpus: Mapping[str, Any], *further: Mapping[str, Any]) -> MinedTables:
    """Combine the tables of the corpus with further ones, as read from JSON.

    Distances between scheduling barriers and other instructions were measured on a GPU to matter
    without any visible dependence, so further tables add rows of them but lower none.
    """
    floors, attested = _rows(corpus["floors"]), _rows(corpus["attested"])
    sufficient = _rows(corpus["suffices"])
    for table in further:
        for part in ("floors", "forms", "classes"):
            _lower(floors, _rows(table.get(part, {}), _DATA_HAZARDS))
        mined = _rows(table.get("attested", {}))
        _lower(attested, {kind: rows for kind, rows in mined.items() if kind in _DATA_HAZARDS})
        _add_missing(attested, {k: rows for k, rows in mined.items() if k not in _DATA_HAZARDS})
        _raise(sufficient, _rows(table.get("suffices", {})))
    return MinedTables(floors, attested, sufficient, corpus["ceilings"])


def _rows(part: Mapping[str, Any], kinds: tuple[str, ...] | None = None) -> Rows:
    """The rows of one part of a table; only those of ``kinds`` if given."""
    return {
        kind: {name: Row(numbers[0], numbers[1]) for name, numbers in rows.items()}
        for kind, rows in part.items()
        if kinds is None or kind in kinds
    }


def _lower(rows: Rows, others: Rows) -> None:
    """Merge other rows: the smaller distance and the sum of the occurrences."""
    for kind, more in others.items():
        known = rows.setdefault(kind, {})
        for name, row in more.items():
            old = known.get(name, row)
            seen = row.seen + (old.seen if name in known else 0)
            known[name] = Row(min(old.distance, row.distance), seen)


def _raise(rows: Rows, others: Rows) -> None:
    """Merge other rows: the larger distance and the sum of the occurrences."""
    for kind, more in others.items():
        known = rows.setdefault(kind, {})
        for name, row in more.items():
            old = known.get(name, Row(0, 0))
            known[name] = Row(max(old.distance, row.distance), old.seen + row.seen)


def _add_missing(rows: Rows, others: Rows) -> None:
    """Add the rows whose names are not known."""
    for kind, more in others.items():
        rows[kind] = {**more, **rows.get(kind, {})}
