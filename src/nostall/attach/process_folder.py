"""A temporary folder of this process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def process_folder() -> Path:
    """A temporary folder that is deleted when this process exits."""
    folder = tempfile.mkdtemp(prefix="nostall-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
