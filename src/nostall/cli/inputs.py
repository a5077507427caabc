"""What a command line names: a cubin, a fatbin, or a Triton kernel in a Python file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nostall.core.errors import BadInput
from nostall.core.launch import LaunchSpec
from nostall.gpu import Kernel, LocalGpu
from nostall.sass.binary import fatbin
from nostall.sass.binary.cubin import Cubin
from nostall.tuning.assemblers import assemblers, by_device, by_model, chosen, starts
from nostall.tuning.job import Settings
from nostall.tuning.source import Source, compile_triton, load_cubin

DEFAULT_ARCH = "sm_90"

ArchOption = Annotated[
    str | None,
    typer.Option(
        help=f"Architecture to compile Triton kernels for ({DEFAULT_ARCH} when not given), or "
        "which image of a fatbin to take."
    ),
]


def read_bytes(path: Path) -> bytes:
    """A file's bytes, or :class:`BadInput` naming it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error


def read_cubin(path: Path, arch: str | None) -> bytes:
    """The bytes of a cubin, or of the cubin for ``arch`` inside a fatbin."""
    data = read_bytes(path)
    try:
        data = fatbin.extract(data, arch)
        Cubin.parse(data)  # so that an error names the file
        return data
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from error


def source(target: str, kernel: str | None, launch: Path | None, arch: str | None) -> Source:
    """``path.py:kernel`` is compiled with Triton; anything else is a cubin or a fatbin.

    ``arch`` is what Triton compiles for (sm_90 when not given), or which image of a fatbin to take.
    """
    spec = LaunchSpec.from_toml(launch) if launch else None
    path, colon, name = target.rpartition(":")
    if colon and path.endswith(".py"):
        return compile_triton(Path(path), kernel or name, spec, arch or DEFAULT_ARCH)
    if target.endswith(".py"):
        raise BadInput(f"{target} names no kernel; write {target}:KERNEL")
    return load_cubin(Path(target), kernel, spec, arch)


def best_assembled(source: Source, settings: Settings) -> Source:
    """``source`` as the best of the assemblers here makes it, judged by the settings' objective."""
    tools = assemblers()
    if settings.objective != "gpu" or source.ptx is None or source.launch is None:
        return chosen(starts(source, by_model(source), tools))
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch)) as gpu:
        return chosen(starts(source, by_device(gpu, settings.seed), tools))
