"""Exchange measured records through a folder that a team shares, with signed bundles.

Each record is one file, ``GPU/ID.SIGNATURE.zip``: a bundle, named by the record's id and by the
HMAC-SHA256 of its bytes with the team's key.  Name and content appear at once, so readers on other
machines never see one without the other.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nostall.core import BadInput
from nostall.core.files.atomic import write_remedy
from nostall.store import BadBundle, BadStore, Row, Store, bundle
from nostall.tuning.records.store_records import import_bundle

MIN_KEY_BYTES = 32
_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})\.zip")
NEW_KEY = (
    "python -c 'import secrets; print(secrets.token_hex(32))' > team.key && chmod 600 team.key"
)


@dataclass
class Exchange:
    """What one synchronisation did."""

    sent: list[Row] = field(default_factory=list[Row])
    received: list[Row] = field(default_factory=list[Row])
    refused: list[tuple[Path, str]] = field(default_factory=list[tuple[Path, str]])
    """Files that were not imported, and why."""


def read_key(path: Path) -> bytes:
    """The key in a file.

    Raises :class:`BadInput` if it cannot be read, is short, or can be read by other users.
    """
    try:
        key = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise BadInput(f"cannot read the key {path}: {error.strerror}; {NEW_KEY}") from error
    if len(key) < MIN_KEY_BYTES:
        raise BadInput(
            f"the key {path} has {len(key)} bytes; at least {MIN_KEY_BYTES} are needed; {NEW_KEY}"
        )
    if mode & 0o077:
        raise BadInput(
            f"the key {path} can be read by other users (mode {mode & 0o777:03o}); chmod 600 {path}"
        )
    return key


def sync(store: Store, folder: Path, key: bytes, gpu: str | None = None) -> Exchange:
    """Write this machine's own measured records to ``folder``, and import those of others.

    ``gpu``: exchange only records that were measured on this GPU.  Imports are checked as
    :func:`import_bundle` does: by this machine's verifier, without issue distances measured on a
    GPU, whatever the record's search permitted.  A file whose signature is wrong is not opened.
    Raises :class:`BadInput` if ``folder`` cannot be read or written.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder; make it, or give the path of the shared one")
    exchange = Exchange()
    try:
        rows = [r for r in store.rows() if (r.source, r.kind) == ("tuned", "measured")]
        known = _sent(folder, key, {row.id for row in rows})
        for row in rows:
            if row.id not in known and gpu in (None, row.gpu):
                _send(store, row, folder, key)
                exchange.sent.append(row)
        present = {row.id for row in store.rows()}
        for match, path in _files(folder, gpu):
            if match[1] not in present:
                _receive(store, match, path, key, exchange)
    except OSError as error:
        raise BadInput(
            f"cannot use {folder}: {error.strerror or error}; {write_remedy(error)}"
        ) from error
    return exchange


def _files(folder: Path, gpu: str | None) -> Iterator[tuple[re.Match[str], Path]]:
    """The bundles in a shared folder, and what their names say."""
    for place in sorted(folder.iterdir()):
        if (place.is_dir() and gpu is None) or place.name == _folder_name(gpu or ""):
            for path in sorted(place.iterdir()):
                if match := _NAME.fullmatch(path.name):
                    yield match, path


def _sent(folder: Path, key: bytes, ids: set[str]) -> set[str]:
    """Those of ``ids`` that are in a shared folder, complete and signed with ``key``."""
    found: set[str] = set()
    for match, path in _files(folder, None):
        if match[1] in ids:
            with suppress(OSError):  # as good as absent
                if _is_signed(match, path.read_bytes(), key):
                    found.add(match[1])
    return found


def _folder_name(gpu: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-")


def _send(store: Store, row: Row, folder: Path, key: bytes) -> None:
    place = folder / _folder_name(row.gpu or "")
    place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sync-", dir=place) as private:
        path = Path(private, "bundle")
        bundle.write(store, [row], path)
        path.replace(place / f"{row.id}.{_sign(key, row.id, path.read_bytes())}.zip")


def _sign(key: bytes, id: str, data: bytes) -> str:
    return hmac.new(key, id.encode() + hashlib.sha256(data).digest(), "sha256").hexdigest()


def _is_signed(match: re.Match[str], data: bytes, key: bytes) -> bool:
    return hmac.compare_digest(_sign(key, match[1], data), match[2])


def _receive(
    store: Store, match: re.Match[str], path: Path, key: bytes, exchange: Exchange
) -> None:
    """Import one file, or note why not."""
    id = match[1]
    try:
        size = path.stat().st_size
        if size > bundle.MAX_TOTAL_BYTES:
            exchange.refused.append(
                (path, f"it has {size} bytes; {bundle.MAX_TOTAL_BYTES} are allowed")
            )
            return
        data = path.read_bytes()
    except OSError as error:  # of another user, or deleted at this moment
        exchange.refused.append((path, f"it cannot be read: {error.strerror}"))
        return
    if not _is_signed(match, data, key):
        exchange.refused.append((path, "its signature is not that of this key"))
        return
    with tempfile.TemporaryDirectory(prefix="nostall-") as private:
        copy = Path(private, path.name)
        copy.write_bytes(data)
        try:
            if bundle.read(copy).ids != (id,):
                raise BadBundle(f"{path.name} holds another record than its name says")
            exchange.received += import_bundle(store, copy)
        except (BadBundle, BadStore) as error:
            exchange.refused.append((path, str(error)))
