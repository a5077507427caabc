"""Where everything is kept that is to outlive a process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nostall.store.errors import BadStore


def home(variables: Mapping[str, str] = os.environ) -> Path:
    """``NOSTALL_HOME``, or ``~/.cache/nostall``."""
    chosen = variables.get("NOSTALL_HOME")
    try:
        return Path(chosen) if chosen else Path.home() / ".cache" / "nostall"
    except RuntimeError as error:
        raise BadStore(f"there is no home folder ({error}); set NOSTALL_HOME") from error
