"""The store: optimised cubins with their originals, and records that say where they may be used."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import ContractBroken
from nostall.store.artefacts import CUBIN, JSON, RECIPE, Artefacts, content_hash
from nostall.store.errors import BadStore, cannot_write
from nostall.store.folder import home
from nostall.store.index import Index
from nostall.store.provenance import Provenance
from nostall.store.row import Origin, Row

_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True)
class Contents:
    """Contents of the files of one record."""

    original: bytes
    optimised: bytes
    provenance: Provenance
    recipe: bytes | None = None
    """How the optimised cubin was made, if not by moving the original's instructions."""

    def check(self) -> None:
        """Raise :class:`ContractBroken` if the provenance names other files or is not safe."""
        recipe = content_hash(self.recipe) if self.recipe is not None else None
        hashes = (content_hash(self.original), content_hash(self.optimised), recipe)
        named = (self.provenance.original, self.provenance.optimised, self.provenance.recipe)
        if named != hashes:
            raise ContractBroken("the provenance names other files than those to be recorded")
        if not self.provenance.verified.safe:
            raise ContractBroken("the verifier refused this cubin; only safe ones are recorded")

    def files(self) -> list[tuple[bytes, str]]:
        """(content, suffix) of each file; the provenance is the last one."""
        recipe = [(self.recipe, RECIPE)] if self.recipe is not None else []
        return [
            (self.original, CUBIN),
            (self.optimised, CUBIN),
            *recipe,
            (self.provenance.to_bytes(), JSON),
        ]


@dataclass(frozen=True)
class StoredCubin:
    """An optimised cubin that may be used in place of its original."""

    row: Row
    data: bytes
    path: Path
    dependent: bool = False
    """Whether it must be launched with the attribute of programmatic dependent launch to gain; it
    is correct without it as well."""


@dataclass(frozen=True)
class Lookup:
    """Result of a look-up of one original."""

    cubin: StoredCubin | None
    """The optimised cubin to use, or None."""
    rejections: tuple[str, ...] = ()
    """Why existing records were not used, one reason for each."""


