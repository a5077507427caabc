"""Options of ``tune`` and ``bench``: how outputs are compared, and by which clock."""

from __future__ import annotations

from typing import Annotated

import typer

from nostall.core import BadInput, Tolerance
from nostall.gpu import TIMING_METHODS, TimingMethod

ChecksOption = Annotated[
    int,
    typer.Option(
        help="Random inputs on which all outputs of the result are compared with the original's."
    ),
]
ToleranceOption = Annotated[
    str | None,
    typer.Option(
        metavar="RTOL[,ATOL]",
        help="How far floating-point outputs may be from the original's; not a bit when not given.",
    ),
]
TimingOption = Annotated[
    str,
    typer.Option(
        help="graph (many launches in a CUDA graph), events (launch by launch) or cupti (the "
        "kernel's own time stamps)."
    ),
]
ColdOption = Annotated[
    bool, typer.Option("--cold", help="Overwrite the L2 cache before each launch.")
]
SanitizerOption = Annotated[
    bool,
    typer.Option(
        "--sanitizer",
        help="Run the result under compute-sanitizer too (memcheck, racecheck, synccheck).",
    ),
]


def clock(name: str) -> TimingMethod:
    """The clock of that name; :class:`BadInput` when there is none."""
    for known in TIMING_METHODS:
        if known == name:
            return known
    raise BadInput(
        f"--timing is {name!r}; give {', '.join(TIMING_METHODS[:-1])} or {TIMING_METHODS[-1]}"
    )


def tolerance(text: str | None) -> Tolerance | None:
    return None if text is None else Tolerance.parse(text)


def enough(checks: int) -> int:
    """``checks``, of which one at least is needed."""
    if checks < 1:
        raise BadInput(f"--checks is {checks}; give 1 or more random inputs, such as 16")
    return checks
