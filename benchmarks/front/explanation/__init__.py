"""Figures in the sentences of ``docs/explanation``, written from committed results.

A figure is the text between ``<!-- =NAME -->`` and ``<!-- / -->``. The command
``python -m benchmarks page explanation`` writes all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from benchmarks.front.explanation import (
    fusion,
    measuring,
    planning,
    serving,
    sharding,
    verifier,
    workload,
)
from benchmarks.harness.result_file import ROOT
from nostall.core.files.atomic import write_atomically

FOLDER = ROOT.parent / "docs" / "explanation"
PAGES: Mapping[str, Callable[[], dict[str, str]]] = {
    "codegen.md": fusion.codegen,
    "cost-model.md": fusion.cost_model,
    "measuring.md": measuring.figures,
    "pipeline-planners.md": planning.figures,
    "serving.md": serving.figures,
    "sharding.md": sharding.figures,
    "verifier-evidence.md": verifier.figures,
    "workload.md": workload.figures,
}
"""Page -> its figures by name."""
_FIGURE = re.compile(r"<!-- =([\w-]+) -->(.*?)<!-- / -->", re.DOTALL)


def filled(text: str, figures: Mapping[str, str]) -> str:
    """The text with the present figures.

    Raises KeyError if the text has a figure that ``figures`` lacks, or lacks one that it has.
    """
    if missing := figures.keys() - set(used(text)):
        raise KeyError(f"the page does not show {', '.join(sorted(missing))}")
    return _FIGURE.sub(lambda found: f"<!-- ={found[1]} -->{figures[found[1]]}<!-- / -->", text)


def used(text: str) -> list[str]:
    """Names of the figures of a text."""
    return [found[1] for found in _FIGURE.finditer(text)]


def write() -> None:
    """Write the figures of all pages."""
    for name, figures in PAGES.items():
        path = FOLDER / name
        write_atomically(path, filled(path.read_text("utf-8"), figures()).encode())
