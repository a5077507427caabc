"""Triton's cache manager switch: the whole process tree gets optimised cubins.

Triton hands every compiled file to its cache manager and reads it back from the path that the
manager answers.  This one keeps Triton's cache exactly as Triton itself would (originals, paths to
originals) and only *answers* with the store's path where the store has something better.  A run
without nostall, before or after, finds the same cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import FileCacheManager

from nostall.attach.delivery import deliver, fits_triton

_SUFFIX = ".cubin"


class StoreCacheManager(FileCacheManager):  # type: ignore[misc]  # Triton is not typed for mypy here
    """A :class:`FileCacheManager` that knows the store.

    Dump and override folders are the user's own and pass through.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._attached = not (override or dump) and fits_triton(str(triton.__version__))
        self._kept: dict[str, str] = {}

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path = str(super().put(data, filename, binary))
        if not isinstance(data, bytes):
            return path
        return self._answer(filename, path, data)

    def get_group(self, filename: str) -> dict[str, str] | None:
        group: dict[str, str] | None = super().get_group(filename)
        if group is None or not self._attached:
            return group
        return {name: self._from_cache(name, path) for name, path in group.items()}

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        originals = {name: self._kept.get(name, path) for name, path in group.items()}
        return str(super().put_group(filename, originals))

    def _from_cache(self, name: str, path: str) -> str:
        if not name.endswith(_SUFFIX):
            return path
        try:
            data = Path(path).read_bytes()
        except OSError:
            return path  # Triton finds out by itself
        return self._answer(name, path, data)

    def _answer(self, name: str, path: str, data: bytes) -> str:
        """Where Triton is to read this file: the store's twin, or the original."""
        if not self._attached or not name.endswith(_SUFFIX):
            return path
        found = deliver(data, "triton cache")
        if found is None:
            return path
        self._kept[name] = path
        return str(found.path)
