"""Where the corpus is, what belongs to it, and whether it is up to date.

``corpus()`` is what tests call: it builds what is missing and returns the paths.  The environment
variable ``NOSTALL_CORPUS_SLICE=N`` keeps every N-th cubin only, for quick runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from nostall.tuning import kernel_file, source
from tests.corpus.triton_kernels import ENTRIES, SKIPPED, Entry

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / ".cache" / "corpus"
OLD_TRITON_VERSION = "3.6.0"
OLD_TRITON = ROOT / ".cache" / f"triton-{OLD_TRITON_VERSION}"
NVCC = Path(__file__).parent / "nvcc"
EXAMPLES_NVCC = ROOT / "examples" / "nvcc"
SLICE = "NOSTALL_CORPUS_SLICE"


def every() -> int:
    """Every how many-th cubin is wanted."""
    text = os.environ.get(SLICE, "1")
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{SLICE}={text!r}: give a whole number of 1 or more")
    return int(text)


def wanted(version: str, step: int = 1) -> list[tuple[Entry, int, str]]:
    """Entry, compute capability and file name of each Triton cubin of this version."""
    series = ".".join(version.split(".")[:2])
    everything = [
        (entry, capability, entry.name(capability))
        for entry in ENTRIES
        for capability in entry.capabilities
        if (series, entry.name(capability)) not in SKIPPED
    ]
    return everything[::step]


@lru_cache
def _compiler() -> str:
    """The text of what decides the bytes, so that other edits do not rebuild the corpus."""
    parts = (source.compile_triton, source._specialised, source._compile, kernel_file.imported)
    return "\n".join(inspect.getsource(part) for part in parts)


@lru_cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stamp(entry: Entry, capability: int, version: str) -> str:
    """Changes with everything that decides the bytes of a cubin."""
    parts = [
        _digest(ROOT / entry.path),
        _compiler(),
        repr((entry, capability, version)),
    ]
    if entry.path.startswith("tests/"):
        parts.append(_digest(Path(__file__).parent / "kernels" / "kernel_spec.py"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def folder(version: str, out: Path = BUILT) -> Path:
    """Where the cubins of one Triton version lie."""
    return out / f"triton-{version}"


def index(version: str, out: Path = BUILT) -> dict[str, Any]:
    """The index of one Triton version by cubin name: launch, kernel, stamp and provenance."""
    try:
        loaded: dict[str, Any] = json.loads((folder(version, out) / "index.json").read_text())
    except FileNotFoundError:
        return {}
    return loaded


def stale(version: str, out: Path = BUILT, step: int = 1) -> list[tuple[Entry, int, str]]:
    """What has to be compiled."""
    known = index(version, out)
    place = folder(version, out)
    return [
        (entry, capability, name)
        for entry, capability, name in wanted(version, step)
        if known.get(name, {}).get("stamp") != stamp(entry, capability, version)
        or not (place / f"{name}.cubin").is_file()
    ]


def versions() -> tuple[str, str]:
    """The two Triton versions of the corpus: the oldest known and the installed one."""
    return OLD_TRITON_VERSION, importlib.metadata.version("triton")


def _build(version: str, step: int) -> None:
    current = version == importlib.metadata.version("triton")
    if not current and not OLD_TRITON.is_dir():
        raise RuntimeError(
            f"{OLD_TRITON} is not there; run: pip install --no-deps --target {OLD_TRITON} "
            f"triton=={OLD_TRITON_VERSION}"
        )
    where = "current" if current else str(OLD_TRITON)
    script = str(Path(__file__).parent / "build.py")
    command = [sys.executable, script, "--triton", where, "--out", str(BUILT), "--every", str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the corpus build failed:\n{done.stdout}\n{done.stderr}")


@lru_cache
def triton_corpus() -> tuple[Path, ...]:
    """Paths of the Triton cubins of both versions; builds what is missing."""
    step = every()
    BUILT.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for version in versions():
            if stale(version, step=step):
                _build(version, step)
            place = folder(version)
            paths += [place / f"{name}.cubin" for _, _, name in wanted(version, step)]
    return tuple(paths)


@lru_cache
def nvcc_corpus() -> tuple[Path, ...]:
    """Paths of the committed cubins that nvcc made, without those made to be refused."""
    found = [*NVCC.glob("*.cubin"), *EXAMPLES_NVCC.glob("*.cubin")]
    return tuple(sorted(path for path in found if not path.name.startswith("refused")))[:: every()]


def fatbins() -> tuple[Path, ...]:
    """Paths of the committed fatbins."""
    return tuple(sorted(NVCC.glob("*.fatbin")))


def refused() -> tuple[Path, ...]:
    """Paths of cubins for architectures that nostall does not know."""
    return tuple(sorted(NVCC.glob("refused*.cubin")))


def corpus() -> list[Path]:
    """Paths of all cubins that nostall has to accept."""
    return [*triton_corpus(), *nvcc_corpus()]


def described() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each Triton cubin with its index entry."""
    triton_corpus()
    for version in versions():
        known = index(version)
        for _, _, name in wanted(version, every()):
            yield folder(version) / f"{name}.cubin", known[name]
