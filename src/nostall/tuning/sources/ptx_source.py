"""Sources with PTX: ``.ptx`` files, PTX inside a fatbin, and entries of Triton's cache."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from nostall.core.errors import BadInput, MissingPart
from nostall.core.launch import LaunchSpec
from nostall.core.validation import parse_json
from nostall.ptx.assemble.command import Command, plain_command
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import Assembler, find_assemblers, version_numbers
from nostall.ptx.program.module import parse
from nostall.sass.binary import fatbin
from nostall.sass.binary.elf import MAX_BYTES
from nostall.tuning.sources.compiled_launch import compiled_launch
from nostall.tuning.sources.source import Source, compute_capability, load_cubin

PTXAS_OPTIONS_KEY = "ptxas_options"
"""Provenance key of the options with which a compiler that is not Triton runs ptxas."""
_REFUSED = ("-o", "-arch", "-optf", "--output-file", "--gpu-name", "--options-file")
"""Options that would change the files or the architecture of a run."""
_COMPILER_VERSION = re.compile(r"^// Cuda compilation tools, release [\d.]+, V([\d.]+)", re.M)
"""Comment in which nvcc writes its version, which is also that of its ptxas."""
_SCRATCH = "global_scratch"
"""First argument that Triton appends to a kernel."""


def load_ptx(
    path: Path,
    kernel: str | None = None,
    launch: LaunchSpec | None = None,
    arch: str | None = None,
    options: str = "",
    installed: Sequence[Assembler] | None = None,
) -> Source:
    """Read a ``.ptx`` file and assemble it: the cubin is the original of a search.

    ``arch``: architecture to assemble for (None: the file's ``.target``).  ``options``: those with
    which the program's build runs ptxas, such as ``--fmad=false``.  The ptxas of the compiler that
    wrote the file is used if it is installed, else the newest one that accepts the file.  Raises
    :class:`BadInput` if the file cannot be used, and :class:`MissingPart` without ptxas.
    """
    text = _read_text(path)
    try:
        name = parse(text).kernel(kernel).name
        command = _command(text, options, arch)
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from error
    compute_capability(command.target)
    found = find_assemblers() if installed is None else installed
    assembler, cubin = _assemble(path, text, command, found)
    provenance = {
        "compiler": "ptx file",
        "ptxas": assembler.version,
        "arch": command.target,
        PTXAS_OPTIONS_KEY: shlex.join(command.options),
    }
    return Source(cubin, name, launch, str(path), MappingProxyType(provenance), text)


def load_binary(
    path: Path,
    kernel: str | None = None,
    launch: LaunchSpec | None = None,
    arch: str | None = None,
    options: str = "",
) -> Source:
    """Read a cubin, a container with cubins, or an entry of Triton's cache; with its PTX if known.

    PTX is known for a container that holds PTX of the same architecture with the same kernel, and
    for an entry of Triton's cache (a folder, or a cubin beside its ``.ptx`` and ``.json``).
    Errors are those of :func:`load_cubin`.
    """
    if path.is_dir():
        path = _entry_of_cache(path)
    source = load_cubin(path, kernel, launch, arch)
    if (metadata := _triton_metadata(path)) is not None:
        return _with_triton_ptx(source, path, metadata)
    data = path.read_bytes()
    return _with_container_ptx(source, data, options) if fatbin.is_container(data) else source


def source_command(source: Source, extra: Sequence[str] = ()) -> Command:
    """The command of a source whose compiler is not Triton."""
    assert source.ptx is not None
    options = shlex.split(source.provenance.get(PTXAS_OPTIONS_KEY, ""))
    target = source.provenance.get("arch")
    return plain_command(source.ptx, (*options, *extra), target)


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadInput(f"{path} has more than {MAX_BYTES} bytes; give the PTX of one kernel")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise BadInput(f"cannot read PTX {path}: {reason}; give the path of a .ptx file") from error


def _command(text: str, options: str, arch: str | None) -> Command:
    return plain_command(text, parse_options(options), arch)


def parse_options(text: str) -> tuple[str, ...]:
    """The options in a text, as a shell divides it.

    Raises :class:`BadInput` for text without options, and for options that name files or the
    architecture.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"the ptxas options {text!r} cannot be read: {error}") from error
    for word in words:
        if word.partition("=")[0] in _REFUSED or word.startswith("@"):
            raise BadInput(
                f"the ptxas option {word!r} is not allowed, because nostall sets the files and the "
                "architecture; leave it out, and give --arch for the architecture"
            )
    if words and not words[0].startswith("-"):
        raise BadInput(f"the ptxas options {text!r} start with no option; write '--fmad=false'")
    return tuple(words)


