"""Repair of a store: build a damaged or deleted index anew from the records' files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nostall.store.artefacts import JSON
from nostall.store.errors import BadStore, DamagedIndex
from nostall.store.provenance import Provenance
from nostall.store.row import Origin, Row
from nostall.store.store import Store, make_row


@dataclass(frozen=True)
class Repair:
    """Result of :func:`repair`."""

    rows: tuple[Row, ...]
    """All records of the store."""
    unusable: tuple[str, ...]
    """Why files of records were left out, one reason for each."""
    damaged: Path | None
    """The old index under its new name; None if it was right, or missing."""


def repair(store: Store) -> Repair:
    """Make the index agree with the records' files.

    A record counts if its provenance, both of its cubins and its recipe, if any, have the content
    that their names say, and if it is marked as safe.  A right index is left as it is.  Raises
    :class:`BadStore` if the store cannot be written, or if its index is of a newer version.
    """
    with store.locked():
        known = _readable_rows(store)
        sources: dict[str, Origin] = {row.id: row.source for row in known or ()}
        rows, unusable = [], []
        for id in sorted(store.artefacts.names(JSON)):
            try:
                rows.append(_read_row(store, id, sources.get(id, "repaired")))
            except BadStore as error:
                unusable.append(f"record {id[:12]}: {error}")
        if known is not None and set(known) == set(rows):
            return Repair(tuple(rows), tuple(unusable), None)
        damaged = store.index.set_aside()
        store.index.create(rows)
    return Repair(tuple(rows), tuple(unusable), damaged)


def _readable_rows(store: Store) -> list[Row] | None:
    """The rows of the index, or None if it is damaged or missing."""
    try:
        store.index.check()
        return store.index.all()
    except DamagedIndex:
        return None


def _read_row(store: Store, id: str, source: Origin) -> Row:
    """The row of the record whose provenance has the hash ``id``."""
    provenance = Provenance.from_bytes(store.artefacts.get(id, JSON), "its provenance")
    if not provenance.verified.safe:
        raise BadStore("its verification record does not say safe")
    for sha256, suffix in provenance.files():
        store.artefacts.get(sha256, suffix)
    return make_row(id, provenance, source)
