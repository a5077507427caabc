"""The command ``nostall verify``: check that a changed cubin is a safe re-scheduling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.console import Format, FormatOption, QuietOption, out, show_json, show_table
from nostall.cli.inputs import read_cubin
from nostall.core.plurals import pluralize
from nostall.sass import Verdict
from nostall.sass.safety import validate
from nostall.sass.safety import verify as verify_cubins

MAX_FINDINGS = 50
"""Findings in the table; JSON has all of them."""

OriginalArgument = Annotated[Path, typer.Argument(help="The compiler's cubin.")]
CandidateArgument = Annotated[
    Path | None,
    typer.Argument(help="The changed cubin; without it, the original alone is checked."),
]
ImageOption = Annotated[str | None, typer.Option(help="Image of a fatbin to use, such as sm_90.")]


def verify(
    original: OriginalArgument,
    candidate: CandidateArgument = None,
    arch: ImageOption = None,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Check that a changed cubin is a safe re-scheduling.

    Safe means: it computes what the original computes, with any timing of the memory accesses.

    Exit code 0: safe; 1: unsafe; 2: an input cannot be read.
    """
    data = read_cubin(original, arch)
    if candidate is None:
        verdict = validate(data)
    else:
        verdict = verify_cubins(data, read_cubin(candidate, arch))
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
            pluralize(len(verdict.findings), "finding"),
            ("kind", "place", "instruction", "reason", "part"),
            [
                (f.kind, f"{f.function}+{f.offset:#x}", f.instruction, f.reason, f.part)
                for f in verdict.findings[:MAX_FINDINGS]
            ],
        )
    answer = "safe" if verdict.safe else "UNSAFE"
    checked = pluralize(verdict.checked, "instruction")
    out.print(f"{answer}: {checked} checked, {pluralize(len(verdict.findings), 'finding')}")
