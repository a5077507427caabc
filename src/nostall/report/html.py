"""HTML pages of results: templates with their style sheets inside, and parts of plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from nostall import __version__
from nostall.core.text.plurals import pluralize


def svg_tag(width: float, height: float, label: str) -> str:
    """The opening tag of a plot of this size in pixels."""
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    )


def svg_text(x: float, y: float, text: str, anchor: str, style: str) -> str:
    """A text of a plot; ``anchor`` and ``style`` are its SVG anchor and CSS class."""
    position = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{style}" {position}>{escape(text)}</text>'


def render(
    template: str,
    *,
    styles: Sequence[str] = ("page.css", "workload.css"),
    scripts: Sequence[str] = (),
    filters: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    **values: Any,
) -> str:
    """The page of a template of this package, with the style sheets and the scripts inside.

    ``filters`` are those of the template beside the ones that all pages share.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        loader=FunctionLoader(_read_template),
    )  # fmt: skip
    environment.filters["percent"] = lambda value: f"{value:.1%}"
    environment.filters["times"] = lambda value: f"{value:.2f}×"
    environment.filters["ms"] = lambda value: f"{value * 1e3:,.3f} ms"
    environment.filters["several"] = pluralize
    environment.filters["words"] = lambda name: str(name).replace("_", " ")
    environment.filters |= filters
    style, script = (Markup("".join(map(_read_template, names))) for names in (styles, scripts))
    page = environment.get_template(template)
    return page.render(style=style, script=script, version=__version__, **values)


def _read_template(name: str) -> str:
    return resources.files("nostall.report").joinpath("templates", name).read_text("utf-8")
