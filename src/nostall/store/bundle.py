"""Deployment bundles: records of a store in one zip file, for machines with the same GPU.

A bundle holds ``manifest.json`` and the records' files, named ``<sha256>.<suffix>``.  No member
is extracted to a path named in the bundle, and each is checked against its hash.  Sizes are checked
before anything is unpacked, and records are read one at a time.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from nostall.core.files.atomic import replaced_file, write_remedy
from nostall.core.launch import StrictModel
from nostall.core.text.terminal import escape_controls
from nostall.store.artefacts import CUBIN, JSON, RECIPE, content_hash
from nostall.store.errors import BadBundle, BadStore
from nostall.store.provenance import Provenance, Sha256
from nostall.store.row import Row
from nostall.store.store import Contents, Store

MAX_RECORDS = 10_000
MAX_CUBIN_BYTES = 64 << 20
MAX_JSON_BYTES = 1 << 20
MAX_RECIPE_BYTES = 64 << 20
"""A recipe has the PTX of its kernel; PTX of whole libraries has megabytes."""
MAX_TOTAL_BYTES = 1 << 30
"""Uncompressed bytes of all records together; a file counts once for each record that names it."""
MAX_RATIO = 12
"""Uncompressed bytes per byte of the file.  Cubins of compilers have 3 to 6."""
FREE_BYTES = 1 << 20
"""Uncompressed bytes that a file of any size may hold."""
_STORED_RATIO = 8
"""A member that deflates better than this is stored uncompressed, so that bundles keep
:data:`MAX_RATIO`."""
_MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time stamp of all members: the earliest that a zip file can have."""


def _check_unique(ids: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(ids)) != len(ids):
        raise ValueError(f"{len(ids)} ids, {len(set(ids))} of them different; each may occur once")
    return ids


class Manifest(StrictModel):
    """Content of ``manifest.json``."""

    format: Literal["nostall bundle"] = "nostall bundle"
    schema_version: Literal[1] = 1
    records: Annotated[
        tuple[Sha256, ...], Field(max_length=MAX_RECORDS), AfterValidator(_check_unique)
    ]
    """Ids of the records: sha256 of their provenance files."""


@dataclass(frozen=True)
class BundledRecord:
    """One record of a bundle; all hashes are checked."""

    id: str
    provenance: Provenance
    original: bytes
    optimised: bytes
    recipe: bytes | None

    @property
    def contents(self) -> Contents:
        """The record as the store takes it."""
        return Contents(self.original, self.optimised, self.provenance, self.recipe)


@dataclass(frozen=True)
class Bundle:
    """A bundle file whose manifest and sizes are checked.

    Iteration reads one record at a time, and raises :class:`BadBundle` at the first one that is
    damaged or was changed.
    """

    path: Path
    ids: tuple[str, ...]
    """Ids of the records, each once."""

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[BundledRecord]:
        with _opened(self.path) as archive:
            for id in self.ids:
                yield _read_record(archive, self.path, id)


def write(store: Store, rows: Sequence[Row], path: Path) -> None:
    """Write records to a bundle; the same records give the same bytes.

    Raises :class:`BadStore` if there are no records or one is damaged, and :class:`BadBundle` if
    the bundle cannot be written or would be too large.
    """
    if not rows:
        raise BadStore(f"the store at {store.root} has nothing to export; see `nostall store ls`")
    members = sorted(
        {
            (sha256, suffix)
            for row in rows
            for sha256, suffix in ((row.id, JSON), *store.provenance(row).files())
        }
    )
    ids = tuple(sorted(row.id for row in rows))
    try:
        manifest = Manifest(records=ids)
        with replaced_file(path) as file:
            with zipfile.ZipFile(file, "w") as archive:
                _add(archive, _MANIFEST, manifest.model_dump_json().encode())
                for sha256, suffix in members:
                    _add(archive, f"{sha256}.{suffix}", store.artefacts.get(sha256, suffix))
            file.flush()
            _check_sizes(Path(file.name), ids)
    except OSError as error:
        raise BadBundle(f"cannot write {path}: {error.strerror}; {write_remedy(error)}") from error
    except (ValidationError, BadBundle, zipfile.LargeZipFile) as error:
        raise BadBundle(
            f"{len(rows)} records are too many or too large for one bundle; export fewer of them: "
            "`nostall store export FILE RECORD ...`"
        ) from error


def read(path: Path) -> Bundle:
    """Open a bundle.

    Raises :class:`BadBundle` if the file cannot be read, if its manifest is invalid, or if it would
    unpack to more than the limits of this module.
    """
    with _opened(path) as archive:
        raw = _read_member(archive, path, _MANIFEST, MAX_JSON_BYTES)
        ids = Manifest.model_validate_json(raw).records
    _check_sizes(path, ids)
    return Bundle(path, ids)


