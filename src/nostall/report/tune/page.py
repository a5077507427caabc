"""Put the page together: one HTML file with style, script and data inside."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from nostall import __version__
from nostall.core.files import write_atomically
from nostall.report.tune.ablation import carried, has_ablation
from nostall.report.tune.episodes import returns, seeded
from nostall.report.tune.listing_data import page_data, texts
from nostall.report.tune.run_data import LoadedRun, load
from nostall.report.tune.sample_spread import compared, spread
from nostall.report.tune.search_curve import curve, improvements
from nostall.report.tune.side_by_side import lineup
from nostall.report.tune.stalls import explain
from nostall.report.tune.summary import summarise

NAME = "report.html"
LAST_IMPROVEMENTS = 40


def write_report(path: Path) -> Path:
    """Write ``report.html`` into a run directory made by ``nostall tune``; returns its path.

    The page is one file that needs no network.  Raises :class:`~nostall.core.errors.BadRun` when
    the directory lacks what the page is about.
    """
    page = render(load(path))
    target = path / NAME
    write_atomically(target, page.encode())
    return target


def render(run: LoadedRun) -> str:
    """The page as text."""
    blocks = lineup(run.original, run.candidate)
    waits, no_waits = explain(run)
    found, no_samples = compared(run)
    parts = carried(run.path)
    odd = ["ablation.json cannot be read"] if parts is None and has_ablation(run.path) else []
    head = summarise(run, blocks)
    steps = improvements(run.trials)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["cycles"] = lambda value: f"{value:,.0f}"
    environment.filters["change"] = _change
    template = environment.from_string(_read("page.html"))
    return template.render(
        head=head,
        what=run.what,
        notes=[*run.notes, *odd],
        curve=curve(run.trials, head.scale, head.kind, seeded(run.trials)),
        seeded=seeded(run.trials),
        episodes=len(run.episodes),
        rollouts=len({e.rollout for e in run.episodes}),
        returns=returns(run.episodes, head.kind),
        failures=sum(t.failure is not None for t in run.trials),
        steps=steps[-LAST_IMPROVEMENTS:],
        improvements=len(steps) - 1,
        carried=parts,
        compared=found,
        no_samples=no_samples,
        spread=spread(found) if found else "",
        waits=waits,
        no_waits=no_waits,
        worst=waits.worst(texts(run.original)) if waits else [],
        style=Markup(_read("page.css")),
        script=Markup(_read("panel.js") + _read("listing.js")),
        data=_embedded(page_data(run, blocks, waits)),
        version=__version__,
    )


def _change(value: float) -> str:
    """A signed whole number, with a true minus sign."""
    return f"{value:+,.0f}".replace("-", "\u2212") if abs(value) >= 0.5 else "0"


def _read(name: str) -> str:
    return resources.files("nostall.report").joinpath("templates", name).read_text("utf-8")


def _embedded(data: dict[str, Any]) -> Markup:
    """JSON that may stand inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
