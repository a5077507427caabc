"""Terminal output of ``nostall optimize``: bounds, attempts, and the lines a person would write."""

from __future__ import annotations

from collections.abc import Sequence

from nostall.cli.terminal.console import out, show_table
from nostall.optimizing.diagnosis import Level
from nostall.optimizing.result import Result, interval


def show_result(result: Result) -> None:
    """Print the levels, the attempts, what is kept and notes."""
    if result.facts is not None:
        _show_levels(result.levels, str(result.facts.raw["device"]))
    if result.attempts:
        show_table(
            "tried on the program's own steps",
            ("change", "outcome", "results", "why"),
            [(a.level.name, a.outcome, a.result_class, a.reason) for a in result.attempts],
        )
    if result.certificate:
        out.print(f"certificate of no gain: {result.certificate}")
    for note in result.notes:
        out.print(f"note: {note}")
    if result.facts is not None and not result.certificate:
        _show_kept(result)


def _show_levels(levels: Sequence[Level], device: str) -> None:
    show_table(
        f"what each level can gain at most; measured on {device}",
        ("level", "share", "at most", "why"),
        [
            (
                level.name,
                "-" if level.share is None else f"{level.share:.0%}",
                "no bound" if level.bound is None else f"{level.bound:.2f}x",
                level.reason,
            )
            for level in levels
        ],
    )


def _show_kept(result: Result) -> None:
    together = result.together
    if not result.kept:
        if result.attempts:
            out.print("nothing is kept: no change was proven to make the step faster")
        return
    assert together is not None and together.comparison is not None
    before = 1e3 * together.seconds[0]
    after = before / together.comparison.ratio  # of pairs of blocks, as the page shows it
    out.print(
        f"step: {before:.4g} ms -> {after:.4g} ms, {interval(together.comparison)} times as fast, "
        f"null [{together.comparison.null_low:.3f}, {together.comparison.null_high:.3f}]"
    )
    if result.again is not None and result.again.comparison is not None:
        out.print(f"second start: {interval(result.again.comparison)} times as fast")
    out.print("what a person would write:")
    for attempt in result.kept:
        out.print(f"  {attempt.level.line}  ({attempt.result_class})")
