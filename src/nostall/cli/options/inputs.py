"""Kernel inputs of commands: options that select a kernel, and functions that load it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from nostall.core.errors import BadInput
from nostall.core.launch import LaunchSpec
from nostall.gpu import Kernel, LocalGpu
from nostall.ptx.assemble.versions import find_assemblers
from nostall.sass.binary import fatbin
from nostall.sass.binary.cubin import ARCHITECTURE_NAMES, Cubin
from nostall.tuning.launches.template import check_launch
from nostall.tuning.settings import Settings
from nostall.tuning.sources.ptx_source import load_binary, load_ptx
from nostall.tuning.sources.source import Source, check_requested_arch
from nostall.tuning.sources.triton_source import compile_triton

DEFAULT_ARCH = "sm_90"
"""Architecture that Triton kernels are compiled for by default."""

TARGET_HELP = (
    "path.py:kernel for a Triton kernel, a .ptx file, a cubin, a fatbin, or an entry of Triton's "
    "cache."
)
TargetArgument = Annotated[str, typer.Argument(help=TARGET_HELP)]
KernelOption = Annotated[
    str | None, typer.Option(help="Name of the kernel, if the file has several.")
]
MeasuredLatenciesOption = Annotated[
    bool,
    typer.Option(
        "--measured-latencies",
        help="Let instructions issue as close as measured on a GPU plus a margin (sm_90 only).",
    ),
]
LaunchOption = Annotated[Path | None, typer.Option(help="Launch specification (TOML).")]
ArchOption = Annotated[
    str | None,
    typer.Option(
        help=f"Architecture to compile a Triton kernel for (default: {DEFAULT_ARCH}), or image of "
        f"a fatbin to use: {', '.join(ARCHITECTURE_NAMES)}."
    ),
]


PtxasOptionsOption = Annotated[
    str,
    typer.Option(
        help="Options with which your build runs ptxas, such as '--fmad=false'; for a .ptx file "
        "or PTX in a fatbin."
    ),
]


def read_bytes(path: Path) -> bytes:
    """The contents of a file.  Raises :class:`BadInput` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(
            f"cannot read {path}: {error.strerror}; check the path and its permissions"
        ) from error


def read_cubin(path: Path, arch: str | None) -> bytes:
    """The bytes of a cubin, or of the cubin for ``arch`` in a fatbin."""
    data = read_bytes(path)
    try:
        data = fatbin.extract(data, arch)
        cubin = Cubin.parse(data)
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from error
    check_requested_arch(cubin.sm, arch, path)
    return data


def load_source(
    target: str,
    kernel: str | None,
    launch: Path | None,
    arch: str | None,
    ptxas_options: str = "",
) -> Source:
    """Compile ``path.py:kernel`` with Triton, or read PTX, a cubin, a fatbin or a cache entry.

    ``arch`` is the architecture that Triton compiles for (None: sm_90) or that PTX is assembled for
    (None: that of the file), or the image of a fatbin.
    """
    launch_spec = LaunchSpec.from_toml(launch) if launch else None
    path, colon, name = target.rpartition(":")
    is_triton = bool(colon) and path.endswith(".py")
    if ptxas_options and (is_triton or target.endswith(".cubin")):
        raise BadInput(
            f"--ptxas-options is for a .ptx file or a fatbin, but {target} has options of its own; "
            "leave it out"
        )
    if is_triton:
        return compile_triton(Path(path), kernel or name, launch_spec, arch or DEFAULT_ARCH)
    if target.endswith(".py"):
        raise BadInput(f"{target} names no kernel; write {shlex.quote(f'{target}:KERNEL')}")
    if target.endswith(".ptx"):
        source = load_ptx(Path(target), kernel, launch_spec, arch, ptxas_options)
    else:
        source = load_binary(Path(target), kernel, launch_spec, arch, ptxas_options)
    if launch_spec is not None:
        check_launch(Cubin.parse(source.cubin), source.kernel, launch_spec, target)
    return source


def assemble_fastest(source: Source, settings: Settings) -> Source:
    """Assemble ``source`` with all installed assemblers; the fastest cubin by the objective."""
    from nostall.tuning.ptxas_versions import (
        assemble_all,
        compare_on_device,
        compare_on_model,
        select_start,
    )

    assemblers = find_assemblers()
    if settings.objective != "gpu" or source.ptx is None or source.launch is None:
        return select_start(assemble_all(source, compare_on_model(source), assemblers))
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch)) as gpu:
        compare = compare_on_device(gpu, settings.seed)
        return select_start(assemble_all(source, compare, assemblers))
