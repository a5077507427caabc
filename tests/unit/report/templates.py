"""Templates and style sheets of the reports, for tests."""

from __future__ import annotations

from importlib import resources


def read_template(name: str) -> str:
    return resources.files("nostall.report").joinpath("templates", name).read_text("utf-8")
