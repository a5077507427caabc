"""Verbs are found when they are asked for, and cost nothing before."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from nostall.cli import app
from nostall.cli.verbs import VERBS


def test_the_help_page_names_every_verb() -> None:
    page = CliRunner().invoke(app, ["--help"])
    assert page.exit_code == 0
    assert all(f" {verb} " in page.output for verb in VERBS)


def test_an_unknown_verb_is_bad_usage() -> None:
    page = CliRunner().invoke(app, ["tunes"])
    assert page.exit_code == 2
    assert "No such command 'tunes'" in page.output


def test_starting_imports_no_level() -> None:
    said = "import sys, nostall.cli; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "nostall.cli.verbs" in loaded
    assert not loaded & {"numba", "networkx", "nostall.sass", "nostall.parallel", "nostall.tuning"}
