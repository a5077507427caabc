"""The backend's part of the store.

A kernel is named by the sha256 of its record, so a name means the same in every process and on
every machine; regions and choices are named by what they are an answer to.
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
    ChoiceRecord,
    DuelRecord,
    KernelRecord,
    Record,
    RegionRecord,
)
from nostall.store.answers import keep_answer
from nostall.store.artefacts import Artefacts, name
from nostall.store.errors import BadStore
from nostall.store.folder import home

if TYPE_CHECKING:
    from nostall.fusion.codegen.emit.program import Program

SOURCE, JSON = "py", "json"
Answer = TypeVar("Answer", RegionRecord, ChoiceRecord, DuelRecord, BinariesRecord)
SORTS: dict[type[Record], str] = {
    RegionRecord: "regions",
    ChoiceRecord: "choices",
    DuelRecord: "duels",
    BinariesRecord: "binaries",
}
"""Folders of answers."""


class Kept:
    """The backend's part of the store, by default that of ``NOSTALL_HOME``."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else home() / "fusion"
        self.artefacts = Artefacts(self.folder)

    @property
    def identity(self) -> str:
        """A name that this folder has as long as it is not emptied.

        Compiled graphs that others keep (PyTorch's caches) call kernels by name: they are worth
        nothing beside another folder.
        """
        path = self.folder / "identity"
        with suppress(OSError):
            return path.read_text()
        self.folder.mkdir(parents=True, exist_ok=True)
        mine = self.folder / f".identity.{os.getpid()}"
        mine.write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):
            path.hardlink_to(mine)
        mine.unlink()
        return path.read_text()

    def put(self, program: Program) -> str:
        """Keep a program; the name of its record."""
        self.artefacts.put(program.source.encode(), SOURCE)
        return self.artefacts.put(KernelRecord.of(program).json, JSON)

    def kernel(self, kernel: str) -> tuple[KernelRecord, str]:
        """The record of this name and the source; :class:`BadStore` where one is missing or was
        changed."""
        try:
            record = KernelRecord.read(self.artefacts.get(kernel, JSON))
        except msgspec.DecodeError as error:
            raise BadStore(
                f"kernel {kernel[:12]} is of another version of nostall; empty the store, or set "
                "NOSTALL_HOME to another folder"
            ) from error
        return record, self.artefacts.get(record.source, SOURCE).decode()

    def written(self, kernel: str) -> tuple[str, str]:
        """The record of this name as it is written, and the source: for another store."""
        _, source = self.kernel(kernel)
        return self.artefacts.get(kernel, JSON).decode(), source

    def take(self, record: str, source: str) -> None:
        """What another store has :meth:`written`."""
        self.artefacts.put(source.encode(), SOURCE)
        self.artefacts.put(record.encode(), JSON)

    def answer(self, kind: type[Answer], key: str) -> Answer | None:
        """What is kept under a key; None where there is nothing that this version understands."""
        try:
            return kind.read(self._place(kind, key).read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def keep(
        self, key: str, record: RegionRecord | ChoiceRecord | DuelRecord | BinariesRecord
    ) -> None:
        """Write an answer down; it appears whole or not at all."""
        keep_answer(self._place(type(record), key), msgspec.json.format(record.json, indent=1))

    def _place(self, kind: type[Record], key: str) -> Path:
        return self.folder / SORTS[kind] / f"{key}.json"


@cache
def code_version() -> str:
    """sha256 over the source of whatever decides what a region becomes."""
    found = hashlib.sha256()
    for folder in (*nostall.fusion.__path__, *nostall.attach.torch_compile.__path__):
        for file in sorted(Path(folder).rglob("*.py")):
            found.update(f"{file.relative_to(folder)} {name(file.read_bytes())}\n".encode())
    return found.hexdigest()
