"""Put the page of a fusion plan together: one HTML file with style and figures inside."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from nostall import __version__
from nostall.core import Run
from nostall.core.files import write_atomically
from nostall.report.fusion.picture import MOST_DRAWN, picture
from nostall.report.tune.page import NAME
from nostall.report.units import Scale, amount, several
from nostall.tuning.fusing.document import FILE, Document, Pass, load_document

SCHEMES = {
    "thread": "values stay in a thread",
    "warp": "several rows a warp, reductions by shuffles",
    "block": "a row held by all warps of a block",
    "looped": "the row is read again for each level of reductions",
    "shared": "what several levels need is kept in shared memory",
    "split": "a row shared by several programs, partial results in memory",
    "column": "sums down columns beside rows, two kernels",
}
"""In the words of docs/fusion_codegen.md."""


def is_fusion(path: Path) -> bool:
    """Whether a run directory is one of ``nostall fuse``."""
    return (path / FILE).exists()


def write_page(path: Path) -> Path:
    """Write ``report.html`` into a run directory made by ``nostall fuse``; returns its path.

    Raises :class:`~nostall.core.errors.BadRun` where ``fusion.json`` or ``run.json`` cannot be
    used.
    """
    document = load_document(path)
    page = render(document, Run.open(path).record.command)
    target = path / NAME
    write_atomically(target, page.encode())
    return target


def render(document: Document, command: str) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["bytes"] = amount
    environment.filters["several"] = several
    environment.filters["us"] = Scale("s", 1e-6).number
    template = environment.from_string(_read("fusion.html"))
    return template.render(
        document=document,
        passes=[
            (found, _facts(found), picture(found, document.measured)) for found in document.passes
        ],
        schemes=SCHEMES,
        most_drawn=MOST_DRAWN,
        command=command,
        style=Markup(_read("page.css") + _read("fusion.css")),
        script=Markup(_read("fusion.js")),
        version=__version__,
    )


def _facts(found: Pass) -> dict[str, Any]:
    """What the template would have to compute."""
    before = sum(kernel.bytes_before for kernel in found.kernels)
    after = sum(kernel.bytes_after for kernel in found.kernels)
    return {
        "before": before,
        "after": after,
        "opaque": sum(node.kind == "opaque" for node in found.nodes),
        "stay": sum(reason.count for reason in found.refused),
        "numbers": {kernel.name: at + 1 for at, kernel in reversed([*enumerate(found.kernels)])},
    }


def _read(name: str) -> str:
    return resources.files("nostall.report").joinpath("templates", name).read_text("utf-8")
