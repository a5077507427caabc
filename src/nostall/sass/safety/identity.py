"""Which rules these are: a name that changes with the verifier's code and tables."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import nostall.sass

_SUFFIXES = (".py", ".json")


@cache
def rules() -> str:
    """The sha256 of all of :mod:`nostall.sass`, code and tables."""
    root = Path(nostall.sass.__file__).parent
    found = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES):
        found.update(f"{path.relative_to(root)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
