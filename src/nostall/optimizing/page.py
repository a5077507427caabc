"""HTML page of ``nostall optimize``: the waterfall, what was tried, and bounds."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup, escape

from nostall.core.files.atomic import write_text_atomically
from nostall.core.measurement import Comparison
from nostall.core.text.plurals import pluralize
from nostall.optimizing.result import Attempt, Result, drifts, interval
from nostall.report.html import render
from nostall.report.units import Scale


class _Bar(NamedTuple):
    """A state of the program: its name, the seconds of a step and the ends of their interval."""

    name: str
    seconds: float
    low: float
    high: float


def write_page(result: Result, path: Path) -> Path:
    """Write the page of ``result``, whose program was watched, to ``path``; returns ``path``."""
    assert result.facts is not None
    raw = result.facts.raw
    final = result.together.comparison if result.kept and result.together else None
    step = result.together.seconds[0] if result.together else result.facts.step_seconds
    final_step = step / final.ratio if final else step
    milliseconds = Scale("s", final_step)
    page = render(
        "program.html",
        command=shlex.join(result.command),
        name=_name(result.command),
        lead=_lead(result, final),
        device=raw["device"],
        gain=f"{final.ratio:.3f}×" if final else "",
        gain_interval=_intervals(final) if final else "",
        milliseconds=milliseconds,
        step=step,
        final_step=final_step,
        peak=f"{raw['peak_bytes'] / 2**30:.2f} GiB" if raw["peak_bytes"] else "",
        notes=result.notes,
        certificate=result.certificate,
        waterfall=_waterfall(_bars(result), milliseconds),
        lines=[attempt.level.line for attempt in result.kept],
        attempts=[_row(attempt) for attempt in result.attempts],
        levels=result.levels,
        on_cpu=not raw["cuda"],
        provenance=[
            *((name, value) for name, value in result.machine.items() if value),
            ("threads of PyTorch", raw["threads"]),
            ("modules", ", ".join(raw["roots"])),
            ("optimisers", ", ".join(raw["optimizers"])),
            ("ranks", raw["world"]),
            ("watched steps", len(raw["steps"])),
            ("a step ends with", raw["step_is"] or result.step or "a step of the optimisers"),
        ],
    )
    write_text_atomically(path, page)
    return path


def _row(attempt: Attempt) -> dict[str, str]:
    c = attempt.proof.comparison if attempt.proof else None
    reason = attempt.reason
    if c is not None:  # the columns have the numbers
        null = f"null [{c.null_low:.3f}, {c.null_high:.3f}]"
        reason = reason.replace(f": {interval(c)}, {null}", " beyond the noise")
        reason = reason.replace(f"{interval(c)} times as fast", "faster beyond the noise")
        if drifts(c):
            reason += "; the original differs from itself: measure again on a quieter machine"
    return {
        "name": attempt.level.name, "outcome": attempt.outcome, "reason": reason,
        "result_class": attempt.result_class, "gain": interval(c) if c else "–",
        "null": _null(c) if c else "–",
    }  # fmt: skip


def _bars(result: Result) -> list[_Bar]:
    """The original, the state after each kept change, and all changes measured together."""
    together = result.together
    if not result.kept or together is None or together.comparison is None:
        return []
    original = together.seconds[0]
    bars = [_Bar("original", original, original, original)]
    before = original
    for attempt in result.attempts:
        if attempt.outcome not in ("kept", "replaced"):
            continue
        assert attempt.proof is not None and attempt.proof.comparison is not None
        c = attempt.proof.comparison
        name = f"+ {attempt.level.name}"
        bars.append(_Bar(name, before / c.ratio, before / c.high, before / c.low))
        before /= c.ratio
    c = together.comparison
    bars.append(_Bar("measured together", original / c.ratio, original / c.high, original / c.low))
    return bars


def _waterfall(bars: list[_Bar], milliseconds: Scale) -> Markup:
    """One horizontal bar for each state, as wide as its time; empty without bars."""
    longest = max((bar.seconds for bar in bars), default=0.0)
    rows = []
    for row, bar in enumerate(bars):
        style = "c-compute" if row in (0, len(bars) - 1) else "c-memory"
        text = milliseconds(bar.seconds)
        if bar.high > bar.low:
            text += f" ({milliseconds.number(bar.low)} to {milliseconds.number(bar.high)})"
        rows.append(
            f'<div class="share"><span class="name">{escape(bar.name)}: {text}</span>'
            f'<span class="track"><i class="{style}" style="width:{bar.seconds / longest:.2%}">'
            "</i></span></div>"
        )
    return Markup(f'<div class="states">{"".join(rows)}</div>' if rows else "")


def _name(command: list[str]) -> str:
    """The command with the file name of its program alone; the page has the whole one, too."""
    return shlex.join([Path(command[0]).name, *command[1:]])


def _lead(result: Result, final: Comparison | None) -> str:
    """The answer of the page in a sentence."""
    if final is not None:
        names = " and ".join(attempt.level.name for attempt in result.kept)
        over = f" The time was over before all was tried ({result.limit})." if result.limit else ""
        return f"{final.ratio:.3f}× as fast, measured on the whole step: {names}.{over}"
    tried = ", ".join(attempt.level.name for attempt in result.attempts)
    if result.limit:
        return f"Nothing is kept when the time is over ({result.limit}): {_untried(result, tried)}."
    if not tried:
        return "Nothing was tried: the page shows what each level can gain at most."
    return f"Nothing that was tried makes a step faster: {tried}. The program stays as it is."


def _untried(result: Result, tried: str) -> str:
    """What was tried in vain, and what the time did not suffice for."""
    done = {attempt.level.name for attempt in result.attempts}
    left = [each.name for each in result.levels if each.change and each.name not in done]
    text = f"not proven faster: {tried}; " if tried else ""
    return f"{text}{pluralize(len(left), 'level')} not tried{': ' if left else ''}{', '.join(left)}"


def _intervals(comparison: Comparison) -> str:
    """The intervals of a ratio and of the original beside itself, in words."""
    return (
        f"95 % interval {comparison.low:.3f} to {comparison.high:.3f}; the original beside itself "
        f"{_null(comparison)}"
    )


def _null(comparison: Comparison) -> str:
    """The interval of the original beside itself, which includes 1 unless the times drift."""
    flag = ", without 1" if drifts(comparison) else ""
    return f"{comparison.null_low:.3f} to {comparison.null_high:.3f}{flag}"
