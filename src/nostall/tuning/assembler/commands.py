"""Find the ptxas and the options with which a compiler made a cubin."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import BadInput, MissingPart
from nostall.ptx.assemble.command import Command, triton_commands
from nostall.ptx.assemble.known_faults import known_faults
from nostall.ptx.assemble.ptxas import PtxasRun, run_ptxas
from nostall.ptx.assemble.versions import Assembler, version_numbers
from nostall.ptx.program.module import parse
from nostall.sass.binary.code_hash import code_sha256
from nostall.tuning.sources.ptx_source import source_command
from nostall.tuning.sources.source import Source

_PTXAS_KEY = "ptxas"
"""Provenance key of the version of ptxas that the compiler used."""


@dataclass(frozen=True)
class CompilerCommand:
    """How the original is assembled."""

    command: Command
    assemblers: tuple[Assembler, ...]
    """Usable versions: the first one with ``command`` gives the original, or comes nearest.

    The others have no known fault for this PTX (:mod:`nostall.ptx.assemble.known_faults`).
    """
    reproduces: bool
    """Whether the command gives the machine code of the original."""
    registers: int
    """Registers of a thread, as ptxas reports them for the unchanged PTX."""
    spill_bytes: int
    """Bytes of its spill stores and loads."""


def find_command(source: Source, installed: Sequence[Assembler]) -> CompilerCommand:
    """The assembler and the options that give the machine code of ``source`` from its PTX.

    If none does, the compiler's likely options and its own version, or else the newest usable one,
    are taken: candidates are compared with the original cubin in any case.  Raises
    :class:`BadInput` if no installed assembler accepts the PTX, and :class:`MissingPart` if none is
    installed.
    """
    assert source.ptx is not None
    if not installed:
        raise MissingPart("no ptxas is installed; pip install triton, or set CUDA_HOME")
    original = code_sha256(source.cubin)
    usable: dict[Assembler, tuple[Command, PtxasRun]] = {}
    failure = ""
    for assembler in _ranked(source, installed):
        for command in _commands(source):
            run = _run(assembler, source.ptx, command)
            if run.status != "assembled":
                failure = run.detail
                continue
            usable.setdefault(assembler, (command, run))
            if code_sha256(run.cubin) == original:
                others = [a for a in installed if a != assembler and _accepts(a, source, command)]
                return _result(source, command, [assembler, *others], True, run)
    if not usable:
        raise BadInput(
            f"{source.origin}: no installed ptxas assembles its PTX ({failure}); install the "
            "version that the compiler used"
        )
    assembler, (command, run) = next(iter(usable.items()))
    return _result(source, command, list(usable), False, run)


def _result(
    source: Source,
    command: Command,
    assemblers: Sequence[Assembler],
    reproduces: bool,
    run: PtxasRun,
) -> CompilerCommand:
    """The command; of the assemblers after the first, those without a known fault for the PTX."""
    assert source.ptx is not None
    own, *others = assemblers
    if others:
        module = parse(source.ptx)
        others = [a for a in others if not known_faults(module, a.version, command.target)]
    assemblers = (own, *others)
    resources = run.resources.get(source.kernel)
    registers = resources.registers if resources else 0
    spills = resources.spill_bytes if resources else 0
    return CompilerCommand(command, assemblers, reproduces, registers, spills)


def _commands(source: Source) -> list[Command]:
    """Commands that the compiler may have used, the most likely first."""
    assert source.ptx is not None
    if "triton" in source.provenance.get("compiler", ""):
        return triton_commands(source.ptx, read_options(source.provenance.get("options", "")))
    return [source_command(source), source_command(source, ("-lineinfo",))]


def read_options(text: str) -> dict[str, str]:
    """The compile options in a provenance: ``name=value, name=value``."""
    return dict(re.findall(r"(\w+)=([^,]*)", text))


def _ranked(source: Source, installed: Sequence[Assembler]) -> list[Assembler]:
    """The assemblers: the compiler's version first, then the newest."""
    own = source.provenance.get(_PTXAS_KEY)

    def rank(assembler: Assembler) -> tuple[bool, tuple[int, ...]]:
        return assembler.version == own, version_numbers(assembler.version)

    return sorted(installed, key=rank, reverse=True)


def _accepts(assembler: Assembler, source: Source, command: Command) -> bool:
    assert source.ptx is not None
    return _run(assembler, source.ptx, command).status == "assembled"


def _run(assembler: Assembler, ptx: str, command: Command) -> PtxasRun:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        return run_ptxas(assembler, ptx, command.arguments(), Path(folder))
