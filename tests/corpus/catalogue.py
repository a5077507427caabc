"""Catalogue of the corpus: paths of its cubins, and building those that are out of date.

Tests call ``corpus()``, which builds missing cubins and returns all paths.  The environment
variable ``NOSTALL_CORPUS_SLICE=N`` selects every N-th cubin and ``IN_EVERY_SLICE``, for quick runs.
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

from nostall.tuning.sources import kernel_file, triton_source
from tests.corpus.triton_kernels import ENTRIES, SKIPPED, Entry

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / ".cache" / "corpus"
"""Folder of the built Triton cubins."""
OLD_TRITON_VERSION = "3.6.0"
OLD_TRITON = ROOT / ".cache" / f"triton-{OLD_TRITON_VERSION}"
NVCC = Path(__file__).parent / "nvcc"
"""Folder of the committed cubins that nvcc compiled."""
EXAMPLES_NVCC = ROOT / "examples" / "nvcc"
SLICE_VARIABLE = "NOSTALL_CORPUS_SLICE"
IN_EVERY_SLICE = (
    "batched_gemm-wgmma.sm_90",
    "flash_attention-short.sm_86",
    "softmax.sm_90",
    "vector_add.sm_90",
)
"""Cubins of the installed Triton without which the tests of moves, or those of some kinds of
violations, would have no kernel in a slice."""


def slice_step() -> int:
    """N if every N-th cubin is selected; 1 selects all.

    Raises ValueError if the environment variable is not a positive whole number.
    """
    text = os.environ.get(SLICE_VARIABLE, "1")
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{SLICE_VARIABLE} is {text!r}; set it to a whole number of 1 or more")
    return int(text)


def triton_entries(version: str, step: int = 1) -> list[tuple[Entry, int, str]]:
    """(entry, compute capability, file name) of every ``step``-th cubin of a Triton version.

    Those of ``IN_EVERY_SLICE`` are added, except for the oldest supported version.
    """
    series = ".".join(version.split(".")[:2])
    entries = [
        (entry, capability, entry.name(capability))
        for entry in ENTRIES
        for capability in entry.capabilities
        if (series, entry.name(capability)) not in SKIPPED
    ]
    added = IN_EVERY_SLICE if version != OLD_TRITON_VERSION else ()
    return [item for number, item in enumerate(entries) if number % step == 0 or item[2] in added]


@lru_cache
def _compiler_source() -> str:
    """Source text of the functions that decide the bytes of a cubin.

    Edits of other functions do not rebuild the corpus.
    """
    parts = (
        triton_source.compile_triton,
        triton_source._specialize,
        triton_source._compile,
        kernel_file.import_file,
    )
    return "\n".join(inspect.getsource(part) for part in parts)


@lru_cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stamp(entry: Entry, capability: int, version: str) -> str:
    """A digest that changes with everything that decides the bytes of a cubin."""
    parts = [
        _digest(ROOT / entry.path),
        _compiler_source(),
        repr((entry, capability, version)),
    ]
    if entry.path.startswith("tests/"):
        parts.append(_digest(Path(__file__).parent / "kernels" / "kernel_spec.py"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def folder(version: str, out: Path = BUILT) -> Path:
    """The folder with the cubins of one Triton version."""
    return out / f"triton-{version}"


def index(version: str, out: Path = BUILT) -> dict[str, Any]:
    """The index of one Triton version: cubin name -> launch, kernel, stamp and provenance."""
    try:
        loaded: dict[str, Any] = json.loads((folder(version, out) / "index.json").read_text())
    except FileNotFoundError:
        return {}
    return loaded


def stale(version: str, out: Path = BUILT, step: int = 1) -> list[tuple[Entry, int, str]]:
    """The entries of :func:`triton_entries` whose cubin is missing or out of date."""
    known = index(version, out)
    cubins = folder(version, out)
    return [
        (entry, capability, name)
        for entry, capability, name in triton_entries(version, step)
        if known.get(name, {}).get("stamp") != stamp(entry, capability, version)
        or not (cubins / f"{name}.cubin").is_file()
    ]


def versions() -> tuple[str, str]:
    """The two Triton versions of the corpus: the oldest supported one and the installed one."""
    return OLD_TRITON_VERSION, importlib.metadata.version("triton")


def _build(version: str, step: int) -> None:
    """Compile the cubins of one Triton version that are out of date, in a child process."""
    current = version == importlib.metadata.version("triton")
    if not current and not OLD_TRITON.is_dir():
        raise RuntimeError(
            f"{OLD_TRITON} does not exist; run: pip install --no-deps --target {OLD_TRITON} "
            f"triton=={OLD_TRITON_VERSION}"
        )
    triton = "current" if current else str(OLD_TRITON)
    script = str(Path(__file__).parent / "build.py")
    command = [sys.executable, script, "--triton", triton]
    command += ["--out", str(BUILT), "--every", str(step)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"the corpus build failed:\n{process.stdout}\n{process.stderr}")


@lru_cache
def triton_corpus() -> tuple[Path, ...]:
    """Paths of the Triton cubins of both versions; builds those that are out of date."""
    step = slice_step()
    BUILT.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for version in versions():
            if stale(version, step=step):
                _build(version, step)
            cubins = folder(version)
            paths += [cubins / f"{name}.cubin" for _, _, name in triton_entries(version, step)]
    return tuple(paths)


@lru_cache
def nvcc_corpus() -> tuple[Path, ...]:
    """Paths of the committed nvcc cubins for supported architectures."""
    paths = [*NVCC.glob("*.cubin"), *EXAMPLES_NVCC.glob("*.cubin")]
    supported = sorted(path for path in paths if not path.name.startswith("refused"))
    return tuple(supported)[:: slice_step()]


def fatbins() -> tuple[Path, ...]:
    """Paths of the committed fatbins."""
    return tuple(sorted(NVCC.glob("*.fatbin")))


def unsupported_cubins() -> tuple[Path, ...]:
    """Paths of the committed cubins for architectures that nostall does not support."""
    return tuple(sorted(NVCC.glob("refused*.cubin")))


def corpus() -> list[Path]:
    """Paths of all cubins that the verifier must accept."""
    return [*triton_corpus(), *nvcc_corpus()]


def indexed_cubins() -> Iterator[tuple[Path, dict[str, Any]]]:
    """(path, index entry) of each Triton cubin."""
    triton_corpus()
    for version in versions():
        known = index(version)
        for _, _, name in triton_entries(version, slice_step()):
            yield folder(version) / f"{name}.cubin", known[name]