def _assemble(
    path: Path, text: str, command: Command, installed: Sequence[Assembler]
) -> tuple[Assembler, bytes]:
    """The assembler to use and its cubin."""
    if not installed:
        raise MissingPart(
            "no ptxas is installed; install the CUDA toolkit and set CUDA_HOME, or pip install "
            "'nostall[triton]'"
        )
    match = _COMPILER_VERSION.search(text)
    own = match.group(1) if match else ""

    def rank(assembler: Assembler) -> tuple[bool, tuple[int, ...]]:
        return assembler.version == own, version_numbers(assembler.version)

    failure = ""
    for assembler in sorted(installed, key=rank, reverse=True):
        with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
            run = run_ptxas(assembler, text, command.arguments(), Path(folder))
        if run.status == "assembled":
            return assembler, run.cubin
        failure = failure or run.detail
    raise BadInput(f"{path}: no installed ptxas assembles it ({failure}); correct the PTX")


def _with_container_ptx(source: Source, data: bytes, options: str) -> Source:
    """The source with the PTX of a container, if that has the kernel for the same architecture."""
    arch = source.provenance["arch"]
    for image in fatbin.ptx_images(data):
        if image.arch.rstrip("af") != arch.rstrip("af"):
            continue
        try:
            parse(image.text).kernel(source.kernel)
        except BadInput:
            continue
        recorded = [o for o in image.options if o.partition("=")[0] not in _REFUSED]
        words = parse_options(options) if options else tuple(recorded)
        provenance = {
            **source.provenance,
            "arch": image.arch,
            PTXAS_OPTIONS_KEY: shlex.join(words),
        }
        return replace(source, ptx=image.text, provenance=MappingProxyType(provenance))
    return source


def _entry_of_cache(folder: Path) -> Path:
    """The cubin of an entry of Triton's cache.  Raises :class:`BadInput` if there is not one."""
    cubins = sorted(folder.glob("*.cubin"))
    if len(cubins) != 1:
        raise BadInput(
            f"{folder} holds {len(cubins)} cubins; give a folder of Triton's cache that holds one "
            "(see TRITON_CACHE_DIR), or the path of a file"
        )
    return cubins[0]


def _triton_metadata(path: Path) -> dict[str, Any] | None:
    """The metadata beside a cubin of Triton's cache; None if the cubin is not from there."""
    if path.suffix != ".cubin" or not path.with_suffix(".ptx").is_file():
        return None
    try:
        metadata = parse_json(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    is_entry = isinstance(metadata, dict) and {"name", "num_warps", "shared"} <= metadata.keys()
    return metadata if is_entry else None


def _with_triton_ptx(source: Source, path: Path, metadata: dict[str, Any]) -> Source:
    """The source of an entry of Triton's cache: its PTX, its options, and the compiled launch."""
    ptx = _read_text(path.with_suffix(".ptx"))
    launch = source.launch
    if launch is not None:
        args = {arg.name: arg for arg in launch.args}
        compiled = compiled_launch(launch, args, {}, SimpleNamespace(**metadata))
        is_complete = _SCRATCH in args
        launch = compiled.model_copy(update={"args": launch.args}) if is_complete else compiled
    names = ("enable_fp_fusion", "ptx_options", "num_warps", "num_stages")
    options = {name: metadata[name] for name in names if metadata.get(name) is not None}
    provenance = {
        "compiler": f"triton {metadata.get('triton_version', '(unknown version)')}",
        "arch": source.provenance["arch"],
        "options": ", ".join(f"{name}={value}" for name, value in options.items()),
    }
    return replace(source, ptx=ptx, launch=launch, provenance=MappingProxyType(provenance))
