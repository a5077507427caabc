"""Triton cache manager that answers with optimised cubins from the store.

Triton passes every compiled file to its cache manager, and reads the file from the path that the
manager returns.  This manager writes to Triton's cache exactly what Triton's own manager would
write (original files and their paths).  Only the path it *returns* may be that of an optimised
cubin, or, for dependent launches, that of metadata that say so.  So runs without nostall, before or
after, see an unchanged cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import FileCacheManager

from nostall.attach.process_folder import process_folder
from nostall.attach.store_lookup import check_triton_version, find_replacement
from nostall.store.artefacts import Artefacts

_SUFFIX = ".cubin"
_GROUP = "__grp__"
"""Start of the names of Triton's lists of files."""


class StoreCacheManager(FileCacheManager):  # type: ignore[misc]  # Triton is not typed for mypy here
    """A :class:`FileCacheManager` that returns the store's path of an optimised cubin, if any.

    Triton's dump and override folders are left as they are.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        is_user_folder = override or dump
        self._attached = not is_user_folder and check_triton_version(str(triton.__version__))
        self._dependent = False
        """Whether the cubin that was returned is for dependent launches."""
        self._originals: dict[str, str] = {}
        """Paths of originals by file name, for which the store's path was returned."""

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path = str(super().put(data, filename, binary))
        if isinstance(data, bytes):
            return self._replacement_path(filename, path, data)
        return self._metadata_path(filename, path) if isinstance(data, str) else path

    def get_group(self, filename: str) -> dict[str, str] | None:
        group: dict[str, str] | None = super().get_group(filename)
        if group is None or not self._attached:
            return group
        cubins_first = sorted(group.items(), key=lambda item: not item[0].endswith(_SUFFIX))
        found = {name: self._cached_path(name, path) for name, path in cubins_first}
        return {name: self._metadata_path(name, found[name]) for name in group}

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        originals = {name: self._originals.get(name, path) for name, path in group.items()}
        return str(super().put_group(filename, originals))

    def _cached_path(self, name: str, path: str) -> str:
        """As :meth:`_replacement_path`, for a file that is in Triton's cache."""
        if not name.endswith(_SUFFIX):
            return path
        try:
            data = Path(path).read_bytes()
        except OSError:
            return path  # Triton reports the missing file
        return self._replacement_path(name, path, data)

    def _replacement_path(self, name: str, path: str, data: bytes) -> str:
        """The path of the store's replacement of ``data``, or ``path`` if there is none."""
        if not self._attached or not name.endswith(_SUFFIX):
            return path
        cubin = find_replacement(data, "triton cache", dependent=True)
        if cubin is None:
            return path
        self._dependent = cubin.dependent
        self._originals[name] = path
        return str(cubin.path)

    def _metadata_path(self, name: str, path: str) -> str:
        """The path of metadata for dependent launches, if the returned cubin is for these.

        Triton puts the cubin before the metadata.
        """
        if not self._dependent or not name.endswith(".json") or name.startswith(_GROUP):
            return path
        try:
            metadata = json.loads(Path(path).read_text())
        except (OSError, ValueError):
            return path  # Triton reports it
        if not isinstance(metadata, dict) or "launch_pdl" not in metadata:
            return path
        text = json.dumps({**metadata, "launch_pdl": True})
        self._originals[name] = path
        return str(Artefacts(process_folder()).file(text.encode(), "json"))
