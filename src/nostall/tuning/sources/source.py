"""A compiled kernel with its launch and provenance, and reading one from a cubin file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from nostall.core.errors import BadInput
from nostall.core.launch import LaunchSpec
from nostall.core.text.suggest import did_you_mean, listed, unknown
from nostall.sass.binary import fatbin
from nostall.sass.binary.cubin import ARCHITECTURE_NAMES, Cubin, check_architecture

ASSEMBLER_KEY = "assembler"
"""Provenance key of a source that another ptxas assembled; the value is the ptxas version."""


@dataclass(frozen=True)
class Source:
    """One compiled kernel."""

    cubin: bytes = field(repr=False)
    kernel: str
    """Symbol of the kernel in the cubin."""
    launch: LaunchSpec | None
    """Launch of the *compiled* kernel, or None if unknown.  For a Triton kernel, ``block``,
    ``shared`` and ``cluster`` follow from the compilation, values that the compiler folded in are
    :class:`Constant`, and the last two arguments are the scratch pointers that Triton appends to
    every kernel."""
    origin: str
    """File, or file and function, for messages."""
    provenance: Mapping[str, str]
    """Compiler, architecture and compile options."""
    ptx: str | None = field(default=None, repr=False)
    """PTX that the cubin was assembled from; None for a cubin file."""


def missing_launch(source: Source, purpose: str) -> BadInput:
    """The error for a kernel without a launch, which something (``purpose``) needs."""
    return BadInput(
        f"{source.origin}: {purpose} needs the launch of {source.kernel!r}; write it with `nostall "
        f"init {shlex.quote(source.origin)} --kernel {shlex.quote(source.kernel)} --out "
        "launch.toml`, edit it, and give --launch launch.toml"
    )


def load_cubin(
    path: Path,
    kernel: str | None = None,
    launch: LaunchSpec | None = None,
    arch: str | None = None,
) -> Source:
    """Read a cubin, or the cubin for ``arch`` of a fatbin or a host object.

    ``kernel`` and ``arch`` are needed if the file holds several kernels or several images.  Raises
    :class:`BadInput` if the file cannot be read or does not have the kernel.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(
            f"cannot read cubin {path}: {error.strerror}; give the path of a .cubin file"
        ) from error
    is_container = fatbin.is_container(data)
    try:
        data = fatbin.extract(data, arch, kernel)
        cubin = Cubin.parse(data)
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from error
    check_requested_arch(cubin.sm, arch, path)
    names = [text.name for text in cubin.texts if text.is_kernel]
    if kernel is None:
        if len(names) != 1:
            raise BadInput(
                f"{path} holds {len(names)} kernels; name one of: {listed(names)} (--kernel)"
            )
        kernel = names[0]
    elif kernel not in names:
        raise BadInput(
            f"{path} has no kernel {kernel!r}; it holds: {listed(names)}"
            f"{did_you_mean(kernel, names)}"
        )
    file_kind = "fatbin file" if is_container else "cubin file"
    provenance = {"compiler": file_kind, "arch": f"sm_{cubin.sm}"}
    return Source(data, kernel, launch, str(path), MappingProxyType(provenance))


def check_requested_arch(sm: int, arch: str | None, path: Path) -> None:
    """Raise :class:`BadInput` if a cubin for ``sm`` is not for the architecture ``arch``."""
    if arch is not None and compute_capability(arch) != sm:
        raise BadInput(
            f"{path} is for sm_{sm}, and --arch is {arch}; a cubin runs on its own architecture "
            "only: leave --arch out, or give a file for that architecture"
        )


def compute_capability(arch: str) -> int:
    """The compute capability of an architecture: 90 for ``sm_90`` and ``sm_90a``.

    Raises :class:`BadInput` for other texts, and :class:`UnsupportedArchitecture` for an
    architecture that nostall does not support (LLVM ends the process for some of them).
    """
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    if match is None:
        raise BadInput(unknown("architecture", arch, ARCHITECTURE_NAMES))
    sm = int(match.group(1))
    check_architecture(sm, "kernels cannot be tuned for")
    return sm
