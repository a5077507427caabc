"""The command ``nostall verify``: check that a changed cubin computes what the original does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from nostall.cli.options.inputs import MeasuredLatenciesOption, read_bytes, read_cubin
from nostall.cli.terminal.console import (
    Format,
    FormatOption,
    QuietOption,
    out,
    show_json,
    show_table,
)
from nostall.core import BadInput
from nostall.core.text.plurals import pluralize
from nostall.tuning.settings import (
    DEPENDENT_CUBIN_FILE,
    DEPENDENT_RECIPE_FILE,
    PTX_FILE,
    RECIPE_FILE,
)

if TYPE_CHECKING:
    from nostall.sass import Verdict
    from nostall.tuning.assembler.recipes.reverify import RecipeVerdict

MAX_FINDINGS = 50
"""Findings in the table; JSON has all of them."""

OriginalArgument = Annotated[
    Path, typer.Argument(help="The compiler's cubin, or a run directory of `nostall tune`.")
]
CandidateArgument = Annotated[
    Path | None,
    typer.Argument(help="The changed cubin; without it, the original alone is checked."),
]
ImageOption = Annotated[str | None, typer.Option(help="Image of a fatbin to use, such as sm_90.")]


def verify(
    original: OriginalArgument,
    candidate: CandidateArgument = None,
    arch: ImageOption = None,
    measured_latencies: MeasuredLatenciesOption = False,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Check that a changed cubin is a safe re-scheduling.

    Safe means: it computes what the original computes, with any timing of the memory accesses. The
    result of a run of the assembler search is checked by its recipe: proof of its PTX, assembly
    anew, hazards of the machine code.

    Exit code 0: safe; 1: unsafe; 2: an input cannot be read.
    """
    if original.is_dir():
        if measured_latencies:
            raise BadInput(
                "--measured-latencies is an option of two cubins, but a run directory was given; "
                "leave the option out"
            )
        _verify_run(original, candidate, format)
        return
    from nostall.sass.safety import validate
    from nostall.sass.safety import verify as verify_cubins

    data = read_cubin(original, arch)
    if candidate is None:
        verdict = validate(data, measured_latencies=measured_latencies)
    else:
        changed = read_cubin(candidate, arch)
        verdict = verify_cubins(data, changed, measured_latencies=measured_latencies)
    _show(verdict, format, quiet)
    if not verdict.safe:
        raise typer.Exit(1)


def _verify_run(folder: Path, candidate: Path | None, format: Format) -> None:
    """Verify the result of a run of the assembler search by its recipe."""
    if candidate is not None:
        raise BadInput(
            f"{folder} is a folder and {candidate} was given as well; give one run directory, or "
            "two cubins"
        )
    present = [files for files in _RESULTS if (folder / files.recipe).exists()]
    if not present:
        cubins = [folder / "original.cubin", folder / "best.cubin"]
        named = f": {cubins[0]} {cubins[1]}" if all(path.exists() for path in cubins) else ""
        raise BadInput(
            f"{folder} has no {RECIPE_FILE}; it is not a run of the assembler search with a gain; "
            f"give two cubins{named}"
        )
    ptx = read_bytes(folder / PTX_FILE).decode("utf-8", "replace")
    verdicts = {files.cubin: _verify_result(folder, files, ptx) for files in present}
    if format is Format.JSON:
        first, *others = verdicts.items()
        more = {name: {"safe": v.safe, **asdict(v)} for name, v in others}
        show_json({"safe": first[1].safe, **asdict(first[1]), **more})
    else:
        for name, verdict in verdicts.items():
            label = "" if name == _RESULTS[0].cubin else f"{name}: "
            word = "safe" if verdict.safe else "UNSAFE"
            out.print(f"{label}{word}: {describe_verdict(verdict)}")
    if not all(verdict.safe for verdict in verdicts.values()):
        raise typer.Exit(1)


class _ResultFiles(NamedTuple):
    """Files of a result in a run directory."""

    cubin: str
    recipe: str


_RESULTS = (
    _ResultFiles("best.cubin", RECIPE_FILE),
    _ResultFiles(DEPENDENT_CUBIN_FILE, DEPENDENT_RECIPE_FILE),
)
"""The result of the search, and that for dependent launches."""


def _verify_result(folder: Path, files: _ResultFiles, ptx: str) -> RecipeVerdict:
    from nostall.sass.safety.dependent_launch import check_wait
    from nostall.tuning.assembler.recipes.recipe import Recipe
    from nostall.tuning.assembler.recipes.reverify import verify_recipe

    path = folder / files.recipe
    recipe = Recipe.from_bytes(read_bytes(path), str(path))
    cubin = read_bytes(folder / files.cubin)
    verdict = verify_recipe(recipe, ptx, cubin)
    if files.cubin == DEPENDENT_CUBIN_FILE and verdict.safe:
        return replace(verdict, objection=check_wait(cubin, recipe.kernel))
    return verdict


def describe_verdict(verdict: RecipeVerdict, shown: Collection[str] = ()) -> str:
    """What was checked, or why the result is refused; without a note that is ``shown`` already."""
    if not verdict.safe:
        return verdict.objection
    how = verdict.note or "the same machine code was assembled from it here"
    parts = ["PTX proved equal", *([] if how in shown else [how])]
    return "; ".join([*parts, f"{verdict.checked} native instructions checked"])


def _show(verdict: Verdict, format: Format, quiet: bool) -> None:
    if format is Format.JSON:
        findings = [finding.as_record() for finding in verdict.findings]
        remarks = [remark.as_record() for remark in verdict.remarks]
        show_json(
            {
                "safe": verdict.safe,
                "checked": verdict.checked,
                "findings": findings,
                "remarks": remarks,
            }
        )
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
    for remark in () if quiet else verdict.remarks[:MAX_FINDINGS]:
        out.print(f"remark on the original: {remark}")
    answer = "safe" if verdict.safe else "UNSAFE"
    checked = pluralize(verdict.checked, "instruction")
    out.print(f"{answer}: {checked} checked, {pluralize(len(verdict.findings), 'finding')}")
