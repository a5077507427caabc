"""HTML page of a tuning run: one file that contains its style sheet, script and data."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from nostall import __version__
from nostall.core.files.atomic import write_text_atomically
from nostall.report.tune.ablation import has_ablation, load_ablation
from nostall.report.tune.assembler_page import is_assembler_run, render_assembler
from nostall.report.tune.episodes import count_annealing_trials, draw_returns
from nostall.report.tune.listing_data import instruction_texts, page_data
from nostall.report.tune.run_data import RunData, load_run
from nostall.report.tune.sample_spread import draw_samples, load_comparison
from nostall.report.tune.search_curve import count_drawn, draw_search_curve, find_improvements
from nostall.report.tune.side_by_side import compare_blocks
from nostall.report.tune.stalls import compare_stalls
from nostall.report.tune.summary import make_summary

REPORT_FILE = "report.html"
MAX_IMPROVEMENTS = 40
"""Rows of the table of improvements; the latest are shown."""


def write_report(path: Path) -> Path:
    """Write the report into a run directory of ``nostall tune``; returns the path of the page.

    Raises :class:`~nostall.core.errors.BadRun` if the directory lacks a part that the page needs.
    """
    page = render_assembler(path) if is_assembler_run(path) else render(load_run(path))
    target = path / REPORT_FILE
    write_text_atomically(target, page)
    return target


def render(run: RunData) -> str:
    """The HTML text of the page."""
    blocks = compare_blocks(run.original, run.candidate)
    stalls, no_stalls_reason = compare_stalls(run)
    comparison, no_samples_reason = load_comparison(run)
    ablation = load_ablation(run.path)
    notes = [*run.notes]
    if ablation is None and has_ablation(run.path):
        notes.append("ablation.json cannot be read")
    summary = make_summary(run, blocks, comparison)
    improvements = find_improvements(run.trials)
    num_annealing = count_annealing_trials(run.trials)
    return (
        _environment()
        .from_string(_read_template("page.html"))
        .render(
            summary=summary,
            candidate_name=run.candidate_name,
            notes=notes,
            search_curve=draw_search_curve(run.trials, summary.scale, summary.kind, num_annealing),
            drawn=count_drawn(run.trials),
            num_episodes=len(run.episodes),
            num_rollouts=len({e.rollout for e in run.episodes}),
            returns=draw_returns(run.episodes, summary.kind),
            num_failures=sum(t.failure is not None for t in run.trials),
            improvements=improvements[-MAX_IMPROVEMENTS:],
            num_improvements=len(improvements) - 1,
            ablation=ablation,
            comparison=comparison,
            no_samples_reason=no_samples_reason,
            samples=draw_samples(comparison) if comparison else "",
            stalls=stalls,
            no_stalls_reason=no_stalls_reason,
            longest_stalls=stalls.longest_stalls(instruction_texts(run.original)) if stalls else [],
            style=Markup(_read_template("page.css")),
            script=Markup(
                _read_template("copy.js")
                + _read_template("panel.js")
                + _read_template("listing.js")
            ),
            data=_embed(page_data(run, blocks, stalls)),
            version=__version__,
        )
    )


def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["cycles"] = lambda value: f"{value:,.0f}"
    environment.filters["change"] = _change
    return environment


def _change(value: float) -> str:
    """A signed whole number, with a typographic minus sign."""
    return f"{value:+,.0f}".replace("-", "\u2212") if abs(value) >= 0.5 else "0"


def _read_template(name: str) -> str:
    return resources.files("nostall.report").joinpath("templates", name).read_text("utf-8")


def _embed(data: dict[str, Any]) -> Markup:
    """JSON text that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
