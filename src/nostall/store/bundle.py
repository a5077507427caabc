"""Deployment bundles: records of a store in one file, for another machine with the same GPU.

A bundle is a zip file with ``manifest.json`` and ``<sha256>.cubin`` / ``<sha256>.json`` beside it.
Nothing in it is unpacked by name, and nothing is believed that its hash does not confirm.
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
from nostall.core.launch import Strict
from nostall.store.artefacts import name
from nostall.store.errors import BadBundle, BadStore
from nostall.store.index import Row
from nostall.store.provenance import Provenance, Sha256
from nostall.store.store import CUBIN, JSON, Store

MOST_BYTES = 256 << 20
"""Bytes that one file of a bundle may have."""
_MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)


class Manifest(Strict):
    """The table of contents: provenance ids."""

    format: Literal["nostall bundle"] = "nostall bundle"
    schema_version: Literal[1] = 1
    records: tuple[Sha256, ...]


@dataclass(frozen=True)
class Packed:
    """One record of a bundle, its hashes checked."""

    id: str
    provenance: Provenance
    original: bytes
    optimised: bytes


def write(store: Store, rows: Sequence[Row], path: Path) -> None:
    """Pack records into one file; the same records give the same bytes."""
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
        write_atomically(path, _zipped({_MANIFEST: manifest.model_dump_json().encode(), **files}))
    except BadRun as error:
        raise BadBundle(str(error)) from error


def read(path: Path) -> list[Packed]:
    """All records of a bundle; every problem is a :class:`BadBundle`."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = Manifest.model_validate_json(_member(archive, path, _MANIFEST))
            return [_packed(archive, path, id) for id in manifest.records]
    except OSError as error:
        raise BadBundle(f"cannot read bundle {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, UnicodeError, NotImplementedError, EOFError, zlib.error) as error:
        raise BadBundle(
            f"{path} is not a bundle, or is damaged ({error}); `nostall store export` makes one"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the manifest"
        raise BadBundle(
            f"bundle {path}: {where}: {first['msg']}; export it anew with this version of nostall"
        ) from error


def _packed(archive: zipfile.ZipFile, path: Path, id: str) -> Packed:
    raw = _named(archive, path, id, JSON)
    try:
        provenance = Provenance.from_bytes(raw, f"provenance {id[:12]}")
    except BadStore as error:
        raise BadBundle(f"bundle {path}: {error}") from error
    return Packed(
        id,
        provenance,
        _named(archive, path, provenance.original, CUBIN),
        _named(archive, path, provenance.optimised, CUBIN),
    )


def _named(archive: zipfile.ZipFile, path: Path, sha256: str, suffix: str) -> bytes:
    """A member whose name is its hash."""
    data = _member(archive, path, f"{sha256}.{suffix}")
    if name(data) != sha256:
        raise BadBundle(
            f"bundle {path} was changed: {sha256[:12]}.{suffix} has hash {name(data)[:12]}; "
            "get it anew from where it was exported"
        )
    return data


def _member(archive: zipfile.ZipFile, path: Path, member: str) -> bytes:
    try:
        info = archive.getinfo(member)
    except KeyError:
        raise BadBundle(
            f"bundle {path} lacks {member}; `nostall store export` makes a whole one"
        ) from None
    packed_as = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if info.file_size > MOST_BYTES or info.flag_bits & 1 or info.compress_type not in packed_as:
        raise BadBundle(
            f"bundle {path}: {member} claims {info.file_size} bytes, or is encrypted, or packed in "
            f"an unusual way; at most {MOST_BYTES} bytes, stored or deflated; export it anew"
        )
    return archive.read(info)


def _zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in sorted(files):
            archive.writestr(zipfile.ZipInfo(member, _EPOCH), files[member], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
