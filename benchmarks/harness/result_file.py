"""Read and write result files: JSON with date, command, versions and processor at the top."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import platform
import re
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nostall.core.files.atomic import write_atomically

ROOT = Path(__file__).resolve().parents[1]
"""The folder ``benchmarks``."""
_PACKAGES = ("nostall", "numpy", "numba", "torch", "triton", "nvidia-cuda-nvdisasm")
_NUMBERS = re.compile(r"\[\n([^][{}\"]*)\]")
"""A list without nested values or strings, in JSON with one value a line."""
_PATHS = re.compile(r'(^|")/[^"]*?([^"/]*)(?=$|")')
"""An absolute path, alone or in a JSON string; group 2 is its last part."""


def head() -> dict[str, Any]:
    """Date, command, Python and package versions, processor."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "python": platform.python_version(),
        "processor": _processor(),
        "versions": _versions(),
    }


def results(level: str) -> Path:
    """The folder of committed results of a level, such as ``sass``."""
    return ROOT / level / "results"


def load(path: Path) -> Any:
    """Parsed JSON of a result file; ``.json.gz`` is decompressed.

    A path without the suffix ``.gz`` is also found if only the compressed file exists.
    """
    if not path.exists() and path.suffix != ".gz":
        path = path.with_name(f"{path.name}.gz")
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def save(path: Path, **body: Any) -> None:
    """Write a result file with its head; compressed if its name ends with ``.gz``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text({**head(), **body}).encode()
    write_atomically(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def text(body: dict[str, Any]) -> str:
    """Indented JSON, with the numbers of a list on one line, so that diffs stay short."""
    return _NUMBERS.sub(_one_line, json.dumps(body, indent=1)) + "\n"


def _one_line(match: re.Match[str]) -> str:
    return f"[{', '.join(match[1].replace(',', ' ').split())}]"


def _versions() -> dict[str, str]:
    """Versions of the packages that are installed; a GPU machine may lack some."""
    versions = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _command() -> str:
    """The command line; absolute paths are shortened to their last part."""
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name] if spec is not None else [sys.argv[0]]
    return " ".join(["python", *(_PATHS.sub(r"\1\2", word) for word in (*program, *sys.argv[1:]))])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x{len(names)}" if names else platform.processor()
