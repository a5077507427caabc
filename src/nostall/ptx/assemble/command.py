"""Command lines of ptxas: the compiler's own options, and those of a candidate after them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nostall.core.errors import BadInput

_TARGET = re.compile(r"^\s*\.target\s+(\w+)", re.MULTILINE)
_VERBOSE = "-v"
"""Lets ptxas print registers and spills."""


@dataclass(frozen=True)
class Command:
    """Options with which a compiler runs ptxas.

    Options of a candidate follow the compiler's own: ptxas uses the last one of an option.
    """

    options: tuple[str, ...]
    """The compiler's own options, without the architecture and the files."""
    target: str
    """Such as ``sm_90a``."""

    def arguments(self, candidate_options: Sequence[str] = ()) -> tuple[str, ...]:
        """All options of a run, without the files."""
        verbose = () if _VERBOSE in self.options else (_VERBOSE,)
        return (*self.options, *verbose, f"--gpu-name={self.target}", *candidate_options)


def read_target(ptx: str) -> str:
    """The architecture of the directive ``.target``; raises :class:`BadInput` without one."""
    match = _TARGET.search(ptx)
    if match is None:
        raise BadInput("the PTX has no .target directive; give the complete output of a compiler")
    return match.group(1)


def triton_commands(ptx: str, options: Mapping[str, str]) -> list[Command]:
    """The commands with which releases of Triton run ptxas for these compile options.

    Releases differ in options that the compiled kernel does not name, so there are several; the
    one that gives the compiler's own machine code is the right one.  ``options`` are Triton's, as
    text: ``enable_fp_fusion`` and ``ptx_options`` count.
    """
    fmad = ["--fmad=false"] if options.get("enable_fp_fusion") == "False" else []
    extra = (options.get("ptx_options") or "").replace("None", "").split()
    variants: tuple[list[str], ...] = (["--regAllocOptLevel=2"], [])
    target = read_target(ptx)
    return [
        Command(("-lineinfo", *fmad, _VERBOSE, *allocation, *extra), target)
        for allocation in variants
    ]


def plain_command(ptx: str, options: Sequence[str] = (), target: str | None = None) -> Command:
    """The command for PTX whose compiler is unknown.

    ``options``: those of its build, such as those of ``nvcc -Xptxas``.  ``target``: architecture to
    assemble for (None: the directive ``.target``).
    """
    return Command(tuple(options), target or read_target(ptx))
