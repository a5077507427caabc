"""Installed versions of ptxas."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nostall.core.errors import BadInput, MissingPart


@dataclass(frozen=True)
class Assembler:
    """An installed ptxas."""

    path: Path
    version: str
    """For example ``13.5.37``."""

    @classmethod
    def of(cls, path: Path) -> Assembler:
        """The ptxas in a file.  Raises :class:`BadInput` if it does not run or is none."""
        version = _version(path)
        if version == "unknown":
            raise BadInput(f"{path} --version names no version; give the path of a ptxas")
        return cls(path, version)

    @cached_property
    def sha256(self) -> str:
        """Hash of the program file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, which compare as versions do: (13, 5, 37)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def find_assemblers() -> list[Assembler]:
    """One ptxas of each installed version: from Triton, pip packages, CUDA and the PATH."""
    assemblers: dict[str, Assembler] = {}
    for path in _ptxas_paths():
        if path.is_file() and os.access(path, os.X_OK):
            version = _version(path)
            assemblers.setdefault(version, Assembler(path, version))
    return list(assemblers.values())


def find_assembler(version: str) -> Assembler:
    """The installed ptxas of this version; raises :class:`MissingPart` if there is none."""
    installed = find_assemblers()
    for assembler in installed:
        if assembler.version == version:
            return assembler
    known = ", ".join(assembler.version for assembler in installed) or "(none)"
    raise MissingPart(
        f"ptxas {version} is not installed; installed versions are {known}; install the CUDA "
        f"toolkit or the Triton release with ptxas {version}"
    )


def _ptxas_paths() -> Iterator[Path]:
    """Places where a ptxas may be installed."""
    try:
        import triton.backends.nvidia as bundled

        yield from sorted(Path(path, "bin", "ptxas") for path in bundled.__path__)
        yield from sorted(Path(path, "bin", "ptxas-blackwell") for path in bundled.__path__)
    except ImportError:
        pass
    for site in (sysconfig.get_path("platlib"), sysconfig.get_path("purelib")):
        yield from sorted(Path(site, "nvidia").glob("*/bin/ptxas"), reverse=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            yield Path(folder, "bin", "ptxas")
    if on_path := shutil.which("ptxas"):
        yield Path(on_path)


def _version(path: Path) -> str:
    try:
        text = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BadInput(
            f"{path} --version fails ({error}); repair or remove this assembler"
        ) from error
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match.group(1) if match else "unknown"
