"""Run a module in a subprocess with Triton's interpreter, which is enabled before the import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[4]


def run_interpreted(module: str, *arguments: object) -> Any:
    """The JSON that ``python -m module arguments`` prints, with Triton's interpreter enabled."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)],
        cwd=_ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