class Store:
    """A folder of cubins and provenance files with an index.

    Writers exclude each other with a lock file, whose lock the operating system releases when a
    process ends.  Readers take no lock.  A record becomes visible when its row is added, after all
    of its files are on disk.
    """

    def __init__(self, root: Path | None = None) -> None:
        """``root``: the folder, by default :func:`~nostall.store.folder.home`."""
        self.root = root if root is not None else home()
        self.artefacts = Artefacts(self.root / "objects")
        self.index = Index(self.root / "index.sqlite", self.artefacts)

    def record(
        self,
        original: bytes,
        optimised: bytes,
        provenance: Provenance,
        source: Origin = "tuned",
        recipe: bytes | None = None,
    ) -> Row:
        """Store an optimised cubin beside its original; see :meth:`record_all`."""
        return self.record_all([Contents(original, optimised, provenance, recipe)], source)[0]

    def record_all(self, records: Iterable[Contents], source: Origin = "tuned") -> list[Row]:
        """Store several records; all become visible, or none.

        The records are taken one at a time.  Raises :class:`ContractBroken` if a provenance names
        other files or is not marked as safe.
        """
        written: list[tuple[str, str]] = []
        with self.locked():
            self.artefacts.sweep()
            self.index.ensure_exists()
            try:
                rows = [self._write_files(record, source, written) for record in records]
                self.index.add(rows)
            except BaseException:  # raised again; Ctrl-C, too, must leave no files behind
                with suppress(BadStore, OSError):  # the first error is the one to report
                    self._discard(written)
                raise
            self._collect()
        return rows

    def _write_files(self, record: Contents, source: Origin, written: list[tuple[str, str]]) -> Row:
        """Write the files of one record and return its row; notes the files in ``written``."""
        record.check()
        for data, suffix in record.files():
            written.append((self.artefacts.put(data, suffix), suffix))
        return make_row(written[-1][0], record.provenance, source)

    def lookup(
        self,
        original: bytes,
        *,
        architecture: str | None = None,
        gpu: str | None = None,
        kernel: str | None = None,
        modelled: bool = False,
        dependent: bool = False,
    ) -> Lookup:
        """Find the best optimised cubin for an original.

        ``architecture`` (such as ``sm_90``) and ``kernel`` restrict the records if given.  ``gpu``
        is the name of the GPU: a measured record is used only on the GPU it was measured on, so
        without ``gpu`` none is.  ``modelled`` also allows records that were never measured.
        ``dependent`` also allows records for dependent launches, and prefers them: each was faster
        in chains than the other results of its search.  Records of this machine's own searches come
        before imported and repaired ones.  The caller must then launch a cubin with
        ``dependent`` set with that attribute.
        """
        rejections: list[str] = []
        plain: StoredCubin | None = None
        for row in self.index.find_original(content_hash(original)):
            if plain is not None and plain.row.source == "tuned" and row.source != "tuned":
                break  # another machine's claim is no reason to leave what was measured here
            reason = _rejection_reason(row, architecture, gpu, kernel, modelled)
            if reason is None:
                try:
                    found = self._load_checked(row)
                except BadStore as error:
                    reason = str(error)
                else:
                    if found.dependent == dependent:
                        return Lookup(found, tuple(rejections))
                    if found.dependent:
                        reason = "it is for dependent launches, which this place cannot make"
                    else:
                        plain = plain or found
                        continue
            rejections.append(f"record {row.id[:12]}: {reason}")
        return Lookup(plain, tuple(rejections))

    def rows(self) -> list[Row]:
        """All records, oldest first."""
        return self.index.all()

    def find(self, prefix: str) -> list[Row]:
        """The records whose id or original starts with ``prefix``.

        Raises :class:`BadStore` if there is none.
        """
        rows = self.index.find_prefix(prefix.lower()) if prefix else []
        if not rows:
            raise BadStore(
                f"the store at {self.root} has no record {prefix!r}; see `nostall store ls`"
            )
        return rows

    def provenance(self, row: Row) -> Provenance:
        """The provenance of a record.

        Raises :class:`BadStore` if the file is missing or damaged, or differs from the row.
        """
        data = self.artefacts.get(row.id, JSON)
        provenance = Provenance.from_bytes(data, f"provenance {row.id[:12]}")
        if make_row(row.id, provenance, row.source) != row:
            raise BadStore(
                f"the index and the provenance {row.id[:12]} disagree; remove the record"
            )
        return provenance

    def contents(self, row: Row) -> Contents:
        """The contents of a record's files.

        Raises :class:`BadStore` if a file is missing or damaged.
        """
        provenance = self.provenance(row)
        recipe = provenance.recipe
        return Contents(
            self.artefacts.get(row.original, CUBIN),
            self.artefacts.get(row.optimised, CUBIN),
            provenance,
            self.artefacts.get(recipe, RECIPE) if recipe is not None else None,
        )

    def remove(self, row: Row) -> None:
        """Remove a record, and those of its files that no other record needs.

        On a full disk the files go first, because the index needs space for the change.
        """
        files = [(row.id, JSON), (row.original, CUBIN), (row.optimised, CUBIN)]
        if recipe := self._recipe(row):
            files.append((recipe, RECIPE))
        with self.locked():
            try:
                self.index.remove(row.id)
            except BadStore:
                self._discard(files, removed=row.id)
                self.index.remove(row.id)
            self._discard(files)
            self._collect()

    def _discard(self, files: Iterable[tuple[str, str]], removed: str | None = None) -> None:
        """Delete those of the files (hash, suffix) that no record but ``removed`` needs."""
        needed = self._referenced(removed)
        for sha256, suffix in files:
            if sha256 not in needed:
                self.artefacts.remove(sha256, suffix)

    def _collect(self) -> None:
        """Delete the remains of killed writers: temporary files, and files that no record names."""
        self.artefacts.sweep()
        with suppress(BadStore):  # the remains stay until the index can be read
            self.artefacts.collect(self._referenced())

    def _referenced(self, removed: str | None = None) -> Collection[str]:
        """The hashes of the files of all records but ``removed``."""
        rows = [row for row in self.index.all() if row.id != removed]
        hashes = {hash for row in rows for hash in (row.id, row.original, row.optimised)}
        if next(self.artefacts.names(RECIPE), None) is not None:
            hashes.update(recipe for row in rows if (recipe := self._recipe(row)))
        return hashes

    def _recipe(self, row: Row) -> str | None:
        """The hash of a record's recipe; None if it has none, or if its provenance is damaged."""
        try:
            return self.provenance(row).recipe
        except BadStore:
            return None

    def is_optimised(self, data: bytes) -> bool:
        """Whether ``data`` is an optimised cubin of this store."""
        return self.index.has_optimised(content_hash(data))

    def _load_checked(self, row: Row) -> StoredCubin:
        """Load the optimised cubin of a record.

        Raises :class:`BadStore` if a hash is wrong or the verification record does not say safe.
        """
        provenance = self.provenance(row)
        if not provenance.verified.safe:
            raise BadStore("its verification record does not say safe")
        data = self.artefacts.get(row.optimised, CUBIN)
        path = self.artefacts.path(row.optimised, CUBIN)
        return StoredCubin(row, data, path, provenance.dependent_launch)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the writers' lock."""
        path = self.root / "lock"
        try:
            self.artefacts.root.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, _LOCK_FLAGS, 0o666)
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def make_row(id: str, provenance: Provenance, source: Origin) -> Row:
    comparison = provenance.comparison
    return Row(
        id=id,
        original=provenance.original,
        optimised=provenance.optimised,
        kernel=provenance.kernel,
        architecture=provenance.architecture,
        kind=provenance.kind,
        gpu=provenance.gpu,
        ratio=provenance.ratio,
        low=comparison.low if comparison is not None else provenance.ratio,
        created=provenance.created,
        source=source,
    )


def _rejection_reason(
    row: Row, architecture: str | None, gpu: str | None, kernel: str | None, modelled: bool
) -> str | None:
    """Why a record cannot be used for this look-up, or None if it can."""
    if kernel is not None and row.kernel != kernel:
        return f"it is for kernel {row.kernel!r}, not {kernel!r}"
    if architecture is not None and row.architecture != architecture:
        return f"it is for {row.architecture}, not {architecture}"
    if row.kind == "modelled":
        return None if modelled else "its gain is only modelled"
    if row.gpu != gpu:
        unknown = "the current GPU is unknown: create a CUDA context first, or set NOSTALL_GPU"
        return f"it was measured on {row.gpu}; {f'this is {gpu}' if gpu else unknown}"
    return None