def _check_sizes(path: Path, ids: Sequence[str]) -> None:
    """Raise :class:`BadBundle` if the records unpack to too many bytes, before cubins are read."""
    with _opened(path) as archive:
        allowed = min(MAX_TOTAL_BYTES, FREE_BYTES + MAX_RATIO * path.stat().st_size)
        # The JSON files name the cubins, so their sizes come first.
        _check_total(path, sum(_size(archive, path, f"{id}.{JSON}") for id in ids), allowed)
        seen: set[str] = set()
        unpacked = to_read = 0
        for id in ids:
            provenance = _read_provenance(archive, path, id)
            for sha256, suffix in provenance.files():
                size = _size(archive, path, f"{sha256}.{suffix}")
                unpacked += 0 if sha256 in seen else size
                to_read += size
                seen.add(sha256)
            _check_total(path, unpacked, allowed)
            _check_total(path, to_read, MAX_TOTAL_BYTES)


def _check_total(path: Path, total: int, allowed: int) -> None:
    if total > allowed:
        raise BadBundle(
            f"bundle {path} would unpack to {total} bytes; allowed are {allowed} for a file of "
            f"{path.stat().st_size} bytes, so it is not a bundle of `nostall store export`"
        )


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive; errors of the file system and of the format become :class:`BadBundle`."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except OSError as error:
        raise BadBundle(
            f"cannot read bundle {path}: {error.strerror or error}; `nostall store export` writes "
            "one"
        ) from error
    except (zipfile.BadZipFile, UnicodeError, NotImplementedError, EOFError, zlib.error) as error:
        raise BadBundle(
            f"{path} is not a bundle, or is damaged ({error}); `nostall store export` makes one"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the manifest"
        raise BadBundle(
            f"bundle {path}: {escape_controls(field)}: {first['msg']}; export it anew with this "
            "version of nostall"
        ) from error


def _read_record(archive: zipfile.ZipFile, path: Path, id: str) -> BundledRecord:
    provenance = _read_provenance(archive, path, id)
    recipe = provenance.recipe
    return BundledRecord(
        id,
        provenance,
        _read_hashed(archive, path, provenance.original, CUBIN),
        _read_hashed(archive, path, provenance.optimised, CUBIN),
        None if recipe is None else _read_hashed(archive, path, recipe, RECIPE),
    )


def _read_provenance(archive: zipfile.ZipFile, path: Path, id: str) -> Provenance:
    raw = _read_hashed(archive, path, id, JSON)
    try:
        return Provenance.from_bytes(raw, f"provenance {id[:12]}")
    except BadStore as error:
        raise BadBundle(f"bundle {path}: {error}") from error


def _read_hashed(archive: zipfile.ZipFile, path: Path, sha256: str, suffix: str) -> bytes:
    """Read a member that is named by its hash."""
    limits = {JSON: MAX_JSON_BYTES, CUBIN: MAX_CUBIN_BYTES, RECIPE: MAX_RECIPE_BYTES}
    data = _read_member(archive, path, f"{sha256}.{suffix}", limits[suffix])
    if content_hash(data) != sha256:
        raise BadBundle(
            f"bundle {path} was changed: {sha256[:12]}.{suffix} has hash "
            f"{content_hash(data)[:12]}; copy or export it again"
        )
    return data


def _read_member(archive: zipfile.ZipFile, path: Path, member: str, limit: int) -> bytes:
    info = _info(archive, path, member)
    allowed = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    is_encrypted = info.flag_bits & 1
    if info.file_size > limit or is_encrypted or info.compress_type not in allowed:
        raise BadBundle(
            f"bundle {path}: {member} claims {info.file_size} bytes, or is encrypted, or has an "
            f"unusual compression; allowed are {limit} bytes, stored or deflated; export it again"
        )
    return archive.read(info)


def _size(archive: zipfile.ZipFile, path: Path, member: str) -> int:
    """The uncompressed bytes of a member, as the archive claims; reading stops there."""
    return _info(archive, path, member).file_size


def _info(archive: zipfile.ZipFile, path: Path, member: str) -> zipfile.ZipInfo:
    try:
        return archive.getinfo(member)
    except KeyError:
        raise BadBundle(
            f"bundle {path} lacks {member}; export it again with `nostall store export`"
        ) from None


def _add(archive: zipfile.ZipFile, member: str, data: bytes) -> None:
    deflates_too_well = len(zlib.compress(data)) * _STORED_RATIO < len(data)
    method = zipfile.ZIP_STORED if deflates_too_well else zipfile.ZIP_DEFLATED
    archive.writestr(zipfile.ZipInfo(member, _EPOCH), data, method)
