"""``nostall verify A.cubin B.cubin``: is B a safe re-scheduling of A?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.console import Format, FormatOption, QuietOption, out, show_json, show_table
from nostall.cli.inputs import read_cubin
from nostall.sass import Verdict
from nostall.sass.safety import validate
from nostall.sass.safety import verify as judge


def verify(
    original: Annotated[Path, typer.Argument(help="The compiler's cubin.")],
    candidate: Annotated[
        Path | None, typer.Argument(help="The changed cubin; without it, judge A alone.")
    ] = None,
    arch: Annotated[str | None, typer.Option(help="Which image of a fatbin to take.")] = None,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Prove that a changed cubin computes what the original does, on any timing.

    Exit code 0: safe; 1: refused; 2: an input cannot be read.
    """
    first = read_cubin(original, arch)
    verdict = validate(first) if candidate is None else judge(first, read_cubin(candidate, arch))
    _show(verdict, format, quiet)
    if not verdict.safe:
        raise typer.Exit(1)


def _show(verdict: Verdict, format: Format, quiet: bool) -> None:
    if format is Format.JSON:
        findings = [finding.as_record() for finding in verdict.findings]
        show_json({"safe": verdict.safe, "checked": verdict.checked, "findings": findings})
        return
    if verdict.findings and not quiet:
        show_table(
            f"{len(verdict.findings)} findings",
            ("kind", "where", "instruction", "reason", "half"),
            [
                (f.kind, f"{f.function}+{f.offset:#x}", f.instruction, f.reason, f.part)
                for f in verdict.findings[:50]
            ],
        )
    answer = "safe" if verdict.safe else "REFUSED"
    out.print(f"{answer}: {verdict.checked} instructions checked, {len(verdict.findings)} findings")
