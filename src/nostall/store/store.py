"""What was found, kept for good: originals, optimised cubins, and why they may be trusted."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import ContractBroken
from nostall.store.artefacts import Artefacts, name
from nostall.store.errors import BadStore
from nostall.store.folder import home
from nostall.store.index import Index, Origin, Row
from nostall.store.provenance import Provenance

CUBIN, JSON = "cubin", "json"


@dataclass(frozen=True)
class Found:
    """An optimised cubin that may be used in place of its original."""

    row: Row
    data: bytes
    path: Path


@dataclass(frozen=True)
class Lookup:
    """The answer for one original.  ``found`` is None when there is nothing to use; ``refused``
    says why records that do exist were passed over."""

    found: Found | None
    refused: tuple[str, ...] = ()


class Store:
    """A folder of cubins and provenance files with an index.

    Writers take turns by a lock file, which the kernel releases when a process dies; readers never
    wait for them.  A record becomes visible with its row, after all its files are on disk.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else home()
        self.artefacts = Artefacts(self.root / "objects")
        self.index = Index(self.root / "index.sqlite")

    def record(
        self, original: bytes, optimised: bytes, provenance: Provenance, source: Origin = "tuned"
    ) -> Row:
        """Keep an optimised cubin beside its original; see :meth:`record_all`."""
        return self.record_all([(original, optimised, provenance)], source)[0]

    def record_all(
        self, found: Sequence[tuple[bytes, bytes, Provenance]], source: Origin = "tuned"
    ) -> list[Row]:
        """Keep several (original, optimised, provenance); all of them become visible, or none.

        Raises :class:`ContractBroken` when a provenance is about other bytes or says that they
        are not safe.
        """
        for original, optimised, known in found:
            if (known.original, known.optimised) != (name(original), name(optimised)):
                raise ContractBroken("the provenance names other cubins than those to be recorded")
            if not known.verified.safe:
                raise ContractBroken("the verifier refused this cubin; only safe ones are recorded")
        with self._turn():
            self.artefacts.sweep()
            rows = [self._put(*one, source) for one in found]
            self.index.add(rows)
        return rows

    def _put(self, original: bytes, optimised: bytes, known: Provenance, source: Origin) -> Row:
        """Write the files of one record; its row."""
        self.artefacts.put(original, CUBIN)
        self.artefacts.put(optimised, CUBIN)
        return _row(self.artefacts.put(known.to_bytes(), JSON), known, source)

    def lookup(
        self,
        original: bytes,
        *,
        architecture: str | None = None,
        gpu: str | None = None,
        kernel: str | None = None,
        modelled: bool = False,
    ) -> Lookup:
        """What may be used in place of these exact bytes, on this GPU.

        ``architecture`` (such as ``sm_90``) and ``kernel`` narrow the choice where given.  Measured
        records need the GPU they were measured on, so without ``gpu`` there are none; modelled ones
        are considered only with ``modelled``.
        """
        refused: list[str] = []
        for row in self.index.of_original(name(original)):
            reason = _unfit(row, architecture, gpu, kernel, modelled)
            if reason is None:
                try:
                    return Lookup(self._trusted(row), tuple(refused))
                except BadStore as error:
                    reason = str(error)
            refused.append(f"record {row.id[:12]}: {reason}")
        return Lookup(None, tuple(refused))

    def rows(self) -> list[Row]:
        """All records, oldest first."""
        return self.index.all()

    def find(self, prefix: str) -> list[Row]:
        """The records whose id or original starts with ``prefix``; at least one."""
        rows = self.index.starting_with(prefix.lower()) if prefix else []
        if not rows:
            raise BadStore(f"the store at {self.root} has no record {prefix!r}; see `store ls`")
        return rows

    def provenance(self, row: Row) -> Provenance:
        """Everything known about a record; :class:`BadStore` when it does not fit its row."""
        data = self.artefacts.get(row.id, JSON)
        found = Provenance.from_bytes(data, f"provenance {row.id[:12]}")
        if _row(row.id, found, row.source) != row:
            raise BadStore(f"the index does not say what provenance {row.id[:12]} says; remove it")
        return found

    def remove(self, row: Row) -> None:
        """Take a record away, and the files that no other record needs."""
        with self._turn():
            self.index.remove(row.id)
            self.artefacts.remove(row.id, JSON)
            for sha256 in (row.original, row.optimised):
                if not self.index.uses(sha256):
                    self.artefacts.remove(sha256, CUBIN)

    def made(self, data: bytes) -> bool:
        """Whether these bytes are an optimised cubin of this store."""
        sha256 = name(data)
        return any(row.optimised == sha256 for row in self.rows())

    def _trusted(self, row: Row) -> Found:
        """The optimised bytes, after every hash and the verification record were looked at."""
        if not self.provenance(row).verified.safe:
            raise BadStore("its verification record does not say safe")
        data = self.artefacts.get(row.optimised, CUBIN)
        return Found(row, data, self.artefacts.path(row.optimised, CUBIN))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other process writes."""
        try:
            self.artefacts.root.mkdir(parents=True, exist_ok=True)
            lock = (self.root / "lock").open("w")
        except OSError as error:
            raise BadStore(
                f"cannot write to the store at {self.root}: {error.strerror}; set NOSTALL_HOME to "
                "a writable folder"
            ) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _row(id: str, provenance: Provenance, source: Origin) -> Row:
    compared = provenance.comparison
    return Row(
        id=id,
        original=provenance.original,
        optimised=provenance.optimised,
        kernel=provenance.kernel,
        architecture=provenance.architecture,
        kind=provenance.kind,
        gpu=provenance.gpu,
        ratio=provenance.ratio,
        low=compared.low if compared is not None else provenance.ratio,
        created=provenance.created,
        source=source,
    )


def _unfit(
    row: Row, architecture: str | None, gpu: str | None, kernel: str | None, modelled: bool
) -> str | None:
    """Why a record is not for this use, or None."""
    if kernel is not None and row.kernel != kernel:
        return f"it is for kernel {row.kernel!r}, not {kernel!r}"
    if architecture is not None and row.architecture != architecture:
        return f"it is for {row.architecture}, not {architecture}"
    if row.kind == "modelled":
        return None if modelled else "its gain is only modelled"
    if row.gpu != gpu:
        unknown = "which GPU this is, is not known: make a CUDA context first, or set NOSTALL_GPU"
        return f"it was measured on {row.gpu}; {f'this is {gpu}' if gpu else unknown}"
    return None
