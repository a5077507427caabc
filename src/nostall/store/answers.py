"""Answers beside the artefacts: one JSON file for each question that need not be asked again."""

from __future__ import annotations

from pathlib import Path

from nostall.core.files import write_atomically
from nostall.store.errors import BadStore


def keep_answer(place: Path, text: bytes) -> None:
    """Write an answer down; it appears whole or not at all.  Raises :class:`BadStore`."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadStore(
            f"cannot write {place}: {error.strerror}; set NOSTALL_HOME to a writable folder"
        ) from error
    write_atomically(place, text + b"\n")
