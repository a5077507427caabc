"""Detection of the small text files that Git LFS and git-annex leave in place of large files."""

from __future__ import annotations

import re
from pathlib import Path

from nostall.core.errors import BadInput

_MAX_POINTER = 1024
"""Bytes; Git LFS reads no longer file as a pointer."""
_LFS = re.compile(rb"version https?://\S+/spec/v\d+\n(?:.*\n)*?oid sha256:[0-9a-f]{64}\nsize (\d+)")
_ANNEX = re.compile(rb"/annex/objects/\S+\s*$")


def check_content(path: Path, error: type[BadInput]) -> None:
    """Raise ``error`` if a file is a pointer to its content, which is not here.

    Does nothing if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_POINTER)
    except OSError:
        return
    if pointer := _LFS.match(text):
        raise error(
            f"{path} is a pointer of Git LFS to {int(pointer[1]):,} bytes that are not here; run "
            "'git lfs pull' in its repository, then give the file again"
        )
    if _ANNEX.match(text):
        raise error(
            f"{path} is a pointer of git-annex, and its content is not here; run 'git annex get' "
            "on it, then give the file again"
        )
