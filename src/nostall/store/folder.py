"""Location of nostall's persistent files: ``NOSTALL_HOME``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nostall.store.errors import BadStore


def home(variables: Mapping[str, str] = os.environ) -> Path:
    """The folder ``NOSTALL_HOME``, by default ``~/.cache/nostall``.

    Raises :class:`BadStore` if neither is defined.
    """
    configured = variables.get("NOSTALL_HOME")
    try:
        return Path(configured) if configured else Path.home() / ".cache" / "nostall"
    except RuntimeError as error:
        raise BadStore(f"there is no home folder ({error}); set NOSTALL_HOME") from error
