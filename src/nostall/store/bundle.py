"""Deployment bundles: records of a store in one zip file, for machines with the same GPU.

A bundle holds ``manifest.json`` and the files ``<sha256>.cubin`` and ``<sha256>.json``.  No member
is extracted to a path named in the bundle, and each is checked against its hash.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from nostall.core.errors import BadRun
from nostall.core.files import write_atomically
from nostall.core.launch import StrictModel
from nostall.store.artefacts import content_hash
from nostall.store.errors import BadBundle, BadStore
from nostall.store.index import Row
from nostall.store.provenance import Provenance, Sha256
from nostall.store.store import CUBIN, JSON, Store

MAX_MEMBER_BYTES = 256 << 20
"""Uncompressed size allowed for one member of a bundle."""
_MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time stamp of all members: the earliest that a zip file can have."""


class Manifest(StrictModel):
    """Content of ``manifest.json``."""

    format: Literal["nostall bundle"] = "nostall bundle"
    schema_version: Literal[1] = 1
    records: tuple[Sha256, ...]
    """Ids of the records: sha256 of their provenance files."""


@dataclass(frozen=True)
class BundledRecord:
    """One record of a bundle; all hashes are checked."""

    id: str
    provenance: Provenance
    original: bytes
    optimised: bytes


def write(store: Store, rows: Sequence[Row], path: Path) -> None:
    """Write records to a bundle; the same records give the same bytes.

    Raises :class:`BadStore` if there are no records or one is damaged, and :class:`BadBundle` if
    the bundle cannot be written.
    """
    if not rows:
        raise BadStore(f"the store at {store.root} has nothing to export; see `store ls`")
    files: dict[str, bytes] = {}
    for row in rows:
        store.provenance(row)
        files[f"{row.id}.{JSON}"] = store.artefacts.get(row.id, JSON)
        for sha256 in (row.original, row.optimised):
            files[f"{sha256}.{CUBIN}"] = store.artefacts.get(sha256, CUBIN)
    manifest = Manifest(records=tuple(sorted(row.id for row in rows)))
    try:
        write_atomically(path, _zip({_MANIFEST: manifest.model_dump_json().encode(), **files}))
    except BadRun as error:
        raise BadBundle(str(error)) from error


def read(path: Path) -> list[BundledRecord]:
    """Read all records of a bundle.

    Raises :class:`BadBundle` if the file cannot be read, is damaged or was changed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = Manifest.model_validate_json(_read_member(archive, path, _MANIFEST))
            return [_read_record(archive, path, id) for id in manifest.records]
    except OSError as error:
        raise BadBundle(f"cannot read bundle {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, UnicodeError, NotImplementedError, EOFError, zlib.error) as error:
        raise BadBundle(
            f"{path} is not a bundle, or is damaged ({error}); `nostall store export` makes one"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the manifest"
        raise BadBundle(
            f"bundle {path}: {field}: {first['msg']}; export it anew with this version of nostall"
        ) from error


def _read_record(archive: zipfile.ZipFile, path: Path, id: str) -> BundledRecord:
    raw = _read_hashed(archive, path, id, JSON)
    try:
        provenance = Provenance.from_bytes(raw, f"provenance {id[:12]}")
    except BadStore as error:
        raise BadBundle(f"bundle {path}: {error}") from error
    return BundledRecord(
        id,
        provenance,
        _read_hashed(archive, path, provenance.original, CUBIN),
        _read_hashed(archive, path, provenance.optimised, CUBIN),
    )


def _read_hashed(archive: zipfile.ZipFile, path: Path, sha256: str, suffix: str) -> bytes:
    """Read a member that is named by its hash."""
    data = _read_member(archive, path, f"{sha256}.{suffix}")
    if content_hash(data) != sha256:
        raise BadBundle(
            f"bundle {path} was changed: {sha256[:12]}.{suffix} has hash "
            f"{content_hash(data)[:12]}; copy or export it again"
        )
    return data


def _read_member(archive: zipfile.ZipFile, path: Path, member: str) -> bytes:
    try:
        info = archive.getinfo(member)
    except KeyError:
        raise BadBundle(
            f"bundle {path} lacks {member}; export it again with `nostall store export`"
        ) from None
    allowed = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    is_encrypted = info.flag_bits & 1
    if info.file_size > MAX_MEMBER_BYTES or is_encrypted or info.compress_type not in allowed:
        raise BadBundle(
            f"bundle {path}: {member} claims {info.file_size} bytes, or is encrypted, or has an "
            f"unusual compression; allowed are {MAX_MEMBER_BYTES} bytes, stored or deflated; "
            "export it again"
        )
    return archive.read(info)


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in sorted(files):
            archive.writestr(zipfile.ZipInfo(member, _EPOCH), files[member], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
