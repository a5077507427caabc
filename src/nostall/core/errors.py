"""One class per cause, all under :class:`NostallError`.

Every message says four things: what went wrong, the value that was met, what would have been
allowed, and what to do next.  ``exit_code`` is what the command line returns for the cause
(0 done, 1 the answer is no, 2 bad usage or bad input, 3 a part of the environment is missing).
"""

from __future__ import annotations

from typing import ClassVar


class NostallError(Exception):
    """Root of every error that nostall raises on purpose."""

    exit_code: ClassVar[int] = 2


class BadInput(NostallError):
    """A file, an option or a value that the user gave cannot be used."""


class BadBinary(BadInput):
    """A binary is not a cubin that nostall can read."""


class UnsupportedArchitecture(BadBinary):
    """A cubin is, or would be, for an architecture that nostall does not know."""


class BadLaunch(BadInput):
    """A launch specification is incomplete or contradicts the kernel."""


class BadRun(BadInput):
    """A run directory cannot be read, resumed or written."""


class BadJob(BadInput):
    """A training job, or a table of them, cannot be described by the record nostall uses."""


class BadHardware(BadInput):
    """A hardware description is incomplete, contradicts itself, or lacks what a job needs."""


class BadTrace(BadInput):
    """A profiler trace cannot be read, or holds nothing that can be analysed."""


class MissingPart(NostallError):
    """Something outside nostall (a tool, a package, a device) is not there."""

    exit_code: ClassVar[int] = 3


class IllegalMove(NostallError):
    """A move was applied to a state in which its pre-condition does not hold."""

    exit_code: ClassVar[int] = 1


class ContractBroken(NostallError):
    """A space, objective or search does not keep the contract of :mod:`nostall.core`."""

    exit_code: ClassVar[int] = 1
