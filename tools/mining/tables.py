"""Write the tables of a mining run: one JSON file for each architecture family.

A table has no code, only names of pairs with ``[least distance, occurrences, functions]``.  A row
exists if its least distance was seen often enough in different functions (:mod:`.tallies`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from nostall.core.files.atomic import create_folder, write_text_atomically
from nostall.sass.program.opcodes import Pipe, lookup
from nostall.sass.safety.latency import FAMILY
from tools.mining.store import Checkpoint
from tools.mining.tallies import Key, Least, Tallies, Tally, least

FORMAT = 1
"""Version of the layout."""

MIN_SEEN_FOR_CLASS = 60
"""Occurrences of an exact pair from which it counts for the largest distance of its class."""

MIN_SEEN_FOR_PRODUCER = 10
"""Occurrences of an exact pair from which it counts for the largest distance of its producer."""

Rows = dict[str, dict[str, list[int]]]
"""Kind of pair -> name -> [least distance, occurrences, functions]."""


def write_tables(checkpoint: Checkpoint, out: Path) -> list[Path]:
    """Write the tables of what was mined so far into the folder ``out``."""
    create_folder(out)
    paths: list[Path] = []
    for family, tallies in sorted(_families(checkpoint).items()):
        architectures = [sm for sm, other in FAMILY.items() if other == family]
        path = out / f"sm_{family}.json"
        table = _table(family, architectures, tallies, checkpoint)
        write_text_atomically(path, _format(table) + "\n")
        paths.append(path)
    return paths


def _families(checkpoint: Checkpoint) -> dict[int, Tallies]:
    """The sightings of each architecture family."""
    families: dict[int, Tallies] = defaultdict(Tallies)
    for sm, tallies in checkpoint.tallies.items():
        families[FAMILY[sm]].add(tallies)
    generation = [families[f] for f in (80, 86) if f in families]
    if len(generation) == 2:
        first, second = ({k: t for k, t in g.tallies.items() if _is_shared(k)} for g in generation)
        for family, others in zip(generation, (second, first), strict=True):
            family.add(Tallies(others))
    return families


def _is_shared(key: Key) -> bool:
    """Whether a pair has the same timing on sm_80 and sm_86: not matrix and FP64 units."""
    base = key[1].partition("|")[0].partition(">")[0].partition(".")[0]
    row = lookup(base)
    return row is None or row.pipe not in (Pipe.MMA, Pipe.DOUBLE)


def _table(
    family: int, architectures: list[int], tallies: Tallies, checkpoint: Checkpoint
) -> dict[str, object]:
    exact, forms, classes = (_rows(tallies, column) for column in (1, 2, 3))
    return {
        "architecture": f"sm_{family}",
        "format": FORMAT,
        "functions": tallies.functions,
        "instructions": tallies.instructions,
        "sources": _sources(architectures, checkpoint),
        "columns": ["least", "seen", "functions"],
        "attested": exact,
        "forms": forms,
        "classes": classes,
        "suffices": _suffices(tallies, exact),
    }


def _sources(architectures: list[int], checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Source -> "sm_90, CUDA 12.4" -> number of functions that were mined."""
    return {
        name: {
            f"sm_{sm}, CUDA {cuda}": count
            for sm in architectures
            for cuda, count in sorted(record.cuda.get(sm, {}).items())
        }
        for name, record in sorted(checkpoint.sources.items())
    }


def _rows(tallies: Tallies, column: int) -> Rows:
    """The rows of exact names (column 1), forms (2) or classes (3)."""
    groups: dict[tuple[str, str], list[tuple[int, Tally]]] = defaultdict(list)
    for key, tally in tallies.tallies.items():
        groups[key[0], str(key[column])].append((key[4], tally))
    rows: Rows = {}
    for (kind, name), group in sorted(groups.items()):
        row = least(group)
        if row is not None:
            rows.setdefault(kind, {})[name] = _as_list(row)
    return rows


def _suffices(tallies: Tallies, exact: Rows) -> Rows:
    """The largest of the least distances of the well-seen pairs of each class and producer."""
    names = {(key[0], key[1], key[3]) for key in tallies.tallies}
    rows: Rows = {}
    for kind, name, class_name in sorted(names):
        row = exact.get(kind, {}).get(name)
        if row is None:
            continue
        producer = name.partition("|")[0]
        for group, min_seen in (
            (class_name, MIN_SEEN_FOR_CLASS),
            (producer, MIN_SEEN_FOR_PRODUCER),
        ):
            if row[1] >= min_seen:
                known = rows.setdefault(kind, {}).setdefault(group, [0, 0, 0])
                known[:] = _larger(known, row)
    return rows


def _larger(known: Iterable[int], row: Iterable[int]) -> list[int]:
    (distance, seen, functions), (other, more, others) = known, row
    return [max(distance, other), seen + more, max(functions, others)]


def _as_list(row: Least) -> list[int]:
    return [row.distance, row.seen, row.functions]


def _format(value: object, indent: str = "") -> str:
    """JSON text with one row of a table on each line."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = indent + " "
    items = (f"{inner}{json.dumps(key)}: {_format(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"
