"""Options of ``tune`` and ``bench`` for checking and timing: their help texts and parsers."""

from __future__ import annotations

from typing import Annotated

import typer

from nostall.core import BadInput, Tolerance
from nostall.core.text.suggest import unknown
from nostall.gpu import TIMING_METHODS, TimingMethod

ChecksOption = Annotated[
    int,
    typer.Option(
        help="Number of random inputs on which the outputs are compared with the original's."
    ),
]
ToleranceOption = Annotated[
    str | None,
    typer.Option(
        metavar="RTOL[,ATOL]",
        help="Allowed difference of floating-point outputs; default: none, they must be equal bit "
        "by bit.",
    ),
]
TimingOption = Annotated[
    str,
    typer.Option(
        help="graph (many launches in a CUDA graph), events (launch by launch) or cupti (time "
        "stamps of the kernel)."
    ),
]
ColdOption = Annotated[
    bool, typer.Option("--cold", help="Overwrite the L2 cache before each launch.")
]
SanitizerOption = Annotated[
    bool,
    typer.Option(
        "--sanitizer",
        help="Run the result under compute-sanitizer, too (memcheck, racecheck, synccheck).",
    ),
]


def parse_timing(name: str) -> TimingMethod:
    """The timing method ``name``.  Raises :class:`BadInput` if it is unknown."""
    for method in TIMING_METHODS:
        if method == name:
            return method
    raise BadInput(unknown("--timing", name, TIMING_METHODS))


def parse_tolerance(text: str | None) -> Tolerance | None:
    return None if text is None else Tolerance.parse(text)


def require_checks(checks: int) -> int:
    """Return ``checks``.  Raises :class:`BadInput` if it is less than 1."""
    if checks < 1:
        raise BadInput(f"--checks is {checks}; give 1 or more random inputs, such as 16")
    return checks
