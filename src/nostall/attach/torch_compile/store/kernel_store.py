"""The backend's folder in the store: kernels, and one JSON file for each cached result.

A kernel is named by the sha256 of its record, so its name is valid in every process and on every
machine.  Other records are named by a hash of everything that they depend on.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

import nostall.attach.torch_compile
import nostall.fusion
from nostall.attach.torch_compile.store.records import (
    BinariesRecord,
    KernelComparisonRecord,
    KernelRecord,
    Record,
    RegionRecord,
    SelectionRecord,
)
from nostall.store.artefacts import Artefacts, content_hash
from nostall.store.errors import BadStore
from nostall.store.folder import home
from nostall.store.result_files import write_result_file

if TYPE_CHECKING:
    from nostall.fusion.codegen.emit.program import Program
    from nostall.fusion.lists.kernel import ListKernel

SOURCE_SUFFIX, RECORD_SUFFIX = "py", "json"
StoredResult = TypeVar(
    "StoredResult", RegionRecord, SelectionRecord, KernelComparisonRecord, BinariesRecord
)
FOLDERS: dict[type[Record], str] = {
    RegionRecord: "regions",
    SelectionRecord: "choices",
    KernelComparisonRecord: "duels",
    BinariesRecord: "binaries",
}
"""Folder of each type of cached result."""


class KernelStore:
    """The backend's records, by default in the folder that ``NOSTALL_HOME`` names."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else home() / "fusion"
        self.artefacts = Artefacts(self.folder)

    @property
    def identity(self) -> str:
        """A random name of this folder, constant until the folder is emptied.

        It is part of PyTorch's cache keys: compiled graphs there call kernels by name, so they are
        useless if the folder with these kernels is gone.
        """
        path = self.folder / "identity"
        with suppress(OSError):
            return path.read_text()
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".identity.{os.getpid()}"
        temporary.write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):  # another process was faster
            path.hardlink_to(temporary)
        temporary.unlink()
        return path.read_text()

    def put(self, program: Program | ListKernel) -> str:
        """Write a program's source and record; returns the kernel's name."""
        self.artefacts.put(program.source.encode(), SOURCE_SUFFIX)
        return self.artefacts.put(KernelRecord.from_program(program).json, RECORD_SUFFIX)

    def load_kernel(self, kernel: str) -> tuple[KernelRecord, str]:
        """Record and source of a kernel.

        Raises :class:`BadStore` if a file is missing, was changed, or has another schema.
        """
        try:
            record = KernelRecord.read(self.artefacts.get(kernel, RECORD_SUFFIX))
        except msgspec.DecodeError as error:
            raise BadStore(
                f"kernel {kernel[:12]} was written by another version of nostall; empty the store, "
                "or set NOSTALL_HOME to another folder"
            ) from error
        return record, self.artefacts.get(record.source, SOURCE_SUFFIX).decode()

    def export_kernel(self, kernel: str) -> tuple[str, str]:
        """JSON record and source of a kernel, for :meth:`import_kernel` of another store."""
        _, source = self.load_kernel(kernel)
        return self.artefacts.get(kernel, RECORD_SUFFIX).decode(), source

    def import_kernel(self, record: str, source: str) -> None:
        """Write a kernel that another store exported."""
        self.artefacts.put(source.encode(), SOURCE_SUFFIX)
        self.artefacts.put(record.encode(), RECORD_SUFFIX)

    def load(self, kind: type[StoredResult], key: str) -> StoredResult | None:
        """The cached result under a key; None if there is none that matches the schema."""
        try:
            return kind.read(self._path(kind, key).read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def save(
        self,
        key: str,
        record: RegionRecord | SelectionRecord | KernelComparisonRecord | BinariesRecord,
    ) -> None:
        """Write a cached result atomically.  Raises :class:`BadStore` if that is not possible."""
        write_result_file(self._path(type(record), key), msgspec.json.format(record.json, indent=1))

    def _path(self, kind: type[Record], key: str) -> Path:
        return self.folder / FOLDERS[kind] / f"{key}.json"


@cache
def code_version() -> str:
    """sha256 over all source files of :mod:`nostall.fusion` and of this backend.

    It is part of the keys of all cached results, so a change of the code invalidates them.
    """
    digest = hashlib.sha256()
    for folder in (*nostall.fusion.__path__, *nostall.attach.torch_compile.__path__):
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(
                f"{file.relative_to(folder)} {content_hash(file.read_bytes())}\n".encode()
            )
    return digest.hexdigest()
