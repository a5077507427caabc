"""Digest of the verifier's code and tables, by which stored verdicts name the rules they used."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import nostall.sass

_SUFFIXES = (".py", ".json")


@cache
def rules_digest() -> str:
    """The sha256 of all code and tables of :mod:`nostall.sass`, as a hexadecimal string."""
    root = Path(nostall.sass.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
