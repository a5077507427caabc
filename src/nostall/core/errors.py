"""Exception classes, one for each cause, with the exit code of the command line.

Each message says what is wrong, which value was met, what is allowed and what to do next.
Exit codes: 0 done, 1 the answer is no, 2 bad usage or bad input, 3 a tool, package or device is
missing, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

from typing import ClassVar

MAX_LINE = 200
"""Characters of an error message that :func:`one_line` keeps."""


class NostallError(Exception):
    """Base class of all errors that nostall raises on purpose."""

    exit_code: ClassVar[int] = 2


class BadInput(NostallError):
    """A file, an option or a value given by the user cannot be used."""


class BadBinary(BadInput):
    """A binary is not a cubin that nostall can read."""


class UnsupportedArchitecture(BadBinary):
    """A cubin is for, or must be compiled for, a GPU architecture that nostall does not support."""


class BadLaunch(BadInput):
    """A launch specification is incomplete or contradicts the kernel."""


class BadRun(BadInput):
    """A run directory cannot be read, resumed or written."""


class BadJob(BadInput):
    """A training job, or a table of jobs, does not fit nostall's job record."""


class BadHardware(BadInput):
    """A hardware description is incomplete, contradicts itself, or lacks a value a job needs."""


class BadTrace(BadInput):
    """A profiler trace cannot be read, or contains no activity that can be analysed."""


class MissingPart(NostallError):
    """A tool, package or device outside nostall is missing."""

    exit_code: ClassVar[int] = 3


class IllegalMove(NostallError):
    """A move was applied to a state in which its pre-condition does not hold."""

    exit_code: ClassVar[int] = 1


class ContractBroken(NostallError):
    """A space, objective or search violates its contract in :mod:`nostall.core`."""

    exit_code: ClassVar[int] = 1


class Interrupted(NostallError):
    """Ctrl-C ended a command; the message says what is kept and how to go on."""

    exit_code: ClassVar[int] = 130


def one_line(error: BaseException) -> str:
    """The error's class and the first line of its message, at most :data:`MAX_LINE` characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:MAX_LINE]}"
