"""HTML page of ``nostall optimize``: the waterfall, what was tried, and bounds."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup, escape

from nostall.core.files.atomic import write_text_atomically
from nostall.optimizing.result import Attempt, Result, interval
from nostall.report.html import render, svg_tag, svg_text

# Pixels.
WIDTH, LABEL_WIDTH, BAR_HEIGHT = 1280, 330, 30


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
    page = render(
        "program.html",
        command=shlex.join(result.command),
        device=raw["device"],
        gain=f"{final.ratio:.3f}×" if final else "",
        gain_interval=interval(final) if final else "",
        step=result.together.seconds[0] if result.together else result.facts.step_seconds,
        peak=f"{raw['peak_bytes'] / 2**30:.2f} GiB" if raw["peak_bytes"] else "",
        notes=result.notes,
        certificate=result.certificate,
        waterfall=_waterfall(_bars(result)),
        lines=[attempt.level.line for attempt in result.kept],
        attempts=[_row(attempt) for attempt in result.attempts],
        levels=result.levels,
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
    return {
        "name": attempt.level.name, "outcome": attempt.outcome, "reason": attempt.reason,
        "result_class": attempt.result_class, "gain": interval(c) if c else "–",
        "null": f"{c.null_low:.3f} to {c.null_high:.3f}" if c else "–",
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


def _waterfall(bars: list[_Bar]) -> Markup:
    """One horizontal bar for each state; empty without bars."""
    if not bars:
        return Markup("")
    room = WIDTH - LABEL_WIDTH - 130
    longest = max(bar.high for bar in bars)
    svg = [svg_tag(WIDTH, len(bars) * BAR_HEIGHT + 6, "seconds of a step, state by state")]
    for row, bar in enumerate(bars):
        y, width = row * BAR_HEIGHT, room * bar.seconds / longest
        low, high = (LABEL_WIDTH + room * end / longest for end in (bar.low, bar.high))
        style = "c-compute" if row in (0, len(bars) - 1) else "c-memory"
        text = f"{1e3 * bar.seconds:.4g} ms"
        svg += [
            svg_text(LABEL_WIDTH - 8, y + 19, bar.name, "end", "label"),
            f'<rect class="{style}" x="{LABEL_WIDTH}" y="{y + 4}" width="{width:.1f}" '
            f'height="{BAR_HEIGHT - 8}"><title>{escape(bar.name)}: {text}</title></rect>',
            svg_text(max(high, LABEL_WIDTH + width) + 8, y + 19, text, "start", "label"),
        ]
        if high > low:
            middle = y + BAR_HEIGHT / 2
            svg.append(f'<path class="mark" d="M{low:.1f} {middle}H{high:.1f}"/>')
    return Markup("".join([*svg, "</svg>"]))
